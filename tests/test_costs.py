"""The table of costs: fitted as stated, measured without a trace in the models, measured once per pair."""

from __future__ import annotations

import gc
import math
import weakref
from itertools import pairwise

import pytest
import torch
from conftest import tiny_drafter, tiny_target
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flashmap_hf import costs
from flashmap_hf.costs import StepCost, cost_of, measure_cost


def test_between_and_behind_what_was_measured():
    cost = StepCost({1: 1.0, 5: 2.0, 9: 5.0}, draft=0.25)
    assert [cost.forward(n) for n in (1, 3, 5, 6, 9)] == [1.0, 1.5, 2.0, 2.75, 5.0]
    assert cost.forward(13) == 8.0  # the slope of the last stretch
    assert StepCost({1: 1.0, 9: 5.0, 17: 5.0}).forward(33) == 9.0  # of the whole, where the last stretch is flat
    assert StepCost({1: 2.0}).forward(7) == 2.0
    assert (cost.draft_price, cost.price(1, 4), cost.price(3, 2)) == (0.25, 1.0, 5.0 / 1.5 - 1)


def test_noise_does_not_make_more_tokens_cheaper():
    cost = StepCost({1: 1.0, 2: 3.0, 3: 2.0, 5: 1.0, 9: 4.0})
    assert [cost.forward(n) for n in (1, 2, 3, 4, 5, 9)] == [1.0, 2.0, 2.0, 2.0, 2.0, 4.0]


TABLES = st.dictionaries(st.integers(2, 40), st.floats(0.1, 10), max_size=6).flatmap(
    lambda table: st.floats(0.1, 10).map(lambda one: {1: one} | table)
)


@given(TABLES)
def test_the_fit_is_isotonic_and_nearest(table):
    cost = StepCost(table)
    fitted = [cost.forward(n) for n in range(1, 100)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(fitted))
    assert all(cost.price(rows, n) >= -1e-12 for rows in (1, 3) for n in range(9))
    # least squares under an order: the largest over beginnings of the smallest over ends of the means between
    counts = sorted(table)
    for i, n in enumerate(counts):
        means = [
            min(sum(table[c] for c in counts[a : b + 1]) / (b + 1 - a) for b in range(i, len(counts)))
            for a in range(i + 1)
        ]
        assert cost.forward(n) == pytest.approx(max(means))


@pytest.mark.parametrize(
    ("verify", "draft", "message"),
    [
        ({}, 0.1, "verify must hold the cost of 1 token"),
        ({2: 1.0}, 0.1, "verify must hold the cost of 1 token"),
        ({0: 1.0, 1: 1.0}, 0.1, "verify must hold the cost of 1 token"),
        ({1: 0.0}, 0.1, "verify must hold seconds above 0"),
        ({1: 1.0, 2: math.nan}, 0.1, "verify must hold seconds above 0"),
        ({1: 1.0}, -0.1, "draft must be seconds"),
        ({1: 1.0}, math.inf, "draft must be seconds"),
    ],
)
def test_a_table_that_is_none_is_refused(verify, draft, message):
    with pytest.raises(ValueError, match=message):
        StepCost(verify, draft)


# --- measured -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3_text"])
def test_measuring_leaves_no_trace(family):
    target = tiny_target(family)
    state = {name: value.clone() for name, value in (*target.named_parameters(), *target.named_buffers())}
    random, modes = torch.get_rng_state(), [module.training for module in target.modules()]
    passes: list[bool] = []
    cost = measure_cost(target, lambda: passes.append(torch.is_grad_enabled()), rounds=2)
    assert sorted(cost.verify) == [1, 2, 3, 5, 9, 17]
    assert passes == [False] * 3
    assert cost.draft > 0
    assert cost.forward(17) > 0
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in target.modules()] == modes
    for name, value in (*target.named_parameters(), *target.named_buffers()):
        assert torch.equal(value, state[name])
        assert not value.is_inference()
    assert all(parameter.grad is None for parameter in target.parameters())
    assert target.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)


def test_forwards_are_of_the_stated_sizes_behind_the_same_context():
    target = tiny_target()
    seen: list[tuple[int, int]] = []

    def watch(module, args, kwargs):
        cache = kwargs.get("cache")
        seen.append((args[0].shape[1], 0 if cache is None else cache.get_seq_length()))

    target.register_forward_pre_hook(watch, with_kwargs=True)
    measure_cost(target, sizes=(1, 4), rounds=1, context=10)
    assert seen == [(10, 0), (1, 10), (4, 10), (1, 10), (4, 10)]


def test_a_target_with_few_positions_is_measured_with_what_fits():
    cost = measure_cost(tiny_target("gpt2", max_position_embeddings=16), rounds=1)
    assert sorted(cost.verify) == [1, 2, 3, 5]


def test_a_cache_that_cannot_be_rolled_back_is_refused():
    target = tiny_target()
    forward = target.forward

    def recurrent(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.cache.layers[0].is_croppable = False
        return output

    target.forward = recurrent
    with pytest.raises(ValueError, match="The cache of LlamaForCausalLM cannot be rolled back"):
        measure_cost(target)


def test_a_pair_is_measured_once(monkeypatch):
    measured: list[dict] = []

    def fake(target: nn.Module, drafter_pass, **options) -> StepCost:
        measured.append(options)
        return StepCost({1: float(len(measured))})

    monkeypatch.setattr(costs, "measure_cost", fake)
    target = tiny_target()
    drafter, other = tiny_drafter(target), tiny_drafter(target)
    first = cost_of(target, drafter, lambda: None)
    assert cost_of(target, drafter, lambda: None) is first
    assert cost_of(target, other, lambda: None) is not first
    assert cost_of(target, drafter, lambda: None, rounds=5) is not first
    assert cost_of(target, drafter, lambda: None) is first
    assert measured == [{}, {}, {"rounds": 5}]
    target.to(torch.bfloat16)
    assert cost_of(target, drafter, lambda: None) is not first
    target.float()
    assert cost_of(target, drafter, lambda: None) is first


def test_what_is_remembered_goes_with_the_models(monkeypatch):
    monkeypatch.setattr(costs, "measure_cost", lambda *args, **options: StepCost({1: 1.0}))
    target = tiny_target()
    drafter = tiny_drafter(target)
    cost = weakref.ref(cost_of(target, drafter, lambda: None))
    assert cost() is not None
    del drafter
    gc.collect()
    assert cost() is None
    drafter = tiny_drafter(target)
    cost = weakref.ref(cost_of(target, drafter, lambda: None))
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None
    assert cost() is None
