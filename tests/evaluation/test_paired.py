"""Interleaving, turns of a conversation, and a run that was killed."""

import dataclasses
import json

import pytest
import torch
from conftest import tiny_target
from made_calls import call
from tiny_files import byte_tokenizer

from flashmap_hf.evaluation import paired
from flashmap_hf.evaluation.bench_prompts import Item, items_of
from flashmap_hf.evaluation.methods import Method, plain, prompt_lookup, stock
from flashmap_hf.evaluation.paired import Bench, Job, measure
from flashmap_hf.prompt_files import PromptRow
from flashmap_hf.runs import Settings

ROWS = [PromptRow("a", "Hello", "c", ("Again",)), PromptRow("b", "Hi there", "c")]
GREEDY, SAMPLED = Settings(6), Settings(6, 1.0)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", vocab_size=259)


def bench_at(path) -> Bench:
    return Bench(path, {"a": 1}, byte_tokenizer())


def keys_of(path) -> list[tuple]:
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return [(row["id"], row["turn"], row["temperature"], row["round"], row["method"]) for row in rows]


# --- the order ------------------------------------------------------------------------------------------------------


def test_rounds_are_interleaved_and_begin_with_another_method():
    table = [Method(name, name, lambda *_: None) for name in "abc"]
    once = Method("k", "k", lambda *_: None, once=True)
    job = Job([*table, once], [GREEDY, SAMPLED], [2, 1])
    calls = [(s.temperature, r, m.name) for s, r, m in job.calls(Item(0, ROWS[0], 0))]
    assert calls == [
        *[(0.0, 0, name) for name in "abck"],
        *[(0.0, 1, name) for name in "bca"],
        *[(1.0, 0, name) for name in "abc"],
    ]
    second = [m.name for s, r, m in job.calls(Item(1, ROWS[1], 0)) if (s.temperature, r) == (1.0, 0)]
    assert second == ["b", "c", "a"]


def test_every_method_is_measured_with_the_same_noise(target, tmp_path):
    """Two methods that decode alike sample alike; another round samples anew."""
    twin = Method("twin", "twin", stock(target))
    bench = bench_at(tmp_path / "p.jsonl")
    bench.measure(target, items_of(ROWS[1:], 1), Job([plain(target), twin], [Settings(20, 1.0)], [2]))
    tokens = {(r.method, r.round): r.tokens for r in bench.results}
    assert tokens["plain", 0] == tokens["twin", 0] != tokens["plain", 1] == tokens["twin", 1]


def test_sampling_is_from_the_whole_law(target):
    seen = []
    generate = stock(target)

    def spy(inputs, config, streamer):
        seen.append(config)
        return generate(inputs, config, streamer)

    inputs = {name: torch.ones(1, 4, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    before = torch.get_rng_state()
    for settings in (GREEDY, SAMPLED):
        measure(target, Method("spy", "spy", spy), Item(0, ROWS[0], 0), inputs, settings, 0, 1)
    assert torch.equal(torch.get_rng_state(), before)  # nothing reseeds the global generator
    assert (seen[0].do_sample, seen[0].top_k) == (False, None)
    assert (seen[1].do_sample, seen[1].top_k, seen[1].top_p) == (True, 0, 1.0)


def test_a_method_that_does_not_stream_is_named(target):
    silent = Method("silent", "silent", lambda inputs, config, streamer: stock(target)(inputs, config, None))
    inputs = {name: torch.ones(1, 4, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    with pytest.raises(ValueError, match="method silent streamed 0 tokens and returned 6: it must hand the streamer"):
        measure(target, silent, Item(0, ROWS[0], 0), inputs, GREEDY, 0, 1)


def test_counts_by_position():
    row = call("fast", kept=[0, 2, 0, 3], drafted=3)
    row = dataclasses.replace(row, committed=[1, 3, 1, 3])  # the last block ended the text inside it
    assert (row.drafted, row.judged, row.accepted) == ([3, 3, 3], [3, 2, 2], [2, 2, 1])


# --- conversations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperatures", [(0.0,), (1.0,)])
def test_a_second_turn_follows_the_plain_greedy_answer(target, tmp_path, temperatures):
    bench = bench_at(tmp_path / "p.jsonl")
    first, second = items_of(ROWS[:1], 2)
    settings = [Settings(6, t) for t in temperatures]
    bench.measure(target, [first, second], Job([plain(target), prompt_lookup(target, 3)], settings, [1]))
    tokenizer = byte_tokenizer()
    prompt = tokenizer("<bos>user: Hello\n", return_tensors="pt").input_ids
    answer = target.generate(prompt, do_sample=False, max_new_tokens=6)[0, prompt.shape[1] :]
    text = tokenizer.decode(answer, skip_special_tokens=True)
    expected = tokenizer(f"<bos>user: Hello\n<bos>assistant: {text}\n<bos>user: Again\n").input_ids
    assert bench.inputs(target, second, 6)["input_ids"][0].tolist() == expected
    assert {r.prompt_tokens for r in bench.results if r.turn == 1} == {len(expected)}
    assert len(bench.results) == 4  # an answer that is only needed is not a measurement


def test_a_turn_that_became_too_long_is_counted(target, tmp_path):
    long = PromptRow("l", "x" * 300, "", ("y" * 300, "z"))
    bench = bench_at(tmp_path / "p.jsonl")
    bench.measure(target, items_of([long], 3), Job([plain(target)], [GREEDY], [1]))
    assert [(r.id, r.turn) for r in bench.results] == [("l", 0)]
    assert ("l", 1) in bench.too_long


# --- killed and run again -------------------------------------------------------------------------------------------


def test_what_is_measured_is_not_measured_again(target, tmp_path, monkeypatch, capsys):
    path, items = tmp_path / "p.jsonl", items_of(ROWS, 2)
    job = Job([plain(target), prompt_lookup(target, 3)], [GREEDY, SAMPLED], [2, 1])
    made = []

    def interrupted(target, method, item, inputs, settings, round, session):
        if settings.max_new_tokens == 6 and len(made) == 7:
            raise KeyboardInterrupt
        result = measure(target, method, item, inputs, settings, round, session)
        made.extend([result] if settings.max_new_tokens == 6 else [])
        return result

    monkeypatch.setattr(paired, "WARM_UP", 2)
    monkeypatch.setattr(paired, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench_at(path).measure(target, items, job)
    done = keys_of(path)
    assert len(done) == 7
    with path.open("a") as lines:
        lines.write('{"id": "a", "tu')  # killed while writing
    capsys.readouterr()
    monkeypatch.setattr(paired, "measure", measure)
    bench = bench_at(path)
    assert "7 measurements are in" in capsys.readouterr().err
    bench.measure(target, items, job)
    assert keys_of(path)[:7] == done
    assert len(set(keys_of(path))) == len(keys_of(path)) == 3 * 2 * 3
    assert [r.session for r in bench.results] == [1] * 7 + [2] * 11
    again = bench_at(path)
    monkeypatch.setattr(paired, "measure", None)  # nothing is left to measure
    again.measure(target, items, job)
    whole = bench_at(tmp_path / "whole.jsonl")
    monkeypatch.setattr(paired, "measure", measure)
    whole.measure(target, items, job)
    assert {r.key: r.tokens for r in again.results} == {r.key: r.tokens for r in whole.results}


def test_another_head_starts_over(target, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    bench_at(path).measure(target, items_of(ROWS, 1), Job([plain(target)], [GREEDY], [1]))
    assert Bench(path, {"a": 2}, byte_tokenizer()).results == []
    assert "of a run with other a: starting over" in capsys.readouterr().err
