"""The page without a browser: what a run yields, per tab; the command; what the Space holds."""

import json
import shutil
import socket
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from huggingface_hub import RepoCard
from tiny_files import write_drafter, write_target

from flashmap_hf import cli
from flashmap_hf.demo import command
from flashmap_hf.demo.command import Options
from flashmap_hf.demo.page import build, theme
from flashmap_hf.demo.theatre import BLOCK_SIZE, OWN, Theatre, controls

ROOT = Path(__file__).resolve().parents[2]
TAB = SimpleNamespace(session_hash="a")
STATUS, BOARD, PLAIN, FLASHMAP, REPORT, RUN = 0, 1, 3, 5, 6, 7


@pytest.fixture(scope="module")
def theatre(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return Theatre(str(write_target(root / "target")), str(write_drafter(root / "drafter")), "float32")


def chosen(theatre: Theatre, prompt: str = "Hi", **changes: Any) -> list[Any]:
    values = {
        "target": theatre.target, "drafter": theatre.drafter, "block": 4, "steps": OWN, "temperature": 0,
        "rule": "auto", "adaptive": False, "tree": False, "tokens": 12, "seed": 0,
    }  # fmt: skip
    return [prompt, *(values | changes).values()]


def test_a_run_ends_with_both_texts_and_the_charts(theatre):
    shows = list(theatre.run(*chosen(theatre), request=TAB))
    last = shows[-1]
    assert "times" in last[STATUS] or "Too few" in last[STATUS]
    assert "identical" in last[BOARD]
    assert last[PLAIN] and last[FLASHMAP].count("<span") >= 1
    assert "Timeline" in last[REPORT]
    assert last[RUN]["value"] == "Run"
    assert theatre.jobs == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": " "}, "The prompt is empty"),
        ({"temperature": -1}, "Temperature must be 0"),
        ({"drafter": "<img src=x>"}, "&lt;img src=x&gt;"),
        ({"tokens": 4000}, "at most 1024"),
    ],
)
def test_what_cannot_work_is_one_escaped_sentence(theatre, changes, message):
    last = list(theatre.run(*chosen(theatre, **changes), request=TAB))[-1]
    assert message in last[STATUS]
    assert 'role="alert"' in last[STATUS]
    assert "Traceback" not in last[STATUS]
    assert "<img" not in "".join(map(str, last))
    assert last[RUN]["value"] == "Run"


def test_a_stop_concerns_its_own_tab(theatre):
    other = SimpleNamespace(session_hash="b")
    running = theatre.run(*chosen(theatre, tokens=200), request=TAB)
    next(running)
    theatre.stop(other)
    assert not theatre.jobs["a"].stop.is_set()
    theatre.stop(TAB)
    assert theatre.jobs["a"].stop.is_set()
    assert "Stopped" in list(running)[-1][STATUS]
    assert theatre.jobs == {}


def test_a_second_run_of_a_tab_ends_its_first(theatre):
    first = theatre.run(*chosen(theatre, tokens=200), request=TAB)
    next(first)
    job = theatre.jobs["a"]
    second = list(theatre.run(*chosen(theatre, "Ho"), request=TAB))
    assert job.stop.is_set()
    assert "identical" in second[-1][BOARD]
    first.close()


def test_emptied_fields_are_the_defaults():
    found = controls("Hi", None, None, None, None, None, "auto", False, False, None, None)
    assert (found.max_new_tokens, found.temperature, found.seed, found.block_size) == (96, 0.0, 0, None)


def test_the_page_opens_with_the_drafters_own_block_size(theatre, tmp_path):
    assert theatre.block_size() == 5
    assert Theatre("", str(tmp_path)).block_size() == BLOCK_SIZE


def test_no_endpoint_is_public_and_nothing_is_reported(theatre):
    page = build(theatre)
    assert page.analytics_enabled is False
    public = [fn.name for fn in page.fns.values() if fn.api_visibility == "public" and fn.targets[0][1] != "unload"]
    assert public == []


def test_fonts_are_those_of_the_system():
    assert all(type(font) is gr.themes.Font for font in (*theme()._font, *theme()._font_mono))


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_serves_what_was_asked_for(monkeypatch, theatre):
    calls = []
    monkeypatch.setattr(gr.Blocks, "launch", lambda self, **options: calls.append(options))
    arguments = ["--port", "8123", "--host", "0.0.0.0", "--target", theatre.target, "--drafter", theatre.drafter]
    assert cli.main(["demo", *arguments]) == 0
    assert cli.main(["demo", *arguments, "--share"]) == 0
    first, second = calls
    assert (first["server_port"], first["server_name"], first["share"]) == (8123, "0.0.0.0", False)
    assert second["share"] is True
    assert first["run_history"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--port", "0"], "port must be from 1 to 65535, not 0"), (["--dtype", "int8"], "dtype must be one of auto")],
)
def test_bad_options_are_one_line(capsys, arguments, message):
    assert cli.main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_taken_port_is_one_line(capsys, theatre):
    page = build(theatre)
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command.launch(page, Options(port=port), prevent_thread_lock=True, quiet=True)
    try:
        models = ["--target", theatre.target, "--drafter", theatre.drafter]
        assert cli.main(["demo", "--port", str(port), *models]) == 2
        assert str(port) in capsys.readouterr().err.splitlines()[-1]
    finally:
        page.close(verbose=False)


def test_without_gradio_the_extra_is_named(monkeypatch, capsys):
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'gradio'", name="gradio")

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    assert cli.main(["demo"]) == 2
    assert "demo needs gradio: pip install 'flashmap-hf[demo]'" in capsys.readouterr().err


# --- the Space ------------------------------------------------------------------------------------------------------


def test_the_card_is_one_that_spaces_accept():
    card = RepoCard.load(ROOT / "hub_cards" / "space" / "README.md").data.to_dict()
    assert (card["sdk"], card["app_file"]) == ("gradio", "app.py")
    assert card["license"] == "apache-2.0"
    assert len(card["short_description"]) <= 60
    assert card["colorFrom"] in {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
    assert card["sdk_version"].split(".")[0] == "6"


def test_the_space_asks_for_what_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = (ROOT / "hub_cards" / "space" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert asked == project["dependencies"] + project["optional-dependencies"]["demo"]


@pytest.mark.slow
def test_the_space_runs_as_it_is(tmp_path):
    """Put together by `make space`, and run from there with nothing of this checkout on the path."""
    space = tmp_path / "space"
    subprocess.run([shutil.which("make"), "-s", "space", f"SPACE={space}"], cwd=ROOT, check=True, timeout=60)
    assert {path.name for path in space.iterdir()} == {
        "README.md",
        "requirements.txt",
        "app.py",
        "flashmap_hf",
        "hub_cards",
    }
    script = "import app, flashmap_hf, json; print(json.dumps([flashmap_hf.__file__, type(app.demo).__name__]))"
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=space, capture_output=True, text=True, timeout=300, check=True
    )
    assert json.loads(finished.stdout.splitlines()[-1]) == [str(space / "flashmap_hf" / "__init__.py"), "Blocks"]
