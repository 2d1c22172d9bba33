"""`FlashMapDrafter.from_pretrained("org/name")` through the real client, against a Hub on loopback."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import Hub, Repo
from huggingface_hub import constants
from safetensors.torch import load_file
from tiny_files import write_drafter, write_target
from transformers import AutoModel

from flashmap_hf import FlashMapDrafter, drafters
from flashmap_hf.loading import pinned

pytest_plugins = ["hub_client"]

ROOT = Path(__file__).resolve().parents[2]
NAME = "acme/drafter"
WEIGHTS = "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 31\n".format("0" * 64)
TOKEN = "hf_secret"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Those of a drafter that drafts at most two tokens."""
    folder = write_drafter(tmp_path_factory.mktemp("loading") / "drafter")
    drafter = FlashMapDrafter.from_pretrained(folder)
    drafter.generation_config.num_assistant_tokens = 2
    drafter.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def repo(hub: Hub, files: dict[str, bytes]) -> Repo:
    return hub.repo(NAME, files)


def complaint(*args: Any, kind: type[Exception] = OSError, **kwargs: Any) -> str:
    """The one line that a refusal is."""
    with pytest.raises(kind, match="cannot be loaded") as caught:
        FlashMapDrafter.from_pretrained(*args, **kwargs)
    said = str(caught.value)
    assert said.startswith(f"drafter {NAME!r} (revision ")
    assert "\n" not in said and TOKEN not in said
    return said


def downloaded(hub: Hub) -> list[str]:
    """The files whose content was sent, by name."""
    return sorted(path.split("/")[-1] for path in [*hub.seen("GET", "/resolve/"), *hub.seen("GET", "/cdn/")])


# --- there ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [NAME, Path(NAME)])
def test_download_is_bit_equal(hub, repo, files, name, tmp_path):
    drafter, info = FlashMapDrafter.from_pretrained(name, output_loading_info=True)
    (tmp_path / WEIGHTS).write_bytes(files[WEIGHTS])
    saved = load_file(tmp_path / WEIGHTS)
    assert all(torch.equal(value, saved[key]) for key, value in drafter.state_dict().items())
    assert drafter.generation_config.num_assistant_tokens == 2
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert downloaded(hub) == ["config.json", "generation_config.json", WEIGHTS]


def test_a_second_load_asks_for_the_commit_only(hub, repo):
    FlashMapDrafter.from_pretrained(NAME)
    hub.requests.clear()
    FlashMapDrafter.from_pretrained(NAME)
    assert hub.seen("GET") == [f"/api/models/{NAME}/revision/main"] or hub.seen("GET") == [f"/api/models/{NAME}"]
    assert hub.seen("HEAD") == []


def test_auto_model_and_the_command_line_load_it_alike(hub, repo):
    assert type(AutoModel.from_pretrained(NAME)) is FlashMapDrafter
    drafters.check(NAME)
    drafters.load(NAME, dtype=torch.float32, device=torch.device("cpu"))
    assert downloaded(hub).count(WEIGHTS) == 1


def test_a_new_commit_is_seen_and_an_old_one_can_be_kept(hub, repo, files):
    first = repo.refs["main"]
    FlashMapDrafter.from_pretrained(NAME)
    repo.commit(files | {"generation_config.json": b'{"num_assistant_tokens": 1}'})
    repo.refs["v1"] = first
    hub.requests.clear()
    assert FlashMapDrafter.from_pretrained(NAME).generation_config.num_assistant_tokens == 1
    assert downloaded(hub) == ["generation_config.json"]  # the others are the same blobs
    for revision in (first, "v1"):
        assert FlashMapDrafter.from_pretrained(NAME, revision=revision).generation_config.num_assistant_tokens == 2


def test_files_come_from_one_commit_though_the_branch_moves_meanwhile(hub, repo, files):
    """Everything is asked for by the commit that the branch had at the start."""
    commit = repo.refs["main"]
    assert FlashMapDrafter.from_pretrained(NAME).config._commit_hash == commit
    resolved = [path for method in ("HEAD", "GET") for path in hub.seen(method, "/resolve/")]
    assert resolved and all(f"/resolve/{commit}/" in path for path in resolved)


