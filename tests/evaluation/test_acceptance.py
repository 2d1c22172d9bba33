"""`flashmap evaluate`, on a tiny target and drafter in folders; what it counts, with a drafter that knows the text."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from conftest import oracle_for, random_prompt, tiny_drafter, tiny_target
from tiny_files import byte_tokenizer, write_drafter, write_target

from flashmap_hf import FlashMapDrafter, record, targets
from flashmap_hf.cli import main
from flashmap_hf.evaluation import acceptance
from flashmap_hf.evaluation.acceptance import BlockCounter, Options, measure
from flashmap_hf.evaluation.acceptance_plot import FILES, plot
from flashmap_hf.evaluation.acceptance_summary import PromptResult, summarise
from flashmap_hf.evaluation.partial import append, resume
from flashmap_hf.evaluation.prompt_choice import balanced
from flashmap_hf.generation_config import FlashMapGenerationConfig
from flashmap_hf.prompt_files import PromptRow
from flashmap_hf.prompts import encode
from flashmap_hf.runs import run

ROWS = [
    {"id": "w1", "category": "mt_bench/writing", "turns": ["Write a poem", "Shorter"]},
    {"id": "c1", "category": "mt_bench/coding", "turns": ["Write a loop"]},
    {"id": "m1", "category": "maths", "prompt": "1 + 1"},
    {"id": "m2", "category": "maths", "prompt": "2 + 2"},
]
NEW = ["--max-new-tokens", "12", "--dtype", "float32"]


def write_prompts(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    """`--target` and `--drafter` options that fit each other."""
    root = tmp_path_factory.mktemp("models")
    return ["--target", str(write_target(root / "target")), "--drafter", str(write_drafter(root / "drafter"))]


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch, request):
    """They are slow to draw: one test draws them."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(acceptance, "plot", lambda *_: None)


@pytest.fixture
def drawn() -> None:
    """Asks for the real plots."""


@pytest.fixture
def arguments(models, tmp_path) -> list[str]:
    """A command line that measures `ROWS` into `tmp_path / "out"`."""
    return [
        "evaluate",
        *models,
        "--prompts",
        write_prompts(tmp_path / "p.jsonl", ROWS),
        "--out",
        str(tmp_path / "out"),
        *NEW,
    ]


def result_of(arguments: list[str]) -> dict:
    assert main(arguments) == 0
    return json.loads((Path(arguments[arguments.index("--out") + 1]) / "evaluate.json").read_text())


def counted(record: dict) -> list:
    """What does not depend on the clock."""
    return [
        [{k: v for k, v in g.items() if not k.endswith("_ms")} for g in (r["overall"], *r["categories"].values())]
        for r in record["temperatures"]
    ]


# --- the record -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("drawn")
def test_record_table_and_plots(arguments, tmp_path, capsys):
    result = result_of([*arguments, "--timed"])
    printed = capsys.readouterr()
    assert {"commit", "versions", "command", "machine", "time"} <= result["provenance"].keys()
    assert result["prompts"] | {"sha256": ""} == {
        "file": "p.jsonl", "sha256": "", "in_file": 4, "too_long": 0, "measured": 4
    }  # fmt: skip
    assert str(tmp_path) not in json.dumps(result)
    assert result["seconds"] > 0
    greedy, sampled = result["temperatures"]
    assert (greedy["temperature"], sampled["temperature"]) == (0.0, 1.0)
    for run_ in (greedy, sampled):
        overall, categories = run_["overall"], run_["categories"]
        assert list(categories) == ["mt_bench", "mt_bench/writing", "mt_bench/coding", "maths"]
        assert overall["prompts"] == 4 and categories["mt_bench"]["prompts"] == categories["maths"]["prompts"] == 2
        assert overall["new_tokens"] == 4 * 12
        assert overall["tokens_per_step"] == 48 / overall["target_steps"]
        for count in ("new_tokens", "target_steps", "blocks"):
            assert overall[count] == categories["mt_bench"][count] + categories["maths"][count]
        assert overall["drafter_ms"] > 0 and overall["verify_ms"] > 0 and overall["plain_step_ms"] > 0
        spread = overall["speedup"]
        assert 0 < spread["lowest"] <= spread["median"] <= spread["highest"]
        first = overall["positions"][0]
        assert first["position"] == 1 and first["drafted"] == first["judged"] == overall["blocks"]
        assert first["joint"] == first["conditional"] == first["accepted"] / overall["blocks"]
    assert greedy["overall"]["identical"] == {"prompts": 4, "compared": 4}
    assert greedy["overall"]["differences"] == []
    assert "identical" not in sampled["overall"] and "share_of_greedy" not in greedy["overall"]
    assert sampled["overall"]["share_of_greedy"] == (
        sampled["overall"]["tokens_per_step"] / greedy["overall"]["tokens_per_step"]
    )
    assert "mt_bench/writing" in printed.out and "identical to plain: 4 of 4" in printed.out
    assert "evaluating" in printed.err and "evaluating" not in printed.out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"evaluate.json", *FILES}  # nothing partial is left
    assert (tmp_path / "out" / "evaluate.png").read_bytes().startswith(b"\x89PNG")
    before = [(tmp_path / "out" / name).read_bytes() for name in FILES]
    plot(result, tmp_path)
    assert [(tmp_path / name).read_bytes() for name in FILES] == before


