"""A drift that is there is found, and one that is not is not."""

import dataclasses

import pytest
import torch
from conftest import random_prompt, tiny_target
from scipy import stats

from flashmap_hf.evaluation import drift
from flashmap_hf.evaluation.bench_prompts import Item
from flashmap_hf.evaluation.methods import plain
from flashmap_hf.evaluation.paired import measure
from flashmap_hf.prompt_files import PromptRow
from flashmap_hf.runs import Settings

PROMPTS = 6


@pytest.fixture(scope="module")
def scene() -> tuple:
    """A target, prompts with inputs, and its plain greedy calls."""
    target = tiny_target("llama")
    items = [Item(i, PromptRow(f"p{i}", "x"), 0) for i in range(PROMPTS)]
    prompts = {(item.id, 0): (item, random_prompt(5, 64, seed=item.index)) for item in items}
    greedy = [measure(target, plain(target), item, ids, Settings(12), 0, 1) for item, ids in prompts.values()]
    return target, prompts, greedy


def as_method(rows, name: str, **changes):
    return [dataclasses.replace(row, method=name, **changes) for row in rows]


def test_equal_outputs_do_not_differ(scene):
    target, prompts, greedy = scene
    found = drift.greedy(target, prompts, Settings(12), [*greedy, *as_method(greedy, "same")])
    assert found["same"] == {
        "compared": PROMPTS, "differ": 0, "share": 0.0, "margin": None, "reference_log_probability": None,
        "log_probability": None, "differences": [],
    }  # fmt: skip


@torch.no_grad()
def test_a_changed_token_is_found_with_its_margin_and_what_it_costs(scene):
    target, prompts, greedy = scene
    ids = prompts["p1", 0][1]["input_ids"]
    prefix = torch.cat([ids, torch.tensor([greedy[1].tokens[:4]])], dim=1)
    best, second = target(prefix).logits[0, -1].topk(2).values.tolist()
    second_token = int(target(prefix).logits[0, -1].topk(2).indices[1])
    changed = [*greedy[1].tokens[:4], second_token, *greedy[1].tokens[5:]]
    rows = [greedy[0], dataclasses.replace(greedy[1], tokens=changed), *greedy[2:]]
    (group,) = drift.greedy(target, prompts, Settings(12), [*greedy, *as_method(rows, "other")]).values()
    assert (group["compared"], group["differ"]) == (PROMPTS, 1) and group["share"] == 1 / PROMPTS
    (difference,) = group["differences"]
    assert difference == {
        "id": "p1", "turn": 0, "position": 4, "reference_token": greedy[1].tokens[4], "token": second_token,
        "margin": pytest.approx(best - second, abs=1e-4),
    }  # fmt: skip
    by_hand = [
        sum(target(torch.cat([ids, torch.tensor([tokens])], 1)).logits[0, 4:-1].log_softmax(-1)[range(12), tokens]) / 12
        for tokens in (greedy[1].tokens, changed)
    ]
    assert group["reference_log_probability"] == pytest.approx(float(by_hand[0]), abs=1e-5)
    assert group["log_probability"] == pytest.approx(float(by_hand[1]), abs=1e-5)


def test_a_second_round_that_differs_counts(scene):
    target, prompts, greedy = scene
    wrong = dataclasses.replace(greedy[0], tokens=[0, *greedy[0].tokens[1:]], round=1)
    rows = [*greedy, *as_method([*greedy, wrong], "other")]
    assert drift.greedy(target, prompts, Settings(12), rows)["other"]["differ"] == 1


def test_low_precision_is_set_against_what_rounding_does(scene):
    high, prompts, greedy = scene
    low = tiny_target("llama", torch.bfloat16)
    calls = [measure(low, plain(low), item, ids, Settings(12), 0, 1) for item, ids in prompts.values()]
    found = drift.low_precision(low, high, prompts, Settings(12), [*greedy, *calls, *as_method(calls, "fast")])
    assert found["dtype"] == "bfloat16" and found["methods"]["fast"]["differ"] == 0
    against = found["plain_against_float32"]
    assert against["compared"] == PROMPTS
    assert against["differ"] == sum(a.tokens != b.tokens for a, b in zip(greedy, calls, strict=True)) > 0
    assert against["margin"]["lowest"] >= 0.0 and against["log_probability"] < 0.0


# --- the law --------------------------------------------------------------------------------------------------------


def test_ranks_of_a_law_written_down():
    """Ordered: token 2 (.5), then 0 and 3 (.2 each, ties by id), then 1 (.1)."""
    law = torch.tensor([0.2, 0.1, 0.5, 0.2], dtype=torch.float64).log().expand(4, 4)
    low = drift.ranks(law, [2, 0, 3, 1], torch.zeros(4, dtype=torch.float64))
    assert low.tolist() == pytest.approx([0.0, 0.5, 0.7, 0.9])
    high = drift.ranks(law, [2, 0, 3, 1], torch.ones(4, dtype=torch.float64))
    assert high.tolist() == pytest.approx([0.5, 0.7, 0.9, 1.0])


def test_ranks_of_a_sample_are_uniform():
    law = torch.randn(64, 11, dtype=torch.float64).log_softmax(-1)
    tokens = torch.multinomial(law.exp(), 40, replacement=True)
    ranks = [drift.ranks(law, column.tolist(), torch.rand(64, dtype=torch.float64)) for column in tokens.T]
    assert stats.kstest(torch.cat(ranks).tolist(), "uniform").pvalue > 0.01


def test_a_sampler_of_another_law_is_caught(scene):
    """At temperature 1: two exact samplers agree; one that samples at 0.7 is told apart from them."""
    target, prompts, _ = scene

    def calls(name: str, temperature: float, rounds: range):
        rows = [
            measure(target, plain(target), item, ids, Settings(24, temperature), r, 1)
            for item, ids in prompts.values()
            for r in rounds
        ]
        return as_method(rows, name, temperature=1.0)

    results = [*calls("plain", 1.0, range(3)), *calls("exact", 1.0, range(3, 6)), *calls("cold", 0.6, range(3))]
    found = drift.sampled(target, prompts, results, 1.0, seed=0)
    tests = found["methods"]
    assert found["plain_tokens"] == tests["exact"]["tokens"] == 3 * 24 * PROMPTS
    assert tests["exact"]["p_value"] > 0.01 and tests["exact"]["p_uniform"] > 0.01
    assert tests["cold"]["p_value"] < 1e-6 and tests["cold"]["p_uniform"] < 1e-6
    assert tests["plain"]["p_value"] is None and tests["plain"]["p_uniform"] > 0.01
    assert drift.sampled(target, prompts, results, 1.0, seed=0) == found
