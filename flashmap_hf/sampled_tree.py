"""Token trees for rejection sampling: behind a node its law's likeliest tokens, and one that is drawn from the rest.

With q the law behind a node, its first m children are the m most likely tokens, taken without a draw; one more is drawn
from q without them. Tried in this order (`verification.verify_children`), the first are accepted with all of the
target's probability, and the last with the overlap of what both laws leave: Hu et al. 2025 (arXiv:2502.18779) show that
this way of drafting is close to the best there is. With m = 0 throughout it is a drawn chain.

How many children a node gets is decided from laws, before its token is drawn: a choice that knew the token would
condition it on having been kept, and bias the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashmap_hf.tree import TokenTree

WIDTH = 8  # children of a node at most
# What a flat law of the drafter is taken to have in common with the target's; one that is sure of a token is taken at
# its word. It decides shapes alone, and the pace corrects what they claim.
OVERLAP = 0.25
_HALVINGS = 12  # of the search for a floor

Offers = list[list[tuple[int, Tensor | None]]]  # by place (anchor, nodes): child nodes in turn, each with its law [V]
# `level(k, paths)`: the laws `[M, V]` of the drafter after each of M paths of k tokens; None: it has none to offer.
LawLevel = Callable[[int, list[list[int]]], Tensor | None]
# `draw(laws, nodes)`: `[R]`, one token from each law `[R, V]`, for these of the paths that `level` was last asked for.
Draw = Callable[[Tensor, list[int]], Tensor]


@dataclass(frozen=True)
class Shares:
    """What children of nodes with known laws are expected to win; a list per node. C: children at most.

    likely `[C - 1]`: the largest probabilities; tokens: whose they are. accepted `[C]`: probability that one of n + 1
    children is accepted; drawn `[C]`: that it is the drawn one, behind n likely ones.
    """

    likely: list[list[float]]
    tokens: list[list[int]]
    accepted: list[list[float]]
    drawn: list[list[float]]

    @classmethod
    def of(cls, laws: Tensor) -> Shares:  # [M, V]
        best = laws.topk(min(WIDTH, laws.shape[-1]) - 1)
        likely = best.values.cpu().double()
        none = likely.new_zeros(len(laws), 1)
        taken = torch.cat([none, likely.cumsum(-1)], dim=-1)
        # the law of what is left, r = q / (1 - taken), meets the target's with c + (1 - c) sum r^2
        norm = torch.linalg.vector_norm(laws.float(), dim=-1, keepdim=True).cpu().double()
        squares = norm.square() - torch.cat([none, likely.square().cumsum(-1)], dim=-1)
        left = (1 - taken).clamp(min=0)
        drawn = OVERLAP * left + (1 - OVERLAP) * squares.clamp(min=0) / left.clamp(min=1e-9)
        drawn = torch.minimum(drawn, left)
        return cls(likely.tolist(), best.indices.tolist(), (taken + drawn).tolist(), drawn.tolist())

    def children(self, node: int, reach: float, floor: float, room: int) -> int:
        """How many children are worth `floor` or more each, where the node itself is reached with `reach`."""
        count, before = 0, 0.0
        for accepted in self.accepted[node][:room]:
            if not reach * (accepted - before) >= floor:  # NaN, of a law that allows nothing, is no child either
                break
            count, before = count + 1, accepted
        return count


def expected(shares: Shares, size: int) -> list[float]:
    """What each of at most `size` nodes adds to the tokens accepted, in descending order, before anything is drawn.

    shares: of a stand-in for the drafter's laws, one for each depth, whatever path leads there.
    """
    return _outline(shares, floor_for(shares, size))[:size]


def floor_for(shares: Shares, size: int) -> float:
    """What a node must add for about `size` nodes to be worth it; shares as in `expected`."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_outline(shares, middle, size)) <= size else (middle, high)
    # what lies between may be the whole tree, where laws are sure: the gain of its last node tells them apart
    gains = _outline(shares, low) if low else []
    return max(low, gains[size - 1]) if len(gains) >= size else high


def _outline(shares: Shares, floor: float, most: int = 10**9) -> list[float]:
    """Gains of the nodes of a tree in which every law of a depth is the same, until there are more than `most`."""
    gains: list[float] = []
    live = [1.0]
    for k in range(len(shares.accepted)):
        following = []
        for reach in live:
            count = shares.children(k, reach, floor, WIDTH)
            accepted = [0.0, *shares.accepted[k][:count]]
            gains += [reach * (after - before) for before, after in itertools.pairwise(accepted)]
            if count:
                following += [reach * p for p in (*shares.likely[k][: count - 1], shares.drawn[k][count - 1])]
        live = following
        if len(gains) > most:
            break
    return sorted(gains, reverse=True)


def grow(level: LawLevel, depth: int, size: int, floor: float, draw: Draw) -> tuple[TokenTree, Offers]:
    """A tree of at most `size` nodes, each of which is expected to add `floor` or more.

    Returns:
        the tree, whose `joint` is the estimated probability that a node is accepted; and its offers, where None is the
        law of a token that was taken for certain.
    """
    tree, offers = TokenTree([], [], []), Offers([[]])
    live = [-1]
    for k in range(depth):
        room = size - len(tree)
        if not live or room < 1:
            break
        laws = level(k, [[tree.tokens[i] for i in tree.path(node)] for node in live])
        if laws is None:  # the tokens so far stand: dropping them for what they led to would bias the law
            break
        shares = Shares.of(laws)
        reaches = [tree.joint[node] if node >= 0 else 1.0 for node in live]
        counts = [0] * len(live)
        for i in sorted(range(len(live)), key=lambda i: -reaches[i]):
            counts[i] = min(room, shares.children(i, reaches[i], floor, room))
            room -= counts[i]
        following = []
        for i, token, law in _drawn(laws, shares, counts, draw):
            node, reach, likely = live[i], reaches[i], counts[i] - 1
            claims = [reach * p for p in (*shares.likely[i][:likely], shares.drawn[i][likely])]
            chosen = [*shares.tokens[i][:likely], token]
            for name, claim, drawn_from in zip(chosen, claims, [*[None] * likely, law], strict=True):
                following.append(len(tree))
                offers[node + 1].append((len(tree), drawn_from))
                offers.append([])
                tree.tokens.append(name)
                tree.parents.append(node)
                tree.joint.append(claim)
        live = following
    return TokenTree(tree.tokens, tree.parents, tree.joint), offers


def _drawn(laws: Tensor, shares: Shares, counts: list[int], draw: Draw) -> list[tuple[int, int, Tensor]]:
    """For each node with children: its number, the token drawn, and the law it was drawn from."""
    nodes = [i for i, count in enumerate(counts) if count]
    if not nodes:
        return []
    rest = laws[nodes]
    for row, i in enumerate(nodes):
        rest[row, shares.tokens[i][: counts[i] - 1]] = 0.0
    rest = rest / rest.sum(-1, keepdim=True)
    return list(zip(nodes, draw(rest, nodes).tolist(), rest, strict=True))
