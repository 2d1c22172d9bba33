"""`flashmap card`: what stands on a card stands in the JSON files beside it, and it does not flatter."""

import json
import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from test_numbers import NUMBER, REGION, measured_outside, unproven_numbers
from tiny_files import write_drafter, write_target

from flashmap_hf import hub_card
from flashmap_hf.cli import main
from flashmap_hf.evaluation import acceptance, bench

ROOT = Path(__file__).resolve().parents[1]
CARDS = sorted(path.parent for path in (ROOT / "hub_cards").glob("*/config.json"))
NEW = ["--license", "apache-2.0", "--base-model", "org/tiny"]
PROMPTS = [
    {"id": "1", "category": "mt_bench/writing", "prompt": "Write"},
    {"id": "2", "category": "maths", "prompt": "1 + 1"},
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A tiny drafter with everything that is measured of one; `target` lies beside it."""
    root = tmp_path_factory.mktemp("card")
    target, drafter = write_target(root / "target"), write_drafter(root / "drafter")
    prompts = root / "few.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    options = acceptance.Options(
        prompts=prompts, target=str(target), drafter=str(drafter), max_new_tokens=8, timed=True, dtype="float32"
    )
    acceptance.main(options)
    few = {"max_new_tokens": 8, "rounds": 1, "temperatures": [0.0], "no_k_curve": True, "dtype": "float32"}
    bench.main(bench.Options(prompts=prompts, target=str(target), drafter=str(drafter), **few))
    for name in ("training.json", "demo.json", "step_cost.json"):
        shutil.copy(ROOT / "hub_cards" / "flashmap-smollm2-135m" / name, drafter)
    change(drafter / "demo.json", "speedup", to=0.85)  # slower everywhere, whatever ours is
    for place in range(3):
        change(drafter / "demo.json", "prompts", place, "speedup", "median", to=0.85)
    return drafter


@pytest.fixture
def folder(measured, tmp_path) -> Path:
    """A copy of it to spoil."""
    return shutil.copytree(measured, tmp_path / "drafter")


def write(folder: Path, *options: str) -> str:
    assert main(["card", "--folder", str(folder), *(options or NEW)]) == 0
    return (folder / "README.md").read_text(encoding="utf-8")


def complaint(capsys, folder: Path, *options: str) -> str:
    assert main(["card", "--folder", str(folder), *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    return printed.err.splitlines()[-1]


def change(path: Path, *keys: Any, to: Any) -> None:
    """Set one value of a JSON file."""
    record = json.loads(path.read_text())
    place = record
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = to
    path.write_text(json.dumps(record))


# --- the cards of this repository -----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", CARDS, ids=lambda path: path.name)
def test_a_card_of_this_repository_is_what_its_files_give(folder):
    hub_card.check(folder)


@pytest.mark.parametrize("folder", CARDS, ids=lambda path: path.name)
def test_changing_any_number_of_such_a_card_is_caught(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("*.safetensors"))
    path = copy / "README.md"
    text = path.read_text(encoding="utf-8")
    places = [
        (region.start("body") + number.start("digits"), region.start("body") + number.end("digits"))
        for region in REGION.finditer(text)
        for number in NUMBER.finditer(region["body"])
    ]
    assert len(places) > 15
    for start, end in places:
        path.write_text(f"{text[:start]}77,777{text[end:]}", encoding="utf-8")
        assert len(unproven_numbers(path)) == 1, text[start - 40 : end]
    with pytest.raises(ValueError, match=r"README\.md is not what its JSON files give"):
        hub_card.check(copy)


# --- numbers --------------------------------------------------------------------------------------------------------


def test_every_number_is_in_the_file_that_its_region_names(folder):
    text = write(folder)
    assert {region["files"] for region in REGION.finditer(text)} == set(hub_card.RECORDS)
    assert unproven_numbers(folder / "README.md") == []
    assert measured_outside(folder / "README.md") == []


@pytest.mark.parametrize("name", hub_card.RECORDS)
def test_a_number_that_no_file_holds_is_caught(folder, name):
    text = write(folder)
    region = next(r for r in REGION.finditer(text) if r["files"] == name)
    number = re.search(r"\d+\.\d\d|\d,\d{3}", region["body"])
    start = region.start("body") + number.start()
    spoilt = text[:start] + "77,777" + text[start + len(number[0]) :]
    (folder / "README.md").write_text(spoilt, encoding="utf-8")
    assert unproven_numbers(folder / "README.md") == ["77,777"]
    with pytest.raises(ValueError, match="is not what its JSON files give"):
        hub_card.check(folder)


def test_the_same_files_give_the_same_bytes(folder, tmp_path):
    first = write(folder)
    assert write(folder, "--license", "apache-2.0") == first  # the base model is kept from the card
    other = shutil.copytree(folder, tmp_path / "elsewhere" / "drafter")
    (other / "README.md").unlink()
    assert write(other) == first
    assert str(tmp_path) not in first
    assert first.endswith("\n") and not first.endswith("\n\n")


def test_a_newer_measurement_makes_the_card_out_of_date(folder, capsys):
    write(folder)
    capsys.readouterr()
    assert main(["card", "--folder", str(folder), "--check"]) == 0
    assert "up to date" in capsys.readouterr().out
    change(folder / "demo.json", "speedup", to=0.51)
    before = (folder / "README.md").read_bytes()
    assert "README.md is not what its JSON files give: write it with `flashmap card" in complaint(
        capsys, folder, "--check"
    )
    assert (folder / "README.md").read_bytes() == before
    write(folder, "--license", "mit")
    hub_card.check(folder)


# --- what it says ---------------------------------------------------------------------------------------------------


def test_a_slower_drafter_is_called_slower(folder):
    text = write(folder)
    assert "The drafter is **slower** than plain decoding on the machine measured: mean speed-up" in text
    assert "is faster" not in text  # an untrained drafter: slower in evaluate.json as well


def test_a_faster_drafter_is_called_faster_and_where_it_is_not(folder):
    change(folder / "demo.json", "speedup", to=1.25)
    change(folder / "demo.json", "prompts", 0, "speedup", "median", to=1.5)
    (folder / "evaluate.json").unlink()
    text = write(folder)
    assert "mean speed-up over the prompts of the demo 1.25x, but slower on code, maths." in text
    for place in (1, 2):
        change(folder / "demo.json", "prompts", place, "speedup", "median", to=1.1)
    assert (
        "is faster than plain decoding on the machine measured: mean speed-up over the prompts of the demo 1.25x."
        in (write(folder))
    )


def test_one_that_is_barely_slower_is_not_rounded_to_faster(folder):
    change(folder / "demo.json", "speedup", to=0.998)
    assert (
        "**slower** than plain decoding on the machine measured: mean speed-up over the prompts of the demo 1.00x"
        in (write(folder))
    )


@pytest.mark.parametrize("name", hub_card.RECORDS)
def test_what_is_not_there_is_left_out(folder, name):
    (folder / name).unlink()
    text = write(folder)
    assert name not in text
    assert all(other in text for other in hub_card.RECORDS if other != name)
    assert unproven_numbers(folder / "README.md") == []


def test_a_folder_without_measurements_promises_nothing(folder):
    for name in (*hub_card.RECORDS, "evaluate.png"):
        (folder / name).unlink()
    text = write(folder)
    assert "## Measured" not in text and "## Training" not in text and "Where the numbers" not in text
    assert "Nothing was measured through `generate` yet: do not expect a speed-up." in text
    assert "\n\n\n" not in text


def test_sections_are_separated_by_one_empty_line(folder):
    text = write(folder)
    assert "\n\n\n" not in text
    assert all(text[m.start() - 2 : m.start()] == "\n\n" for m in re.finditer(r"^## .*$", text, re.MULTILINE))
    assert "![Acceptance by position" in text
    (folder / "evaluate.png").unlink()
    assert "evaluate.png" not in write(folder)


def test_what_was_written_by_hand_stays(folder):
    text = write(folder)
    notes = "<!-- notes -->\nThe first run was cut short.\n<!-- end notes -->"
    assert text.count("<!-- notes -->\n<!-- end notes -->") == 1
    (folder / "README.md").write_text(text.replace("<!-- notes -->\n<!-- end notes -->", notes), encoding="utf-8")
    hub_card.check(folder)
    assert notes in write(folder)


def test_names_from_the_prompts_file_break_nothing(folder):
    record = json.loads((folder / "evaluate.json").read_text())
    for run in record["temperatures"]:
        run["categories"]["a|b <!-- end -->"] = run["categories"].pop("maths")
    (folder / "evaluate.json").write_text(json.dumps(record))
    text = write(folder)
    assert "a\\|b &lt;!-- end -->" in text
    assert unproven_numbers(folder / "README.md") == []


@pytest.mark.parametrize("chat", [True, False])
def test_the_example_runs(folder, measured, capsys, chat):
    if not chat:
        change(folder / "config.json", "chat_template_hash", to=None)
    code = re.search(r"```python\n(.*?)```", write(folder), re.DOTALL)[1]
    code = code.replace('"org/tiny"', repr(str(measured.parent / "target"))).replace('"drafter"', repr(str(folder)))
    assert ("apply_chat_template" in code) == chat
    capsys.readouterr()
    exec(compile(code, "card", "exec"), {})
    assert re.search(r"^\d\.\d+ \[", capsys.readouterr().out, re.MULTILINE)


def test_the_embedded_target_is_loaded_by_its_name(folder):
    text = write(folder, "--license", "apache-2.0", "--base-model", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert 'targets.load("smollm2-135m-instruct")' in text
    compile(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], "card", "exec")


# --- the front matter -----------------------------------------------------------------------------------------------


def test_front_matter_is_what_the_hub_reads(folder):
    write(folder)
    assert ModelCard.load(folder / "README.md").data.to_dict() == {
        "base_model": "org/tiny",
        "base_model_relation": "adapter",
        "library_name": "flashmap_hf",
        "license": "apache-2.0",
        "metrics": ["tokens_per_step", "acceptance_by_position", "speedup"],
        "pipeline_tag": "text-generation",
        "tags": ["flashmap", "speculative-decoding", "drafter"],
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no card with a licence yet: name it with --license"),
        (["--license", "Apache 2.0"], "use the Hub's name of it, in lower case"),
        (["--license", "mit"], "target '' is no Hub id: name it with --base-model"),
        (["--license", "mit", "--base-model", "tiny"], "base_model='tiny' is no Hub id"),
        (["--license", "mit", "--base-model", "/a/b"], "base_model='/a/b' is no Hub id"),
    ],
)
def test_what_only_the_author_knows_is_asked_for(folder, capsys, options, message):
    assert message in complaint(capsys, folder, *options)
    assert not (folder / "README.md").exists()


def test_a_front_matter_that_is_no_yaml_is_named(folder, capsys):
    (folder / "README.md").write_text("---\n{: [\n---\n")
    assert "README.md: its front matter cannot be read" in complaint(capsys, folder, *NEW)


# --- files that do not fit ------------------------------------------------------------------------------------------


def test_measurements_of_other_weights_are_refused(folder, capsys):
    write_drafter(folder, seed=1)
    assert "evaluate.json measured other weights than those in" in complaint(capsys, folder, *NEW)
    (folder / "evaluate.json").unlink()
    assert "run `flashmap bench` again" in complaint(capsys, folder, *NEW)
    (folder / "model.safetensors").unlink()  # a source archive carries none
    write(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "demo.json is not JSON"),
        ("[]", "demo.json does not say where it comes from"),
        ("{}", "demo.json does not say where it comes from"),
        ('{"provenance": {}}', "demo.json lacks 'prompts', which the card shows"),
    ],
)
def test_a_damaged_file_is_named(folder, capsys, text, message):
    (folder / "demo.json").write_text(text)
    assert message in complaint(capsys, folder, *NEW)


def test_a_folder_without_a_drafter_is_named(tmp_path, capsys):
    assert "there is no config.json" in complaint(capsys, tmp_path, *NEW)


def test_the_template_is_a_part_of_the_package():
    assert (files("flashmap_hf") / "card_template.md").is_file()
