"""The transition of a new drafter begins as what pairs of neighbouring tokens say, not at nothing.

It is fitted on the answers' tokens alone, before anything else is trained: a table of bigrams of low rank. So every
position of a block starts with the acceptance of such a table, which the rest of the drafter then goes beyond.
"""

import torch
from torch import nn

from flashmap_hf.head import DraftHead
from flashmap_hf.training.sources import FeatureSource

STEPS, PAIRS, RATE = 200, 1024, 0.03
SPREAD = 0.1  # of A: small, so that a token that was never seen says next to nothing


def warm_transition(head: DraftHead, source: FeatureSource, seed: int) -> None:
    """Fit `B silu(A[y])` to the token after y by cross-entropy, C being zero; changes `head.transition` in place.

    Every draw is from a generator of its own. Does nothing without a transition, or without a pair to learn from.
    """
    transition = head.transition
    if transition is None:
        return
    previous, following = neighbours(head, source)
    if not len(previous):
        return
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        transition.previous.weight.normal_(std=SPREAD, generator=generator)
        transition.readout.weight.normal_(std=SPREAD, generator=generator)
        transition.endpoint.weight.zero_()
    parameters = [transition.previous.weight, transition.readout.weight]
    optimiser = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = RATE * (1.0 - step / STEPS)
        chosen = torch.randint(len(previous), (PAIRS,), generator=generator)
        logits = transition.readout(nn.functional.silu(transition.previous(previous[chosen])))
        loss = nn.functional.cross_entropy(logits, following[chosen])
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def neighbours(head: DraftHead, source: FeatureSource) -> tuple[torch.Tensor, torch.Tensor]:  # [P], [P]
    """All pairs of neighbouring response tokens, as positions in the draft vocabulary; the second one lies in it."""
    responses = [torch.as_tensor(source.response(index), dtype=torch.long) for index in range(len(source))]
    if not responses:
        return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
    places = head.draft_positions(torch.cat(responses))
    ends = torch.tensor([len(response) for response in responses]).cumsum(0)
    pairs = torch.ones(len(places), dtype=torch.bool)
    pairs[ends[ends > 0] - 1] = False  # the last token of an answer has nothing after it
    previous = places[pairs]
    following = places.roll(-1)[pairs]
    known = following < head.size
    return previous[known], following[known]
