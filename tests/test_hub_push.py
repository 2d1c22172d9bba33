"""`flashmap push`: what is checked before, what is uploaded, and what a Hub that says no sounds like."""

import http.server
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.utils import filter_repo_objects
from tiny_files import write_drafter

from flashmap_hf import hub_card, hub_push
from flashmap_hf.cli import main

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("training.json", "demo.json")
EVALUATED = {  # as little as a card shows of one
    "provenance": {
        "commit": "0" * 40,
        "versions": {"torch": "2", "flashmap-hf": None},
        "command": "flashmap evaluate",
        "time": "2026-01-01T00:00:00+00:00",
        "machine": {"processor": "P", "threads": 1, "cpu_capability": "C", "accelerator": None},
    },
    "target_dtype": "float32",
    "prompts": {"file": "few.jsonl"},
    "options": {"max_new_tokens": 8},
    "temperatures": [
        {
            "temperature": 0.0,
            "categories": {},
            "overall": {"prompts": 1, "tokens_per_step": 1.5, "positions": [], "drafter_ms": 1.0, "verify_ms": 2.0},
        }
    ],
}


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    """A folder that may be pushed."""
    folder = write_drafter(tmp_path_factory.mktemp("push") / "drafter")
    for name in MEASURED:
        shutil.copy(ROOT / "hub_cards" / "flashmap-smollm2-135m" / name, folder)
    (folder / "evaluate.json").write_text(json.dumps(EVALUATED))
    hub_card.main(hub_card.Options(folder=folder, license="apache-2.0", base_model="org/tiny"))
    return folder


@pytest.fixture
def folder(complete, tmp_path) -> Path:
    """A copy of it to spoil."""
    return shutil.copytree(complete, tmp_path / "drafter")


class Hub:
    """In place of the client: remembers its calls in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.private = True

    def note(self, name: str, answer: Any = None) -> Any:
        def method(api: HfApi, repo_id: str, **kwargs: Any) -> Any:
            self.calls.append((name, {"repo_id": repo_id, **kwargs}))
            return answer(kwargs) if callable(answer) else answer

        return method


@pytest.fixture
def online(monkeypatch) -> None:
    """As with a token and a network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")


@pytest.fixture
def hub(monkeypatch, online) -> Hub:
    hub = Hub()

    def committed(kwargs: dict[str, Any]) -> Any:
        url = "https://hub/org/tiny/discussions/1" if kwargs["create_pr"] else None
        return SimpleNamespace(commit_url="https://hub/org/tiny/commit/1", pr_url=url)

    monkeypatch.setattr(HfApi, "create_repo", hub.note("create_repo"))
    monkeypatch.setattr(HfApi, "repo_info", hub.note("repo_info", lambda _: SimpleNamespace(private=hub.private)))
    monkeypatch.setattr(HfApi, "create_branch", hub.note("create_branch"))
    monkeypatch.setattr(HfApi, "upload_folder", hub.note("upload_folder", committed))
    return hub


def push(folder: Path, *options: str) -> int:
    return main(["push", "--folder", str(folder), "--repo-id", "org/tiny", *options])


def complaint(capsys, folder: Path, *options: str) -> str:
    assert push(folder, *options) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    line = printed.err.splitlines()[-1]
    assert line.startswith("flashmap: ")
    return line


# --- what is uploaded -----------------------------------------------------------------------------------------------


def test_the_listed_files_and_no_others(folder, hub, capsys):
    (folder / "evaluate.partial.jsonl").write_text("{}\n")
    (folder / "token.json").write_text("{}")
    (folder / "notes").mkdir()
    (folder / "notes" / "config.json").write_text("{}")
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / ".cache" / "huggingface" / "x.lock").touch()
    assert push(folder) == 0
    (created, upload) = hub.calls
    assert created == ("create_repo", {"repo_id": "org/tiny", "private": None, "exist_ok": True})
    sent = {"README.md", "config.json", "generation_config.json", "model.safetensors", "evaluate.json", *MEASURED}
    assert set(upload[1]["allow_patterns"]) == sent
    there = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert set(filter_repo_objects(there, allow_patterns=upload[1]["allow_patterns"])) == sent
    assert upload[1]["folder_path"] == folder
    assert (upload[1]["revision"], upload[1]["create_pr"]) == (None, False)
    assert upload[1]["commit_message"].startswith("FlashMap drafter, flashmap-hf ")
    printed = capsys.readouterr().out
    assert "left out: evaluate.partial.jsonl, notes/config.json, token.json" in printed
    assert printed.splitlines()[-1] == "https://hub/org/tiny/commit/1"


def test_branch_private_and_message(folder, hub):
    assert push(folder, "--private", "--branch", "v2", "--message", "Longer training") == 0
    assert [name for name, _ in hub.calls] == ["create_repo", "repo_info", "create_branch", "upload_folder"]
    assert hub.calls[0][1]["private"] is True
    assert hub.calls[2][1] == {"repo_id": "org/tiny", "branch": "v2", "exist_ok": True}
    assert (hub.calls[3][1]["revision"], hub.calls[3][1]["commit_message"]) == ("v2", "Longer training")