def test_the_numbers_are_those_of_generate(arguments, models):
    """Summed by hand over plain calls of `generate` with the same prompts and seeds."""
    result = result_of([*arguments, "--temperatures", "1", "--verification", "rejection", "--seed", "5"])
    target, tokenizer = targets.load(models[1], dtype=torch.float32)
    drafter = FlashMapDrafter.from_pretrained(models[3], dtype=torch.float32)
    config = FlashMapGenerationConfig(
        do_sample=True, temperature=1.0, max_new_tokens=12, verification="rejection", num_assistant_tokens=None
    )
    with record() as stats:
        for index, row in enumerate(ROWS):
            prompt = row.get("prompt") or row["turns"][0]
            run(target, encode(target, tokenizer, prompt), config, 5 + index, assistant_model=drafter)
    (only,) = result["temperatures"]
    overall = only["overall"]
    assert (overall["new_tokens"], overall["target_steps"]) == (stats.committed, stats.target_steps)
    assert [p["joint"] for p in overall["positions"]] == stats.acceptance_by_position
    assert "speedup" not in overall and "share_of_greedy" not in overall
    assert result["options"]["verification"] == "rejection"


def test_out_is_the_drafters_folder_and_options_reach_generate(models, tmp_path):
    drafter = write_drafter(tmp_path / "drafter")
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "no category"}])
    options = ["--num-assistant-tokens", "2", "--num-steps", "2", "--temperatures", "0"]
    assert main(["evaluate", *models[:2], "--drafter", str(drafter), "--prompts", prompts, *NEW, *options]) == 0
    result = json.loads((drafter / "evaluate.json").read_text())
    (only,) = result["temperatures"]
    assert only["categories"] == {}
    assert len(only["overall"]["positions"]) == 2
    assert result["options"]["num_steps"] == 2
    assert result["drafter_weights"].startswith("sha256 ")


# --- what is counted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [False, True], ids=["length", "end token"])
def test_a_position_is_judged_until_a_token_is_refused_or_the_text_ends(stop):
    """Against a replay of each block: the oracle's drafts are right up to a random place."""
    target = tiny_target("llama")
    inputs = random_prompt(6, 64, seed=1)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=60)
    new = plain[0, 6:].tolist()
    end = next(i for i in range(25, 60) if new[i] not in new[:i]) if stop else 59
    drafter = oracle_for(target)
    drafter.teach(target, plain)

    class Replay(BlockCounter):
        """Remembers drafted, accepted and committed of every block."""

        def put(self, value):
            before = (self.drafted, getattr(self, "kept", 0))
            super().put(value)
            self.kept = self.stats.accepted
            if self.drafted > before[0]:
                blocks.append((self.drafted - before[0], self.kept - before[1], value.numel()))

    blocks: list[tuple[int, int, int]] = []
    config = FlashMapGenerationConfig(
        do_sample=False, max_new_tokens=60, eos_token_id=new[end] if stop else None, return_dict_in_generate=False
    )
    with record() as stats:
        counter = Replay(stats)
        done = run(target, inputs, config, 0, assistant_model=drafter, streamer=counter)
    assert done.tokens == new[: end + 1]
    expected = [0] * 5
    for place, (drafted, accepted, committed) in enumerate(blocks):
        refused = accepted < drafted and (place < len(blocks) - 1 or committed == accepted + 1)
        for position in range(accepted + refused):
            expected[position] += 1
    assert counter.judged == expected
    assert stats.accepted_by_position[0] > 0 and stats.accepted_by_position[2] > 0
    for k in range(4):  # who is judged there kept what came before
        assert counter.judged[k + 1] <= stats.accepted_by_position[k]


