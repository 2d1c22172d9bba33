"""`flashmap list` through the real client, against a Hub on loopback."""

import json
from pathlib import Path

import pytest
from hub_server import Hub
from huggingface_hub import constants
from tiny_files import byte_tokenizer, write_drafter, write_target

from flashmap_hf import FlashMapDrafter, hub_list, target_outline, targets
from flashmap_hf.cli import main

pytest_plugins = ["hub_client"]

CARD = "---\nbase_model: {base}\ntags:\n- flashmap\nbase_model_relation: adapter\n---\n"


def content(folder: Path, base: str = "org/tiny") -> dict[str, bytes]:
    """The files of a folder, with a card."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {"README.md": CARD.format(base=base).encode()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and drafters that fit it, or do not."""
    root = tmp_path_factory.mktemp("list")
    write_target(root / "target")
    write_drafter(root / "fits")
    write_drafter(root / "template", chat_template="another")
    wide = FlashMapDrafter.from_pretrained(root / "fits", target_hidden_size=48, ignore_mismatched_sizes=True)
    wide.config.target_name = "org/wide"
    wide.save_pretrained(root / "wide")
    return root


@pytest.fixture
def filled(hub: Hub, folders: Path) -> Hub:
    """Five drafters, and a model that is none."""
    hub.repo("org/tiny", content(folders / "target", base="org/base"))
    hub.repos["org/tiny"].commit({p.name: p.read_bytes() for p in (folders / "target").iterdir()})
    hub.repo("a/wide", content(folders / "wide"), downloads=900)
    hub.repo("b/fits", content(folders / "fits"), downloads=12)
    hub.repo("c/template", content(folders / "template"), downloads=1500)
    hub.repo("d/recipe", {n: d for n, d in content(folders / "fits").items() if "safetensors" not in n})
    hub.repo("e/broken", content(folders / "fits") | {"config.json": b"{"})
    hub.repo("f/elsewhere", content(folders / "fits", base="org/finetune"), downloads=3)
    return hub


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict]:
    assert main(["list", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)["drafters"]


def test_those_of_the_target_and_which_of_them_fit(filled, folders, capsys):
    rows = listed(capsys, "--target", "org/tiny")
    assert [(row["id"], row["fits"]) for row in rows] == [
        ("c/template", True), ("b/fits", True), ("a/wide", False), ("d/recipe", False), ("e/broken", False),
    ]  # fmt: skip
    first, second, wide, recipe, broken = rows
    assert first["note"] == hub_list.OTHER_TEMPLATE and second["note"] is None
    assert "hidden size 48), not for org/tiny (hidden size 32)" in wide["note"] and wide["target"] == "org/wide"
    assert recipe["note"] == "no weights there, only a configuration" and recipe["size"] is None
    assert "not a valid JSON file" in broken["note"] and broken["block_size"] is None
    drafter = FlashMapDrafter.from_pretrained(folders / "fits")
    assert second["parameters"] == sum(p.numel() for p in drafter.parameters())
    assert second["size"] == (folders / "fits" / "model.safetensors").stat().st_size
    assert (second["block_size"], second["layers"]) == (drafter.config.block_size, 1) and second["downloads"] == 12


def test_no_weights_are_fetched(filled, capsys):
    listed(capsys, "--target", "org/tiny", "--all")
    assert not [path for method in ("GET", "HEAD") for path in filled.seen(method, "safetensors")]


def test_all_of_them_for_a_folder_too(filled, folders, capsys):
    names = {"c/template", "b/fits", "a/wide", "d/recipe", "e/broken", "f/elsewhere"}
    assert {row["id"] for row in listed(capsys, "--target", "org/tiny", "--all")} == names
    rows = listed(capsys, "--target", str(folders / "target"))  # its name on the Hub is not known
    assert {row["id"] for row in rows} == names and {row["id"] for row in rows if row["fits"]} == {
        "c/template", "b/fits", "f/elsewhere",
    }  # fmt: skip


def test_the_limit_is_that_of_the_most_downloaded(filled, capsys):
    assert {row["id"] for row in listed(capsys, "--target", "org/tiny", "--limit", "3")} == {
        "c/template", "a/wide", "b/fits",
    }  # fmt: skip


def test_another_vocabulary_does_not_fit(filled, folders, capsys, tmp_path):
    target = write_target(tmp_path / "other")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(target)
    assert all(
        "vocabulary hash" in row["note"] for row in listed(capsys, "--target", str(target)) if row["id"] == "b/fits"
    )


def test_without_a_tokenizer_it_says_that_vocabularies_are_not_compared(filled, capsys, tmp_path, folders):
    (tmp_path / "config.json").write_bytes((folders / "target" / "config.json").read_bytes())
    assert main(["list", "--json", "--target", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "the tokenizer of target" in printed.err and "vocabularies are not compared" in printed.err
    assert any(row["fits"] for row in json.loads(printed.out)["drafters"])


def test_the_table(filled, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["list", "--target", "org/tiny"]) == 0
    printed = capsys.readouterr().out
    assert "Drafters for org/tiny" in printed
    for word in ("c/template", "1,500", "yes", "no: no weights there", "made for", "parameters"):
        assert word in printed


def test_none_says_what_to_do(filled, folders, capsys):
    hub_repos = filled.repos
    filled.repos = {"org/tiny": hub_repos["org/tiny"]}
    assert main(["list", "--target", "org/tiny"]) == 0
    assert (
        "names org/tiny as its base model: train one (flashmap train --target org/tiny), or look"
        in capsys.readouterr().out
    )
    assert main(["list", "--target", str(folders / "target")]) == 0
    assert "No drafter is tagged 'flashmap' on the Hub: train one" in capsys.readouterr().out


def test_the_embedded_target_goes_by_its_name_on_the_hub(filled, tmp_path, folders, capsys, monkeypatch):
    monkeypatch.setenv("FLASHMAP_HOME", str(tmp_path))  # not prepared: its configuration comes from the Hub
    hub_id = targets.SMOLLM2.hub_id
    filled.repo(hub_id, content(folders / "target"))
    filled.repo("g/small", content(folders / "fits", base=hub_id))
    (row,) = [row for row in listed(capsys) if row["id"] == "g/small"]
    assert row["fits"]
    assert target_outline.outline(targets.SMOLLM2.name).config.name_or_path == hub_id


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "0"], "limit=0: must be at least 1"),
        (["--target", "org/nothing"], "the configuration of target 'org/nothing' cannot be read ("),
        (["--target", "/no/folder"], "the configuration of target '/no/folder' cannot be read ("),
    ],
)
def test_bad_arguments(filled, capsys, options, message):
    assert main(["list", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("flashmap: ") and message in line


def test_trouble_is_one_sentence(filled, folders, capsys, monkeypatch):
    def said() -> str:
        assert main(["list", "--target", str(folders / "target")]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    filled.fail["/api/models"] = 503
    assert "the Hub cannot answer now (503): run it again later" in said()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    filled.fail.clear()
    assert "the Hub does not know the token (401): run `hf auth login` again" in said()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the Hub cannot be reached (" in said()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE=1 forbids to reach the Hub: unset it to list drafters" in said()


def test_a_target_that_is_no_language_model(filled, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert main(["list", "--target", str(tmp_path)]) == 2
    assert "is no causal language model" in capsys.readouterr().err