def test_a_pull_request_is_named(folder, hub, capsys):
    assert push(folder, "--create-pr") == 0
    assert hub.calls[-1][1]["create_pr"] is True
    assert capsys.readouterr().out.splitlines()[-1] == "https://hub/org/tiny/discussions/1"


def test_nothing_private_goes_to_a_public_repository(folder, hub, capsys):
    hub.private = False
    assert "org/tiny is there already and public" in complaint(capsys, folder, "--private")
    assert "upload_folder" not in [name for name, _ in hub.calls]


def test_the_recipe_of_custom_generate_goes_along(folder, hub):
    (folder / "custom_generate").mkdir()
    for name in ("generate.py", "other.py"):
        (folder / "custom_generate" / name).write_text("def generate(model, **kwargs): ...")
    names = hub_push.check_folder(folder)
    assert "custom_generate/generate.py" in names and "custom_generate/other.py" not in names


def test_weights_in_parts_are_a_drafter_too(folder, hub):
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (folder / name).write_bytes(b"x")
    assert set(hub_push.check_folder(folder)) >= {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


# --- what is checked before -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("config.json", "pass a folder that `flashmap train` or `save_pretrained` wrote"),
        ("training.json", "`flashmap train` wrote"),
        ("evaluate.json", "run `flashmap evaluate --drafter"),
        ("README.md", "run `flashmap card --folder"),
        ("model.safetensors", "there is no model.safetensors"),
    ],
)
def test_what_is_missing_is_named_with_the_way_out(folder, hub, capsys, name, way_out):
    (folder / name).unlink()
    line = complaint(capsys, folder)
    assert way_out in line and str(folder) in line
    assert hub.calls == []


def test_a_card_that_is_out_of_date_is_refused(folder, hub, capsys):
    path = folder / "README.md"
    path.write_text(path.read_text().replace("1.50", "2.50"))
    assert "README.md is not what its JSON files give" in complaint(capsys, folder)
    assert hub.calls == []


@pytest.mark.parametrize("name", ["optimizer.pt", "sub/data.pkl", "pytorch_model.bin"])
def test_pickles_are_refused(folder, hub, capsys, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    assert f"holds {name}: pickled files run code" in complaint(capsys, folder)
    assert hub.calls == []


def test_a_big_file_that_does_not_belong_there_is_refused(folder, hub, capsys):
    with (folder / "features.safetensors").open("wb") as file:
        file.truncate(hub_push.BIG + 1)
    shutil.copy(folder / "features.safetensors", folder / "features.bin2")
    (folder / "features.safetensors").unlink()
    assert "holds features.bin2, no part of a drafter's repository" in complaint(capsys, folder)
    assert hub.calls == []


def test_damaged_weights_are_refused(folder, hub, capsys):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "model.safetensors is truncated or damaged" in complaint(capsys, folder)
    assert hub.calls == []


def test_a_path_of_this_machine_is_refused(folder, hub, capsys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"target_name": "/home/me/target"}))
    assert "target_name '/home/me/target' is a path of this machine" in complaint(capsys, folder)
    assert hub.calls == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--repo-id", "tiny"], "repo_id='tiny' is no Hub id of the form owner/name"),
        (["--create-pr", "--branch", "v2"], "leave out --branch"),
        (["--message", " "], "message is empty"),
        (["--folder", "/nowhere/at/all"], "folder='/nowhere/at/all' is no folder"),
    ],
)
def test_bad_arguments(folder, hub, capsys, options, message):
    assert message in complaint(capsys, folder, *options)
    assert hub.calls == []


# --- a Hub that says no ---------------------------------------------------------------------------------------------


def test_offline_mode_is_named(folder, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE=1 forbids to reach the Hub: unset it" in complaint(capsys, folder)


def test_without_a_token_the_way_out_is_named(folder, online, monkeypatch, capsys):
    monkeypatch.setattr(hub_push, "get_token", lambda: None)
    assert "run `hf auth login`, or set HF_TOKEN" in complaint(capsys, folder)


@pytest.fixture
def answers(monkeypatch, online) -> Iterator[dict[str, Any]]:
    """A Hub on this machine that answers every request with `status` and `body`; it counts them in `requests`."""
    state: dict[str, Any] = {"status": 200, "body": {}, "requests": []}

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            state["requests"].append(f"{self.command} {self.path}")
            body = json.dumps(state["body"]).encode()
            self.send_response(state["status"])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "the Hub does not know the token (401): run `hf auth login` again"),
        (403, "the Hub does not let this token write to org/tiny (403): use a token with write access"),
        (404, "the Hub has no org/tiny that this token may see (404)"),
        (400, "the Hub refused (400): "),
        (503, "the Hub cannot answer now (503): run it again later"),
    ],
)
def test_each_answer_is_one_sentence(folder, answers, capsys, status, message):
    answers |= {"status": status, "body": {"error": "because of that"}}
    line = complaint(capsys, folder)
    assert message in line
    assert "because of that" in line or status != 400
    assert "hf_test" not in line
    assert "POST /api/repos/create" in answers["requests"]
    assert not any("upload" in request or "commit" in request for request in answers["requests"])


def test_no_network_is_named(folder, online, monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        line = complaint(capsys, folder)
    assert "the Hub cannot be reached (" in line and "check the connection" in line


def test_the_client_is_the_real_one():
    assert hub_push.HfApi is huggingface_hub.HfApi
