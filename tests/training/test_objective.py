"""The objective's logits, in one product where the transition is tied, are those of the head."""

from typing import Any

import pytest
import torch
from conftest import tiny_drafter, tiny_target

from flashmap_hf.training.objective import BlockObjective
from flashmap_hf.training.tied_transition import TiedTransition, tie

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"transition_rank": 4, "draft_vocab_size": 24},
    "tied, whole vocabulary": {"transition_rank": 4},
    "tied, low-rank head": {"transition_rank": 4, "head": "low_rank", "head_rank": 3},
    "no transition": {"draft_vocab_size": 24},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_and_gradients_are_those_of_the_head(shape: dict[str, Any]) -> None:
    target = tiny_target("llama", vocab_size=64)
    drafter = tiny_drafter(target, **shape)
    tie(drafter.head, 0)
    embeddings, unembedding = (
        module.weight.detach().float() for module in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    objective = BlockObjective(drafter, embeddings, unembedding, 1.0)
    head = drafter.head
    with torch.no_grad():
        head.readout_scale.normal_()
        if isinstance(head.transition, TiedTransition):
            head.transition.readout.weight.normal_()
            head.transition.outside.normal_()
    generator = torch.Generator().manual_seed(0)
    endpoint = torch.randn(3, 2, drafter.config.target_hidden_size, generator=generator, requires_grad=True)
    previous = torch.randint(64, (3, 2), generator=generator)
    reference = head.biased(head(endpoint, objective.rows), endpoint, head.draft_positions(previous))
    fast = objective.logits(endpoint, previous)
    torch.testing.assert_close(fast, reference, rtol=1e-4, atol=1e-4)
    weight = torch.randn(reference.shape, generator=generator)
    inputs = [endpoint, *(p for p in head.parameters() if p.requires_grad)]
    expected = torch.autograd.grad((reference * weight).sum(), inputs, allow_unused=True)
    for found, gradient in zip(
        torch.autograd.grad((fast * weight).sum(), inputs, allow_unused=True), expected, strict=True
    ):
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-4)