def test_counts_are_summed_by_category_and_temperature():
    def result(id: str, category: str, temperature: float, accepted: list[int], steps: int) -> PromptResult:
        judged = [4, *accepted[:-1]]
        return PromptResult(
            id,
            category,
            temperature,
            3,
            12,
            steps,
            4,
            0,
            [4] * len(accepted),
            judged,
            accepted,
            1.0,
            10.0 * steps,
            None,
        )

    results = [
        result("1", "a/x", 0.0, [3, 2], 6),
        result("2", "a/y", 0.0, [1], 12),
        result("3", "b", 0.0, [4, 0], 8),
        result("1", "a/x", 0.5, [0], 12),
        result("2", "a/y", 0.5, [0], 12),
        result("3", "b", 0.5, [2, 1], 10),
    ]
    greedy, sampled = summarise(results, [0.0, 0.5])
    assert list(greedy["categories"]) == ["a", "a/x", "a/y", "b"]
    a = greedy["categories"]["a"]
    assert a["tokens_per_step"] == 24 / 18
    assert a["positions"] == [
        {"position": 1, "drafted": 8, "judged": 8, "accepted": 4, "joint": 0.5, "conditional": 0.5},
        {"position": 2, "drafted": 4, "judged": 3, "accepted": 2, "joint": 0.5, "conditional": 2 / 3},
    ]
    assert greedy["overall"]["tokens_per_step"] == 36 / 26
    assert greedy["overall"]["drafter_ms"] == 80.0
    assert greedy["overall"]["verify_ms"] is None
    assert sampled["categories"]["b"]["share_of_greedy"] == pytest.approx(0.8)


def test_where_outputs_part_is_kept(monkeypatch):
    """Two greedy outputs that differ, as rounding makes them, are counted and come with the margin."""
    target = tiny_target("llama", vocab_size=259)
    inputs = encode(target, byte_tokenizer(), "Hi")
    real = run

    def rounded(*args, **kwargs):
        done = real(*args, **kwargs)
        tokens = done.tokens if "assistant_model" not in kwargs else [*done.tokens[:-1], done.tokens[-1] ^ 1]
        return dataclasses.replace(done, tokens=tokens)

    monkeypatch.setattr(acceptance, "run", rounded)
    options = Options(prompts=Path("p"), timed=True, max_new_tokens=5)
    row = PromptRow("r", "Hi")
    results = [measure(target, tiny_drafter(target), row, inputs, t, 0, options) for t in (0.0, 1.0)]
    assert [r.identical for r in results] == [False, None]
    group = summarise(results[:1], [0.0])[0]["overall"]
    assert group["identical"] == {"prompts": 0, "compared": 1}
    (difference,) = group["differences"]
    assert difference["id"] == "r" and difference["position"] == 4 and difference["margin"] > 0


# --- which prompts --------------------------------------------------------------------------------------------------


def test_prompts_are_chosen_evenly_and_by_the_seed():
    rows = [PromptRow(f"{name}{i}", "x", name) for name in ("a/p", "a/q", "b", "c") for i in range(20)]

    def counts(chosen):
        return [sum(row.category.startswith(name) for row in chosen) for name in ("a/p", "a/q", "b", "c")]

    assert balanced(rows, None, None, 0) == rows
    assert counts(balanced(rows, None, 4, 0)) == [2, 2, 4, 4]
    assert counts(balanced(rows, 9, None, 0)) in ([2, 1, 3, 3], [1, 2, 3, 3])
    assert counts(balanced(rows, 2, 4, 0))[2:] == [1, 0]
    assert balanced(rows, 10, None, 0) == balanced(rows, 10, None, 0) != balanced(rows, 10, None, 1)
    chosen = balanced(rows, 10, None, 3)
    assert chosen == sorted(chosen, key=rows.index)


def test_prompts_that_do_not_fit_are_counted_and_left_out(models, tmp_path, capsys):
    rows = [{"id": "long", "prompt": "x" * 600}, {"id": "short", "prompt": "x"}]
    out = ["--out", str(tmp_path)]
    result = result_of(["evaluate", *models, "--prompts", write_prompts(tmp_path / "p.jsonl", rows), *out, *NEW])
    assert (result["prompts"]["too_long"], result["prompts"]["measured"]) == (1, 1)
    assert "1 of 2 prompts are left out, the first one (long: the prompt has" in capsys.readouterr().err
    line = complaint(capsys, *models, "--prompts", write_prompts(tmp_path / "p.jsonl", rows[:1]), *out, *NEW)
    assert "every prompt of" in line and "lower --max-new-tokens" in line


# --- killed and run again -------------------------------------------------------------------------------------------


@pytest.fixture
def killed(arguments, tmp_path, monkeypatch) -> Path:
    """The partial file of a run that was interrupted while its fourth result was being written."""
    calls: list[int] = []

    def interrupted(*args, **kwargs):
        calls.append(0)
        if len(calls) == 5:  # the first one warms up
            raise KeyboardInterrupt
        return measure(*args, **kwargs)

    monkeypatch.setattr(acceptance, "measure", interrupted)
    assert main(arguments) == 130
    monkeypatch.undo()
    path = tmp_path / "out" / "evaluate.partial.jsonl"
    with path.open("a") as lines:
        lines.write('{"id": "m1", "categ')
    return path


