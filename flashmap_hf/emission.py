"""What one target forward yields: the accept rules along the nodes of a token tree, token by token."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch.nn import functional as F

from flashmap_hf.candidates import Draft
from flashmap_hf.verification import first_argmax, quantile_token, sampled_token, uniform, verify_children


@dataclass(frozen=True)
class Emitted:
    """One token. place: the position of the forward it came from, 0 for the anchor, i + 1 for node i.

    scores: `[1, V]`, processed; logits: `[1, V]`, raw; both float32. node: the drafted node that it is; -1: none.
    """

    token: torch.Tensor  # [1] int64
    place: int
    scores: torch.Tensor
    logits: torch.Tensor
    node: int


def emit(
    rule: str,
    draft: Draft,
    logits: torch.Tensor,  # [N + 1, V], the anchor's first, then the nodes'
    processors: Any,  # LogitsProcessorList
    input_ids: torch.Tensor,  # [1, T]
    u: torch.Tensor | None,  # [depth + 1] float64: of the target's own tokens, under shared noise and one-hot
    generator: torch.Generator | None = None,
) -> Iterator[Emitted]:
    """Walk down the tree as long as the token that the rule emits is a drafted one.

    A position is decided before the next one is processed: processors get what plain decoding gives them, every prefix
    once, in order, and none behind the token at which the caller stops.

    Raises:
        ValueError: a token has to be drawn from logits that are no law.
    """
    tree, offers = draft.tree, draft.offers
    choices = None
    if rule == "greedy" and not processors:  # all at once: one reduction, one transfer
        choices = first_argmax(logits.float()).tolist()
    place = depth = 0
    prefix = input_ids
    while True:
        raw = logits[place : place + 1].to(dtype=torch.float32, device=input_ids.device, copy=True)
        scores = processors(prefix, raw.clone()) if processors else raw
        children = tree.children[place]
        node = -1
        if choices is not None:
            token = input_ids.new_tensor([choices[place]])
        elif rule == "greedy":
            token = first_argmax(scores)
        elif rule == "shared_noise":
            assert u is not None
            token = quantile_token(scores, u[depth : depth + 1].to(scores.device))
        elif rule == "one_hot":
            assert u is not None
            token = sampled_token(scores, u[depth : depth + 1].to(scores.device))
        else:
            token, node = _by_rejection(tree.tokens, offers[place] if offers else [], scores, generator)
        if rule != "rejection" and children:
            chosen = int(token)
            node = next((child for child in children if tree.tokens[child] == chosen), -1)
        yield Emitted(token, place, scores, raw, node)
        if node < 0:
            return
        place, depth = node + 1, depth + 1
        if processors:
            prefix = torch.cat([prefix, token[None]], dim=1)


def _by_rejection(
    tokens: list[int],
    offers: list[tuple[int, torch.Tensor | None]],
    scores: torch.Tensor,
    generator: torch.Generator | None,
) -> tuple[torch.Tensor, int]:
    """The offers in turn, each with the law it was drawn from; then what is left. -> `[1]` token, its node or -1."""
    if not offers:
        return sampled_token(scores, uniform((1,), scores, generator)), -1
    certain = list(takewhile(lambda offer: offer[1] is None, offers))
    if certain:  # tried in turn they are accepted with all of their probability: one draw tells
        token = sampled_token(scores, uniform((1,), scores, generator))
        node = next((node for node, _ in certain if tokens[node] == int(token)), -1)
        if node >= 0 or len(certain) == len(offers):
            return token, node
        scores = scores.index_fill(-1, scores.new_tensor([tokens[node] for node, _ in certain]).long(), -torch.inf)
    rest = offers[len(certain) :]
    children = torch.tensor([tokens[node] for node, _ in rest], device=scores.device)
    laws = F.one_hot(children, scores.shape[-1]).float()
    for i, (_, law) in enumerate(rest):
        if law is not None:
            laws[i] = law
    verdict = verify_children(children, laws, scores[0], generator)
    child = int(verdict.child)
    return verdict.token.view(1), -1 if child < 0 else rest[child][0]