def test_a_subfolder(hub, files):
    hub.repo(NAME, {f"small/{name}": data for name, data in files.items()})
    for data in files.values():
        hub.repo("acme/unused", {"x": data})
    assert FlashMapDrafter.from_pretrained(NAME, subfolder="small").generation_config.num_assistant_tokens == 2
    assert "has no config.json" in complaint(NAME)


def test_without_generation_options_the_defaults_count(hub, files):
    hub.repo(NAME, {name: data for name, data in files.items() if name != "generation_config.json"})
    assert FlashMapDrafter.from_pretrained(NAME).generation_config.num_assistant_tokens is None


def test_shards(hub, files, tmp_path):
    (tmp_path / "one").mkdir()
    for name, data in files.items():
        (tmp_path / "one" / name).write_bytes(data)
    FlashMapDrafter.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "many", max_shard_size="10KB")
    hub.repo(NAME, {path.name: path.read_bytes() for path in (tmp_path / "many").iterdir()})
    one, many = FlashMapDrafter.from_pretrained(tmp_path / "one"), FlashMapDrafter.from_pretrained(NAME)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), many.parameters(), strict=True))
    assert sum(name.endswith(".safetensors") for name in downloaded(hub)) > 1


# --- who may --------------------------------------------------------------------------------------------------------


def test_a_gated_repository(hub, files):
    hub.repo(NAME, files, gated=True)
    hub.user("hf_other", "mallory")
    hub.user(TOKEN, "alice", sees=(NAME,))
    for token in (False, "hf_other"):
        said = complaint(NAME, token=token)
        assert f"is gated: ask for access at {hub.url}/{NAME}, then run `hf auth login`, or pass token=" in said
    assert not hub.seen("GET", "/cdn/")
    FlashMapDrafter.from_pretrained(NAME, token=TOKEN)


def test_a_private_repository_and_one_that_is_not_there_look_alike(hub, files):
    hub.user("hf_other", "mallory")
    missing = [complaint(NAME, token=token) for token in (False, "hf_other")]
    hub.repo(NAME, files, private=True)
    hub.user(TOKEN, "acme")
    assert [complaint(NAME, token=token) for token in (False, "hf_other")] == missing
    assert (
        "has no such repository, or hides it: check the spelling; for a private one run `hf auth login`" in missing[0]
    )
    FlashMapDrafter.from_pretrained(NAME, token=TOKEN)


def test_a_token_of_the_environment_counts_and_goes_to_the_hub_alone(hub, files, monkeypatch):
    hub.repo(NAME, files, private=True)
    hub.user(TOKEN, "acme")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    FlashMapDrafter.from_pretrained(NAME)
    carries = {request.host: "authorization" in request.headers for request in hub.requests}
    assert carries == {"127.0.0.1": True, "localhost": False}  # the second is where the weights lie


def test_an_invalid_token(hub, repo):
    assert "does not know the token (401): run `hf auth login`" in complaint(NAME, token="hf_wrong")


def test_a_hub_that_forbids(hub, repo):
    hub.fail["/api/models/"] = 403
    assert "does not let this token read it (403)" in complaint(NAME)


@pytest.mark.parametrize("revision", ["v7", "f" * 40])
def test_a_revision_that_is_not_there(hub, repo, revision):
    said = complaint(NAME, revision=revision)
    assert f"(revision {revision})" in said
    assert f"has no such revision: choose a branch, tag or commit of {hub.url}/{NAME}/commits/main" in said


# --- what breaks on the way -----------------------------------------------------------------------------------------


