"""The transition starts as a table of bigrams."""

import torch
from conftest import tiny_drafter, tiny_target

from flashmap_hf.training.shards import SequenceFeatures
from flashmap_hf.training.sources import LoadedFeatures
from flashmap_hf.training.warm_transition import neighbours, warm_transition

VOCABULARY = 64


def answer(tokens: list[int], first: int = 1) -> SequenceFeatures:
    """A sequence of which only the tokens matter; the first ones are the prompt's."""
    nothing = torch.zeros(len(tokens) - first)
    ids = torch.tensor(tokens, dtype=torch.int32)
    return SequenceFeatures(torch.zeros(len(tokens), 1), ids, ids[first:], nothing, nothing, first)


def source(*answers: list[int]) -> LoadedFeatures:
    return LoadedFeatures([answer(tokens) for tokens in answers], [1], 8)


def head(rank=None, ids=None):
    size = None if ids is None else len(ids)
    drafter = tiny_drafter(tiny_target("llama", vocab_size=VOCABULARY), transition_rank=rank, draft_vocab_size=size)
    if ids is not None:
        drafter.head.draft_vocab_ids.copy_(torch.tensor(ids))
    return drafter.head


def test_pairs_stay_within_answers_and_within_the_draft_vocabulary():
    previous, following = neighbours(head(4, [5, 7, 9, 11]), source([0, 5, 7, 9], [0, 11, 30, 5]))
    assert (previous.tolist(), following.tolist()) == ([0, 1, 4], [1, 2, 0])  # 30 is outside: N before, never after


def test_it_says_what_follows_what_and_nothing_of_the_rest():
    """Every token y has its own next one; a token that was never seen leaves the logits nearly as they are."""
    fitted = head(16)
    warm_transition(fitted, source([1, *(list(range(2, 40)) * 20)]), seed=0)
    seen, never = torch.arange(2, 39), torch.arange(45, 60)
    z_1, logits = torch.randn(len(seen), fitted.transition.endpoint.in_features), torch.zeros(len(seen), fitted.size)
    with torch.no_grad():
        assert fitted.biased(logits, z_1, seen).argmax(-1).tolist() == (seen + 1).tolist()
        sure = fitted.biased(logits, z_1, seen).amax(-1).mean()
        assert fitted.biased(logits[: len(never)], z_1[: len(never)], never).abs().mean() < 0.2 * sure


def test_it_depends_on_the_seed_alone_and_draws_from_no_other_generator():
    first, again, other = head(4), head(4), head(4)
    state = torch.random.get_rng_state()
    for fitted, seed in ((first, 0), (again, 0), (other, 1)):
        warm_transition(fitted, source([1, 2, 3, 4, 2, 3, 4]), seed)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first.transition.readout.weight, again.transition.readout.weight)
    assert not torch.equal(first.transition.readout.weight, other.transition.readout.weight)
    assert all(p.grad is None for p in first.parameters())


def test_without_a_transition_or_a_pair_nothing_happens():
    without, alone = head(), head(4)
    before = alone.transition.previous.weight.clone()
    warm_transition(without, source([1, 2, 3]), 0)
    warm_transition(alone, source([1, 2]), 0)
    assert torch.equal(alone.transition.previous.weight, before)
