"""`flashmap bench` as a command: what it writes, what it refuses."""

import json
from pathlib import Path

import pytest
from bench_run import finished  # noqa: F401  # a fixture
from tiny_files import write_drafter, write_target

from flashmap_hf import targets
from flashmap_hf.cli import main
from flashmap_hf.evaluation import bench
from flashmap_hf.evaluation.bench import FULL, QUICK, Options
from flashmap_hf.evaluation.bench_plots import FORMATS, PICTURES, plot

NAMES = [
    "plain", "prompt_lookup", "assistant", "early_exit", "dflash", "eagle", "medusa", "flashmap",
    "flashmap_stock_loop", "flashmap_midpoint",
    "flashmap_tree", "flashmap_ngrams", "flashmap_auto",
]  # fmt: skip


@pytest.fixture
def record(finished) -> dict:  # noqa: F811
    return json.loads((finished / "benchmark.json").read_text())


def test_files(finished):  # noqa: F811
    pictures = {f"benchmark_{name}{ending}" for name in PICTURES for ending in FORMATS}
    assert {path.name for path in finished.iterdir()} == {"benchmark.json", *pictures}  # nothing partial is left
    assert (finished / "benchmark_k.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_are_the_same_bytes_again(finished, record, tmp_path):  # noqa: F811
    plot(record, tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (finished / path.name).read_bytes(), path.name


def test_the_record_says_what_was_measured_and_where(finished, record):  # noqa: F811
    assert {"commit", "versions", "command", "machine", "time"} <= record["provenance"].keys()
    assert record["schema"] == 1 and record["dtype"] == "float32" and record["device"] == "cpu"
    assert record["prompts"] | {"sha256": ""} == {
        "file": "few.jsonl", "sha256": "", "in_file": 2, "fit": 2, "chosen": 2
    }  # fmt: skip
    assert (record["turns"], record["turns_too_long"], record["sessions"]) == (3, 0, 1)
    assert str(finished.parent) not in json.dumps(record)
    assert record["options"]["max_new_tokens"] == 8 and record["options"]["turns"] == 2
    assert record["drafter_weights"].startswith("sha256 ")
    assert record["target_state_bytes"][1]["bytes"] == 8 * record["target_state_bytes"][0]["bytes"] > 0


def test_every_method_has_every_number(record):
    assert [run["temperature"] for run in record["temperatures"]] == [0.0, 1.0]
    for run in record["temperatures"]:
        assert [name for name in run["methods"] if name in NAMES] == NAMES
        assert {"flashmap_equal", "flashmap_equal_small_tree", "flashmap_equal_tree"} < run["methods"].keys()
        assert "flashmap:deep" not in run["methods"]
        for groups in run["methods"].values():
            overall = groups["overall"]
            assert list(groups["categories"]) == ["multi", "multi/writing", "coding"]
            assert (overall["prompts"], overall["new_tokens"]) == (3, 24)
            assert overall["tokens_per_step"] == 24 / overall["target_steps"]
            assert overall["verify_ms"] > 0 and overall["speedup"]["median"] > 0
            assert overall["token_gap_ms"]["p50"] <= overall["token_gap_ms"]["p95"]
            assert groups["categories"]["coding"]["prompts"] == 1
        assert run["methods"]["plain"]["overall"]["tokens_per_step"] == 1.0
        for name in ("dflash", "eagle", "medusa", "flashmap"):
            first = run["methods"][name]["overall"]["positions"][0]
            assert first["position"] == 1 and first["drafted"] > 0


def test_the_assistant_that_is_the_target_is_always_right(record):
    """A check of the counting: greedily every judged token of the same model is kept."""
    places = record["temperatures"][0]["methods"]["assistant"]["overall"]["positions"]
    assert places[0]["conditional"] == 1.0


def test_no_greedy_output_differs(record):
    greedy = record["drift"]["greedy"]
    assert set(NAMES[1:]) < greedy.keys() and {"flashmap_k1", "flashmap_k2", "flashmap:deep"} < greedy.keys()
    assert [group["differ"] for group in greedy.values()] == [0] * len(greedy)
    assert {group["compared"] for group in greedy.values()} == {3}
    low = record["drift"]["low_precision"]
    assert low["dtype"] == "bfloat16" and set(NAMES[1:]) <= low["methods"].keys()
    assert low["plain_against_float32"]["compared"] == 3
    (sampled,) = record["drift"]["sampled"]
    assert sampled["temperature"] == 1.0 and sampled["methods"]["flashmap"]["tokens"] == 24
    assert all(test["p_uniform"] > 1e-4 for test in sampled["methods"].values())


def test_curve_comparisons_and_costs(record):
    assert [point["block_size"] for point in record["k_curve"]] == [1, 2]
    rows = record["against_baselines"]
    assert [(row["temperature"], row["baseline"]) for row in rows] == [
        (t, name) for t in (0.0, 1.0) for _ in ("chain", "tree") for name in ("dflash", "eagle", "medusa")
    ]
    assert all(row["ahead"] == (row["ratio"] > 1.0) for row in rows)
    assert all({"flashmap_blocks", "baseline_blocks"} <= row.keys() for row in rows)
    for run in record["temperatures"]:  # the one that was trained with them is what they are compared with
        here = [row for row in rows if row["temperature"] == run["temperature"]]
        assert [row["flashmap"] for row in here] == ["flashmap_equal"] * 3 + ["flashmap_equal_small_tree"] * 3
        ours = {name: group["overall"]["tokens_per_step"] for name, group in run["methods"].items()}
        assert all(row["flashmap_tokens_per_step"] == ours[row["flashmap"]] for row in here)
    own, deep = record["variants"]
    assert (own["method"], deep["method"]) == ("flashmap", "flashmap:deep")
    assert own["tokens_per_step"] == record["temperatures"][0]["methods"]["flashmap"]["overall"]["tokens_per_step"]
    assert set(deep["categories"]) == {"multi", "multi/writing", "coding"} and deep["positions"][0]["drafted"] > 0
    for run in record["cost_model"]:
        assert [row["method"] for row in run["methods"]][:3] == ["prompt_lookup", "assistant", "early_exit"]
        assert all(abs(row["error"]) < 0.05 for row in run["methods"])  # but for ends of texts it adds up
    sources = {row["ratios_of"] for run in record["projections"] for row in run["methods"]}
    assert sources == {"memory_bound", "published"}
    assert all(row["method"].startswith("flashmap") for row in record["slower_than_plain"])
    assert all(row["speedup"] < 1.0 for row in record["slower_than_plain"])
    measured = {row["key"]: row["measured"] for row in record["claims"]["rows"]}
    assert all(value is not None for value in measured["tokens_per_step"].values())


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def models(tmp_path) -> list[str]:
    """`--target` and `--drafter` options that fit each other, and prompts."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"id": i, "category": "ab"[i % 2], "prompt": "x"}) + "\n" for i in range(6)))
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    return ["--target", str(target), "--drafter", str(drafter), "--prompts", str(prompts), "--dtype", "float32"]


def test_the_results_lie_beside_the_drafter_and_what_is_missing_is_said(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "plot", lambda *_: None)
    few = ["--temperatures", "0", "--max-new-tokens", "3", "--rounds", "1", "--no-k-curve", "--limit", "2"]
    assert main(["bench", *models, *few]) == 0
    printed = capsys.readouterr()
    assert "left out: the three trained baselines (no --baselines)" in printed.err
    assert "left out: stock assisted generation with a small language model (no --assistant)" in printed.err
    assert "tokens per target step" in printed.out and "FlashMap, claimed" in printed.out
    assert "Every greedy output is token for token that of plain decoding." in printed.out
    record = json.loads((tmp_path / "drafter" / "benchmark.json").read_text())
    assert record["prompts"]["chosen"] == 2 and record["drift"]["sampled"] == []
    assert record["drift"]["low_precision"] is None and record["k_curve"] == [] and record["against_baselines"] == []
    assert len(record["skipped"]) == 2


def test_a_killed_run_goes_on(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "plot", lambda *_: None)
    few = ["--temperatures", "0", "--max-new-tokens", "3", "--rounds", "1", "--no-k-curve", "--limit", "2"]
    kept = []

    def keep(self, result):
        if len(kept) == 3:
            raise KeyboardInterrupt
        kept.append(result)
        original(self, result)

    original = bench.Bench.keep
    monkeypatch.setattr(bench.Bench, "keep", keep)
    assert main(["bench", *models, *few]) == 130
    monkeypatch.setattr(bench.Bench, "keep", original)
    partial = tmp_path / "drafter" / "benchmark.partial.jsonl"
    assert len(partial.read_text().splitlines()) == 4
    assert main(["bench", *models, *few]) == 0
    assert "3 measurements are in" in capsys.readouterr().err
    assert not partial.exists()
    record = json.loads((tmp_path / "drafter" / "benchmark.json").read_text())
    assert record["sessions"] == 2


def test_prompts_that_do_not_fit_are_left_out(models, tmp_path, monkeypatch, capsys):
    path = Path(models[5])
    path.write_text(json.dumps({"id": "long", "prompt": "x" * 600}) + "\n")
    assert main(["bench", *models]) == 2
    assert "no prompt fits into target (long: the prompt has" in capsys.readouterr().err


def test_quick_is_a_preset_that_options_override():
    quick, full = Options(quick=True), Options()
    assert {name: quick.value(name) for name in QUICK} == QUICK
    assert {name: full.value(name) for name in FULL} == FULL
    assert (quick.value("rounds"), full.value("rounds")) == (1, 3)
    mixed = Options(quick=True, rounds=4, max_new_tokens=5)
    assert (mixed.value("rounds"), mixed.settings()[0].max_new_tokens, mixed.value("limit")) == (4, 5, 3)
    assert mixed.public()["limit"] == 3 and "out" not in mixed.public()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperatures", "-1"], "temperature must be 0"),
        (["--temperatures", "0", "0"], "name at least one, and each once"),
        (["--rounds", "0"], "rounds must be at least 1, not 0"),
        (["--limit", "0"], "limit must be at least 1, not 0"),
        (["--turns", "-1"], "turns must be at least 1, not -1"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1, not 0"),
        (["--prompt-lookup-tokens", "0"], "prompt_lookup_tokens must be at least 1"),
        (["--early-exit", "0"], "early_exit must be at least 1"),
        (["--seed", "-1"], "seed must be at least 0, not -1"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--target", "nope"], "no drafter is known for target 'nope'"),
        (["--drafter", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--variants", "a/x", "b/x"], "two folders have the same name"),
        (["--variants", "/nowhere/else"], "/nowhere/else"),
        (["--baselines", "/nowhere/at/all"], "baselines=/nowhere/at/all is no folder: train them"),
        (["--prompts", "/nowhere/p.jsonl"], "/nowhere/p.jsonl"),
    ],
)
def test_arguments_are_checked_before_anything_is_loaded(capsys, monkeypatch, options, message):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded before the arguments were checked")

    monkeypatch.setattr(targets, "load", load)
    assert main(["bench", *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err.splitlines()[-1] and printed.out == ""
