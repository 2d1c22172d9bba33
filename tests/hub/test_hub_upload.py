"""`push_to_hub` and `flashmap push` through the real client, against a Hub on loopback: back byte for byte."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_server import Hub
from huggingface_hub import ModelCard, constants, snapshot_download
from test_hub_push import EVALUATED, MEASURED
from tiny_files import write_drafter

from flashmap_hf import FlashMapDrafter, hub_card
from flashmap_hf.cli import main
from flashmap_hf.sharing import TAGS, complete

pytest_plugins = ["hub_client"]

ROOT = Path(__file__).resolve().parents[2]
NAME = "acme/tiny"
TOKEN = "hf_write"


@pytest.fixture(scope="module")
def complete_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that may be pushed: weights, card, measurements, a picture and a big file of weights in parts."""
    folder = write_drafter(tmp_path_factory.mktemp("upload") / "drafter")
    for name in (*MEASURED, "evaluate.png"):
        shutil.copy(ROOT / "hub_cards" / "flashmap-smollm2-135m" / name, folder)
    (folder / "evaluate.json").write_text(json.dumps(EVALUATED))
    hub_card.main(
        hub_card.Options(folder=folder, license="apache-2.0", base_model="org/tiny", datasets=["org/prompts"])
    )
    return folder


@pytest.fixture
def mine(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A Hub where the token of the environment may write to acme/."""
    hub.user(TOKEN, "acme")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture
def drafter(complete_folder: Path) -> FlashMapDrafter:
    drafter = FlashMapDrafter.from_pretrained(complete_folder)
    drafter.generation_config.num_assistant_tokens = 2
    drafter.config.target_name = "org/tiny"
    return drafter


def push(folder: Path, *options: str) -> int:
    return main(["push", "--folder", str(folder), "--repo-id", NAME, *options])


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def equal(one: FlashMapDrafter, other: FlashMapDrafter) -> bool:
    saved = other.state_dict()
    return all(torch.equal(value, saved[name]) for name, value in one.state_dict().items())


# --- flashmap push --------------------------------------------------------------------------------------------------


def test_what_comes_down_is_what_went_up(mine, complete_folder, capsys):
    assert push(complete_folder) == 0
    url = capsys.readouterr().out.splitlines()[-1]
    assert url == f"{mine.url}/{NAME}/commit/{mine.repos[NAME].refs['main']}"
    sent = contents(complete_folder)
    assert {"README.md", "config.json", "model.safetensors", "evaluate.json", "evaluate.png"} <= set(sent)
    assert mine.repos[NAME].files() == sent
    assert contents(Path(snapshot_download(NAME))) == sent
    loaded, local = FlashMapDrafter.from_pretrained(NAME), FlashMapDrafter.from_pretrained(complete_folder)
    assert equal(loaded, local)
    assert sorted(path.split("/")[1] for path in mine.seen("PUT")) == ["lfs", "lfs"]  # weights and picture


def test_pushing_again_sends_no_weights_and_a_new_card(mine, complete_folder, tmp_path):
    assert push(complete_folder) == 0
    mine.requests.clear()
    folder = shutil.copytree(complete_folder, tmp_path / complete_folder.name)
    card = folder / "README.md"
    card.write_text(card.read_text().replace("<!-- notes -->", "<!-- notes -->\nTrained twice.", 1))
    assert push(folder, "--message", "Notes") == 0
    assert mine.seen("PUT") == []
    assert mine.repos[NAME].files() == contents(folder)
    assert mine.repos[NAME].titles[mine.repos[NAME].refs["main"]] == "Notes"


def test_a_branch(mine, complete_folder):
    assert push(complete_folder, "--branch", "v2") == 0
    assert mine.repos[NAME].files("v2") == contents(complete_folder) and mine.repos[NAME].files("main") == {}
    FlashMapDrafter.from_pretrained(NAME, revision="v2")


def test_a_private_repository_stays_private(mine, complete_folder, monkeypatch, capsys):
    assert push(complete_folder, "--private") == 0
    assert mine.repos[NAME].private
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError, match="has no such repository, or hides it"):
        FlashMapDrafter.from_pretrained(NAME)


def test_a_pull_request_by_someone_else(mine, complete_folder, monkeypatch, capsys):
    mine.repo(NAME, {"README.md": b"---\nlicense: mit\n---\n"})
    mine.user("hf_other", "mallory")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert push(complete_folder) == 2
    assert "does not let this token write to acme/tiny (403)" in capsys.readouterr().err
    assert push(complete_folder, "--create-pr") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{mine.url}/{NAME}/discussions/1"
    assert mine.repos[NAME].files("refs/pr/1") == contents(complete_folder)
    assert list(mine.repos[NAME].files()) == ["README.md"]
    FlashMapDrafter.from_pretrained(NAME, revision="refs/pr/1")


def test_a_token_that_may_only_read(mine, complete_folder, capsys):
    mine.user(TOKEN, "acme", write=False)
    assert push(complete_folder) == 2
    assert "use a token with write access" in capsys.readouterr().err
    assert NAME not in mine.repos


def test_a_hub_that_breaks_in_the_middle_leaves_the_repository_as_it_was(mine, complete_folder, capsys):
    assert push(complete_folder) == 0
    before = mine.repos[NAME].refs["main"]
    mine.fail["/commit/"] = 503
    assert push(complete_folder, "--message", "again") == 2
    assert "the Hub cannot answer now (503): run it again later" in capsys.readouterr().err
    assert mine.repos[NAME].refs["main"] == before


# --- push_to_hub ----------------------------------------------------------------------------------------------------


def test_push_to_hub_and_back(mine, drafter):
    commit = drafter.push_to_hub(NAME, commit_message="First", tags=["tiny"])
    assert commit.oid == mine.repos[NAME].refs["main"] and mine.repos[NAME].titles[commit.oid] == "First"
    loaded = FlashMapDrafter.from_pretrained(NAME)
    assert equal(loaded, drafter)
    assert loaded.generation_config.num_assistant_tokens == 2
    card = ModelCard.load(NAME)
    card.validate()
    assert card.data.to_dict() == {
        "base_model": "org/tiny",
        "base_model_relation": "adapter",
        "library_name": "flashmap_hf",
        "pipeline_tag": "text-generation",
        "tags": [*TAGS, "tiny"],
    }
    assert "Nothing was measured" in card.text


def test_a_card_that_is_there_is_kept(mine, drafter, complete_folder):
    assert push(complete_folder) == 0
    before = (complete_folder / "README.md").read_bytes()
    drafter.push_to_hub(NAME, private=True, token=TOKEN)  # private: only where it is made
    assert mine.repos[NAME].files()["README.md"] == before


def test_save_pretrained_pushes_too(mine, drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "tiny", push_to_hub=True, repo_id=NAME, revision="v1", commit_message="v1")
    files = mine.repos[NAME].files("v1")
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md"} == set(files)
    assert all(files[name] == data for name, data in contents(tmp_path / "tiny").items())
    drafter.save_pretrained(tmp_path / "by-its-folder", push_to_hub=True, token=TOKEN)
    assert "acme/by-its-folder" in mine.repos  # in the user's own namespace


def test_what_the_hub_refuses_is_one_sentence(mine, drafter, monkeypatch):
    with pytest.raises(OSError, match=r"does not let this token write to other/tiny \(403\): use a token"):
        drafter.push_to_hub("other/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(OSError, match=r"does not know the token \(401\): run `hf auth login`"):
        drafter.push_to_hub(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="HF_HUB_OFFLINE=1 forbids to reach the Hub: unset it to upload"):
        drafter.push_to_hub(NAME)


# --- the metadata of cards ------------------------------------------------------------------------------------------


def test_the_card_is_valid_to_the_hub(hub, complete_folder):
    card = ModelCard.load(complete_folder / "README.md")
    card.validate()
    assert card.data.to_dict() == {
        "base_model": "org/tiny",
        "base_model_relation": "adapter",
        "datasets": ["org/prompts"],
        "library_name": "flashmap_hf",
        "license": "apache-2.0",
        "metrics": ["tokens_per_step", "acceptance_by_position", "speedup"],
        "pipeline_tag": "text-generation",
        "tags": list(TAGS),
    }


@pytest.mark.parametrize("card", sorted((ROOT / "hub_cards").glob("*/config.json")), ids=lambda p: p.parent.name)
def test_the_cards_of_this_repository_are_valid_to_the_hub(hub, card):
    ModelCard.load(card.parent / "README.md").validate()


def test_the_check_can_fail(hub):
    for field in ("license: GPL", "base_model: SmolLM2", "pipeline_tag: drafting", "metrics: speed"):
        with pytest.raises(ValueError, match=field.split(":")[0]):
            ModelCard(f"---\n{field}\n---\n").validate()


def test_a_card_of_ones_own_is_completed_not_changed():
    own = "---\nlicense: mit\ntags:\n- mine\nlibrary_name: other\nbase_model: org/base\n---\n# Mine\n"
    data = complete(ModelCard(own), "org/tiny").data.to_dict()
    assert data == {
        "license": "mit",
        "tags": ["mine", *TAGS],
        "library_name": "other",
        "base_model": "org/base",
        "pipeline_tag": "text-generation",
    }
    assert complete(ModelCard("---\n{}\n---\n"), "./here").data.get("base_model") is None