def test_a_killed_run_goes_on(arguments, killed, tmp_path, capsys, monkeypatch):
    done = [json.loads(line) for line in killed.read_text().splitlines()[1:-1]]
    assert [(row["id"], row["temperature"]) for row in done] == [("w1", 0.0), ("w1", 1.0), ("c1", 0.0)]
    measured = []

    def noted(target, drafter, row, inputs, temperature, index, options):
        measured.append((row.id, temperature))
        return measure(target, drafter, row, inputs, temperature, index, options)

    monkeypatch.setattr(acceptance, "measure", noted)
    resumed = result_of(arguments)
    assert measured[1:] == [("c1", 1.0), ("m1", 0.0), ("m1", 1.0), ("m2", 0.0), ("m2", 1.0)]
    assert "3 results are in" in capsys.readouterr().err
    assert not killed.exists()
    other = [*arguments[: arguments.index("--out")], "--out", str(tmp_path / "other"), *NEW]
    assert counted(resumed) == counted(result_of(other))


def test_other_options_start_over(arguments, killed, capsys):
    result = result_of([*arguments, "--limit", "2", "--temperatures", "0"])
    assert "other prompts, options: starting over" in capsys.readouterr().err
    assert not killed.exists()
    assert result["temperatures"][0]["overall"]["prompts"] == 2


def test_other_weights_are_another_head(models, tmp_path):
    """So that a drafter that was trained on starts over."""
    identity = acceptance.weights_identity(models[3], FlashMapDrafter.from_pretrained(models[3]))
    assert identity == acceptance.weights_identity(models[3], FlashMapDrafter.from_pretrained(models[3]))
    other = str(write_drafter(tmp_path, seed=1))
    assert identity != acceptance.weights_identity(other, FlashMapDrafter.from_pretrained(other))


def test_a_damaged_partial_file_is_named_and_kept(tmp_path):
    path = tmp_path / "evaluate.partial.jsonl"
    assert resume(path, {"a": 1}, PromptResult) == []
    with path.open("a") as lines:
        lines.write("{oops\n{}\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"evaluate\.partial\.jsonl, line 2: not a result"):
        resume(path, {"a": 1}, PromptResult)
    assert path.read_bytes() == before


def test_a_head_that_was_cut_off_is_written_again(tmp_path, capsys):
    path = tmp_path / "evaluate.partial.jsonl"
    path.write_text('{"targ')
    assert resume(path, {"a": 1}, PromptResult) == []
    assert json.loads(path.read_text())["a"] == 1
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_named(tmp_path):
    with pytest.raises(OSError, match=r"x\.jsonl cannot be written \(.+\): make room"):
        append(tmp_path / "missing" / "x.jsonl", {})


# --- what it refuses ------------------------------------------------------------------------------------------------


def complaint(capsys, *arguments: str) -> str:
    """The last line on stderr of a call that is refused."""
    assert main(["evaluate", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    return printed.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "required: --prompts"),
        (["--temperatures", "-1"], "temperature must be 0"),
        (["--temperatures", "0", "0"], "name at least one, and each once"),
        (["--temperatures", "0", "--verification", "rejection"], "add a temperature above 0"),
        (["--limit", "0"], "limit must be at least 1, not 0"),
        (["--per-category", "-2"], "per_category must be at least 1, not -2"),
        (["--num-assistant-tokens", "0"], "num_assistant_tokens must be at least 1, not 0"),
        (["--num-steps", "3"], "num_steps=3"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1, not 0"),
        (["--seed", "-1"], "seed must be at least 0, not -1"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--target", "nope"], "no drafter is known for target 'nope'"),
        (["--drafter", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_arguments_are_checked_before_anything_is_loaded(capsys, tmp_path, monkeypatch, options, message):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded before the arguments were checked")

    monkeypatch.setattr(targets, "load", load)
    given = ["--prompts", write_prompts(tmp_path / "p.jsonl", ROWS), *options] if options else options
    assert message in complaint(capsys, *given)


def test_a_bad_line_of_the_prompts_is_named(capsys, tmp_path, models):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    assert "p.jsonl, line 2: needs a text" in complaint(capsys, *models, "--prompts", str(path))


def test_a_drafter_for_another_target_is_named(capsys, models, tmp_path):
    write_target(tmp_path / "wide", hidden_size=48)
    prompts = write_prompts(tmp_path / "p.jsonl", ROWS)
    line = complaint(capsys, "--target", str(tmp_path / "wide"), *models[2:], "--prompts", prompts)
    assert "hidden size 32" in line and "hidden size 48" in line
