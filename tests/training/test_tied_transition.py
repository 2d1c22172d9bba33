"""A tied transition is one of the target's own matrices while it is trained, and plain tables afterwards."""

from typing import Any

import pytest
import torch
from conftest import tiny_drafter, tiny_target

from flashmap_hf.head import Transition
from flashmap_hf.training.tied_transition import TiedTransition, tie, tie_tables, untie

VOCABULARY, RANK, IDS = 64, 4, [3, 5, 7, 11, 13, 40, 41, 60]


def head(seed: int = 0, rank: int | None = RANK) -> Any:
    drafter = tiny_drafter(tiny_target("llama", vocab_size=VOCABULARY), transition_rank=rank, draft_vocab_size=len(IDS))
    drafter.head.draft_vocab_ids.copy_(torch.tensor(IDS))
    tie(drafter.head, seed)
    return drafter.head


def matrices(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(VOCABULARY, width, generator=generator) for _ in range(2))  # type: ignore[return-value]


@pytest.fixture
def trained() -> Any:
    """A head with a tied transition that says something, bound to the target's matrices."""
    found = head()
    width = found.transition.endpoint.in_features
    embeddings, unembedding = matrices(width)
    found.transition.bind(embeddings[IDS], unembedding[IDS])
    with torch.no_grad():
        found.transition.readout.weight.normal_()
        found.transition.outside.normal_()
    return found


def test_it_starts_without_a_bias(trained: Any) -> None:
    new = head()
    new.transition.bind(trained.transition.embeddings, trained.transition.rows)
    z_1, logits = torch.randn(9, new.transition.endpoint.in_features), torch.randn(9, len(IDS))
    assert torch.equal(new.biased(logits, z_1, torch.arange(9)), logits)  # 8 is every token outside


def test_it_is_the_formula(trained: Any) -> None:
    tied, y = trained.transition, 3
    z_1 = torch.randn(tied.endpoint.in_features)
    e = matrices(len(z_1))[0][IDS[y]]
    e = e / (e.square().mean() + torch.finfo(torch.float32).eps).sqrt()
    hidden = torch.nn.functional.silu(tied.previous.weight @ e + tied.endpoint.weight @ z_1)
    expected = matrices(len(z_1))[1][IDS] @ (tied.readout.weight @ hidden)
    torch.testing.assert_close(tied(z_1, torch.tensor(y)), expected, rtol=1e-5, atol=1e-5)


def test_its_tables_say_the_same_and_tie_again_to_the_same(trained: Any) -> None:
    tied = trained.transition
    z_1, previous = torch.randn(5, 3, tied.endpoint.in_features), torch.randint(0, len(IDS) + 1, (5, 3))
    expected = tied(z_1, previous)
    untie(trained)
    assert isinstance(trained.transition, Transition)
    torch.testing.assert_close(trained.transition(z_1, previous), expected, rtol=1e-5, atol=1e-5)
    tie_tables(trained, *matrices(z_1.shape[-1]))
    assert isinstance(trained.transition, TiedTransition)
    torch.testing.assert_close(trained.transition(z_1, previous), expected, rtol=1e-3, atol=1e-3)


def test_the_target_s_matrices_are_no_part_of_it(trained: Any) -> None:
    names = {name for name, _ in trained.transition.named_parameters()}
    assert (
        names
        == {"previous.weight", "endpoint.weight", "readout.weight", "outside"}
        == set(trained.transition.state_dict())
    )


def test_it_depends_on_the_seed_alone_and_draws_from_no_other_generator() -> None:
    state = torch.random.get_rng_state()
    heads = [head(seed) for seed in (0, 0, 1)]
    first, again, other = (found.transition.previous.weight for found in heads)
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.random.set_rng_state(state)
    TiedTransition(8, 2, torch.Generator().manual_seed(0))
    assert torch.equal(state, torch.random.get_rng_state())


def test_without_a_transition_nothing_happens() -> None:
    without = head(rank=None)
    tie_tables(without, *matrices(8))
    untie(without)
    assert without.transition is None
