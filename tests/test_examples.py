"""The examples, run as scripts on a tiny target and drafter."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from tiny_files import write_drafter, write_target

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("examples")
    return ["--target", str(write_target(root / "target")), "--drafter", str(write_drafter(root / "drafter"))]


@pytest.fixture
def run_example(monkeypatch):
    def run_example(name: str, *arguments: str) -> int:
        """Exit code of `python examples/NAME ARGUMENTS`, in this process."""
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as exit_:
            return int(exit_.code or 0)
        return 0

    return run_example


def test_generate_streams_and_counts(run_example, folders, capsys):
    assert run_example("generate.py", "Hi", *folders, "--max-new-tokens", "5") == 0
    text, counts = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert text.strip()
    assert counts.startswith("5 tokens in ")
    assert "per step" in counts


def test_demo_streams_both_sides_and_prints_the_table(run_example, folders, capsys, tmp_path):
    measured = tmp_path / "measured.json"
    options = ["--rounds", "2", "--max-new-tokens", "5", "--dtype", "float32", "--json", str(measured)]
    assert run_example("demo.py", *folders, *options) == 0
    printed = capsys.readouterr().out
    for name in ("chat", "code", "maths"):
        assert printed.index(f"{name}, plain") < printed.index(f"{name}, FlashMap") < printed.index("speed-up")
    for row in ("tokens/target step", "by prompt lookup", "accepted, %", "of a plain step", "identical"):
        assert row in printed
    written = json.loads(measured.read_text(encoding="utf-8"))
    assert [result["name"] for result in written["prompts"]] == ["chat", "code", "maths"]
    assert all(result["identical"] for result in written["prompts"])
    assert (written["rounds"], written["target_dtype"]) == (2, "float32")
    assert written["provenance"]["command"].startswith("demo.py ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int8"], "dtype must be one of"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--rounds", "0"], "rounds=0"),
        (["--max-new-tokens", "5000"], "the target holds 512 in all"),
    ],
)
def test_demo_refuses_in_one_line(run_example, folders, capsys, options, message):
    assert run_example("demo.py", *folders, *options) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_train_drafter_makes_a_drafter_with_a_card(run_example, tmp_path, capsys):
    target = write_target(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {word}."}) + "\n" for word in ("one", "two", "three")))
    args = ["--target", str(target), "--prompts", str(prompts), "--out", str(tmp_path / "run"), "--max-minutes", "0.01"]
    assert run_example("train_drafter.py", *args, "--max-tokens", "700", "--base-model", "org/tiny") == 0
    assert "Ready: FlashMapDrafter" in capsys.readouterr().out
    drafter = tmp_path / "run" / "run" / "drafter"
    assert {"README.md", "config.json", "evaluate.json", "model.safetensors", "training.json"} <= {
        path.name for path in drafter.iterdir()
    }


@pytest.mark.parametrize(("name", "lines"), [("generate.py", 60), ("train_drafter.py", 60), ("demo.py", 120)])
def test_examples_stay_short(name, lines):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < lines