def test_an_interrupted_download_is_resumed(hub, repo, files, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # bytes that are written at once; 10 MiB otherwise
    hub.cut["/cdn/"] = 5000
    drafter = FlashMapDrafter.from_pretrained(NAME)
    first, second = [request for request in hub.requests if "/cdn/" in request.path]
    assert "range" not in first.headers and second.headers["range"] == "bytes=5000-"
    (blob,) = [p for p in Path(constants.HF_HUB_CACHE).rglob(WEIGHTS) if p.is_file()]
    assert blob.read_bytes() == files[WEIGHTS]
    assert not drafter.training


def test_one_that_cannot_be_resumed_leaves_nothing_half_and_is_fetched_anew(hub, repo, files):
    hub.cut["/cdn/"] = 5000
    original = dict(hub.objects)

    class Vanishing(dict):
        """The object can be read once."""

        def __getitem__(self, oid: str) -> bytes:
            hub.fail["/cdn/"] = 503
            return super().__getitem__(oid)

    hub.objects = Vanishing(original)
    assert "the Hub cannot answer now (503): try again later" in complaint(NAME)
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
    hub.objects, hub.fail = original, {}
    hub.requests.clear()
    FlashMapDrafter.from_pretrained(NAME)
    (fetched,) = [request for request in hub.requests if "/cdn/" in request.path]
    assert "range" not in fetched.headers


def test_a_file_that_is_shorter_than_announced(hub, repo, files):
    hub.short["/cdn/"] = 5000
    assert "a file came shorter than the Hub announced: run it again" in complaint(NAME)
    hub.short.clear()
    FlashMapDrafter.from_pretrained(NAME)


def test_no_hub_there(hub, repo, monkeypatch):
    nobody = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", nobody + "/{repo_id}/resolve/{revision}/{filename}")
    assert "the Hub cannot be reached" in complaint(NAME)


def test_a_cached_drafter_does_not_need_the_hub(hub, repo):
    FlashMapDrafter.from_pretrained(NAME)
    hub.fail["/"] = 503
    FlashMapDrafter.from_pretrained(NAME)
    assert "the Hub cannot answer now (503)" in complaint(NAME, force_download=True)


def test_damaged_weights_in_the_cache_are_fetched_again(hub, repo, files):
    FlashMapDrafter.from_pretrained(NAME)
    (cached,) = Path(constants.HF_HUB_CACHE).rglob(WEIGHTS)
    cached.resolve().write_bytes(files[WEIGHTS][:5000])
    assert "its weights are damaged" in (said := complaint(NAME)) and "force_download=True" in said
    FlashMapDrafter.from_pretrained(NAME, force_download=True)
    FlashMapDrafter.from_pretrained(NAME)


# --- what is not a drafter ------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it leaves a folder."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (os.mkdir, (self.path,))


def test_a_pickle_is_neither_loaded_nor_converted(hub, files, tmp_path):
    """For its main branch, transformers would send repository and token to a service that converts weights."""
    kept = {name: data for name, data in files.items() if name != WEIGHTS}
    hub.repo(NAME, kept | {"pytorch_model.bin": pickle.dumps(Bomb(str(tmp_path / "exploded")))})
    hub.user(TOKEN, "acme")
    said = complaint(NAME, token=TOKEN)
    assert (
        f"pytorch_model.bin is pickled, can run code, and is never opened; ask its author at {hub.url}/{NAME}" in said
    )
    assert "use_safetensors" not in said
    assert not (tmp_path / "exploded").exists()
    assert not hub.seen("GET", ".bin") and not hub.seen("GET", "discussions") and not hub.seen("POST")


def test_a_git_lfs_pointer_in_place_of_the_weights(hub, files):
    hub.repo(NAME, files | {WEIGHTS: POINTER.encode()})
    said = complaint(NAME)
    assert f"its {WEIGHTS} is a Git LFS pointer, uploaded in place of the weights: ask its author" in said


def test_no_weights_at_all(hub, files):
    hub.repo(NAME, {name: data for name, data in files.items() if name != WEIGHTS})
    assert f"the repository has no {WEIGHTS}: is it a drafter? See {hub.url}/{NAME}/tree/main" in complaint(NAME)


def test_the_repository_of_a_target(hub, tmp_path):
    folder = write_target(tmp_path / "target")
    hub.repo(NAME, {path.name: path.read_bytes() for path in folder.iterdir()})
    assert "holds a model of type 'llama', not a FlashMap drafter" in complaint(NAME)
    assert not hub.seen("GET", "/cdn/")  # said before the weights are fetched


def test_an_empty_repository(hub):
    hub.repo(NAME, {})
    assert "has no config.json" in complaint(NAME)


def test_a_value_that_is_not_possible(hub, files):
    fields = json.loads(files["config.json"]) | {"num_steps": 7}
    hub.repo(NAME, files | {"config.json": json.dumps(fields).encode()})
    assert "num_steps=7: choose one of 1, 2" in complaint(NAME, kind=ValueError)


def test_each_trouble_has_words_of_its_own(hub, files, tmp_path):
    """Said with the names of what differs taken out, no two are the same."""
    troubles: list[tuple[dict[str, bytes], dict[str, Any]]] = [
        (files, {"gated": True}),
        (files, {"private": True}),
        ({}, {}),
        (files | {WEIGHTS: POINTER.encode()}, {}),
        (files | {WEIGHTS: files[WEIGHTS][:5000]}, {}),
        ({name: data for name, data in files.items() if name != WEIGHTS}, {}),
        ({name: data for name, data in files.items() if name != WEIGHTS} | {"model.pt": b""}, {}),
    ]
    said = []
    for number, (content, options) in enumerate(troubles):
        hub.repo(f"acme/drafter{number}", content, **options)
        with pytest.raises(OSError, match="cannot be loaded") as caught:
            FlashMapDrafter.from_pretrained(f"acme/drafter{number}")
        said.append(str(caught.value).replace(f"drafter{number}", "drafter"))
    assert len(set(said)) == len(troubles)


# --- offline --------------------------------------------------------------------------------------------------------


def test_offline_and_cached_makes_no_request(hub, repo, monkeypatch):
    FlashMapDrafter.from_pretrained(NAME)
    hub.requests.clear()
    FlashMapDrafter.from_pretrained(NAME, local_files_only=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert FlashMapDrafter.from_pretrained(NAME).generation_config.num_assistant_tokens == 2
    assert hub.requests == []


def test_offline_and_not_cached_names_the_switch(hub, repo, monkeypatch):
    assert "(revision v7)" in (said := complaint(NAME, revision="v7", local_files_only=True))
    assert "not completely in the local cache and local_files_only=True forbids a download: unset it" in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = complaint(NAME, revision="v7")
    assert "(revision v7)" in said and "HF_HUB_OFFLINE=1 forbids a download: unset it" in said
    assert hub.requests == []


def test_offline_and_half_cached(hub, repo, monkeypatch):
    drafters.check(NAME)  # the configuration only
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "not completely in the local cache and HF_HUB_OFFLINE=1" in complaint(NAME)


ELSEWHERE = """
from flashmap_hf import FlashMapDrafter
for revision in ("main", "v7"):
    try:
        print(FlashMapDrafter.from_pretrained("acme/drafter", revision=revision).generation_config.num_assistant_tokens)
    except OSError as error:
        print(error)
"""


def test_the_environment_is_what_users_set(hub, repo, tmp_path):
    """HF_ENDPOINT and HF_HUB_OFFLINE, in interpreters of their own."""
    outputs = []
    for offline in ("0", "1"):
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": offline}
        finished = subprocess.run(
            [sys.executable, "-c", ELSEWHERE],
            capture_output=True, text=True, timeout=600, check=True,
            env={**os.environ, **variables, "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        outputs.append(finished.stdout.splitlines())
        if offline == "0":
            assert downloaded(hub).count(WEIGHTS) == 1
            hub.requests.clear()
    assert hub.requests == []
    assert [lines[0] for lines in outputs] == ["2", "2"]
    assert "has no such revision" in outputs[0][1] and "HF_HUB_OFFLINE=1 forbids a download" in outputs[1][1]


def test_a_folder_or_nothing_is_not_pinned(tmp_path):
    for name in (None, tmp_path, "a/b/c"):
        options = {"revision": "main"}
        assert pinned(name, options) is options
