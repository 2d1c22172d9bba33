"""Trees over held-out answers: as often kept as verification keeps them."""

from typing import Any

import pytest
import torch
from small_drafter import TAPS, K, W, like
from transformers import LlamaForCausalLM

from flashmap_hf import FlashMapDrafter
from flashmap_hf.sampled_tree import grow
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.blocks import make_batch
from flashmap_hf.training.features import compute
from flashmap_hf.training.held_out import walk_held_out
from flashmap_hf.training.objective import BlockObjective
from flashmap_hf.training.rejection import HiddenNoiseObjective
from flashmap_hf.training.shards import SequenceFeatures
from flashmap_hf.training.sources import LoadedFeatures
from flashmap_hf.training.train import matrices
from flashmap_hf.training.tree_walk import _Answer, tree_facts, walk_trees


@pytest.fixture(scope="module")
def sequences(target: LlamaForCausalLM, answers: list[Answer]) -> list[SequenceFeatures]:
    return [compute(target, a, TAPS, context=8) for a in answers]


def objective_for(target: LlamaForCausalLM, **overrides: Any) -> HiddenNoiseObjective:
    torch.manual_seed(0)
    drafter = FlashMapDrafter(like(target, **overrides)).eval()
    if drafter.head.transition is not None:
        torch.nn.init.normal_(drafter.head.transition.readout.weight)
    return HiddenNoiseObjective(drafter, *matrices(target, drafter.config), 1.0)


def test_a_greedy_tree_of_one_path_is_the_chain(target: LlamaForCausalLM, sequences: list[SequenceFeatures]) -> None:
    """The drafter knows nothing, so that more than one token of a chain is never right."""
    objective = objective_for(target, transition_rank=4)
    source = LoadedFeatures(sequences, TAPS, 8)
    chain = walk_held_out(
        BlockObjective(objective.drafter, objective.embeddings, objective.unembedding, 1.0), source, 0
    )
    one, many = (walk_trees(objective, source, size, 0)[False] for size in (1, 24))
    assert (one.steps, one.joint[0]) == (chain[False].steps, chain[False].joint[0])  # nothing is right behind
    assert one.joint[1:] == [0] * (K - 1)
    assert many.steps < one.steps and many.joint[0] > one.joint[0]


def test_a_known_token_is_kept_as_often_as_it_would_be_emitted_by_a_drafted_one(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures]
) -> None:
    """Given that y is emitted: always where it is among the certain ones, else min(1, q / p), what is left of both."""
    objective = objective_for(target, transition_rank=4)
    objective.drafter.head.readout_scale.data *= 4  # laws with something to refuse
    sequence = next(s for s in sequences if s.sampled)
    count = len(sequence.tokens) - sequence.first - 1
    batch = make_batch([sequence], [sequence.first], count, W, K, objective.drafter.config.target_hidden_size)
    generator = torch.Generator().manual_seed(0)
    answer = _Answer(objective, batch, True, generator)
    sums = {children: [0.0, 0.0, 0.0] for children in (1, 8)}  # kept, expected, and the variance of it
    certain = 0
    with torch.inference_mode():
        for place in range(count):
            answer.place = place
            y, q = answer.known[place][0], answer._laws(0, [[]])[0]
            p = torch.nn.functional.linear(answer.final[place], objective.unembedding).softmax(-1)
            mass = answer.mass[place][0]
            assert float(p[y]) == pytest.approx(mass, rel=0.02)  # the states are kept in bfloat16
            for children, total in sums.items():
                names = q.topk(children - 1).indices.tolist()
                left = q.clone()
                left[names] = 0.0
                kept = float(left[y] / left.sum()) / (mass / (1 - float(p[names].sum())))
                share = 1.0 if y in names else min(1.0, kept)
                trees = [grow(answer._laws, 1, children, 1e-6, answer._draw)[0].tokens for _ in range(300)]
                found = sum(y in tokens for tokens in trees)
                assert found == 300 or share < 1.0
                total[0] += found
                total[1] += 300 * share
                total[2] += 300 * share * (1 - share)
                certain += y in names
    assert certain
    for kept, expected, variance in sums.values():
        assert variance > 0.0
        assert abs(kept - expected) <= 4 * variance**0.5


def test_facts_for_the_record(target: LlamaForCausalLM, sequences: list[SequenceFeatures]) -> None:
    source = LoadedFeatures(sequences, TAPS, 8)
    facts = tree_facts(objective_for(target), source, [2, 8], 0)
    assert list(facts["trees"]) == ["2", "8"]
    assert all(rate >= 1.0 for rates in facts["trees"].values() for rate in rates.values())
    assert tree_facts(objective_for(target, coupling="independent"), source, [2], 0) == {}
    assert tree_facts(objective_for(target, tap_layers=[2]), source, [2], 0) == {}
