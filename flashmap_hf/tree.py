"""Token trees: several drafted continuations in one target forward, shared prefixes drafted once.

Trees are small (tens of nodes) and every step builds one: plain lists and integers, no tensor until the mask.

Best-first trees: Chen et al. 2024 (arXiv:2402.12374), Li et al. 2024 (arXiv:2406.16858).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# `level(k, parents)`: log-probabilities and tokens `[M, C]` of the C candidates after each of the M kept nodes of depth
# k, whose tokens are `parents` (`None` at depth 0, the anchor). A lattice without regard to the parents gives M = 1.
Level = Callable[[int, list[int] | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens of one sequence. Parents come before children; siblings are distinct tokens."""

    tokens: list[int]  # node i's token, an id of the target
    parents: list[int]  # parents[i] < i; -1: a child of the anchor
    joint: list[float]  # estimated probability that all tokens up to node i are right; never rises along a path

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> list[int]:
        """1 for the children of the anchor."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @cached_property
    def children(self) -> list[list[int]]:
        """children[0]: nodes that follow the anchor; children[i + 1]: those that follow node i."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return children

    @property
    def is_chain(self) -> bool:
        """Whether node i + 1 follows node i: causal attention sees what `mask` shows."""
        return self.parents == list(range(-1, len(self) - 1))

    def mask(self) -> Tensor:  # [N + 1, N + 1] bool, on the CPU
        """Who sees whom, the anchor first: True where the column is the row itself or one of its ancestors."""
        width = len(self) + 1
        rows = [bytearray(width)]
        rows[0][0] = 1
        for node, parent in enumerate(self.parents):
            row = bytearray(rows[parent + 1])
            row[node + 1] = 1
            rows.append(row)
        return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(width, width)

    def path(self, node: int) -> list[int]:
        """Nodes from the first level to `node`; empty for the anchor, -1."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def best(self, size: int) -> TokenTree:
        """The `size` most probable nodes in their old order; ties: earlier depth, then earlier node.

        No node is more probable than its parent, so what is left is a tree.
        """
        if size >= len(self):
            return self
        depths, joint = self.depths, self.joint
        kept = sorted(range(len(self)), key=lambda node: (-joint[node], depths[node], node))[:size]
        kept.sort()
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return TokenTree(
            [self.tokens[node] for node in kept],
            [place[self.parents[node]] for node in kept],
            [joint[node] for node in kept],
        )


def chain(tokens: Sequence[int], joint: Sequence[float]) -> TokenTree:
    """One branch. joint: probability that the tokens up to and with this one are right."""
    return TokenTree(list(tokens), list(range(-1, len(tokens) - 1)), list(joint))


def best_first(level: Level, depth: int, size: int) -> TokenTree:
    """The `size` most probable nodes within `depth` tokens of the anchor, most probable first.

    Ties: earlier depth, then earlier parent, then candidate order. Candidates of probability zero (or NaN) are left
    out. Level by level, so that `level` is called `depth` times at most; equal to `best_first_reference`, since a node
    behind `size` others of its own or an earlier depth has all its descendants behind them too.
    """
    nodes: list[tuple[float, int, int, int, int]] = []  # (-joint, depth, rank in the depth, parent's rank, token)
    joints, parents = [1.0], None
    floor = 0.0  # what a later node must exceed to be among the best `size`
    for k in range(depth if size > 0 else 0):
        probs, tokens = _candidates(level, k, parents, len(joints))
        found = []
        for rank, joint in enumerate(joints):
            found += [(-joint * p, rank, c) for c, p in enumerate(probs[rank]) if joint * p > floor]
        found.sort()
        del found[size:]
        nodes += [(joint, k, i, rank, tokens[rank][c]) for i, (joint, rank, c) in enumerate(found)]
        nodes.sort()
        del nodes[size:]
        kept = [node for node in nodes if node[1] == k]  # the first ones of `found`
        if not kept:
            break
        if len(nodes) == size:
            floor = -nodes[-1][0]
        joints, parents = [-node[0] for node in kept], [node[4] for node in kept]
    place = {(k, rank): i for i, (_, k, rank, _, _) in enumerate(nodes)}
    return TokenTree(
        [token for *_, token in nodes],
        [place[k - 1, parent] if k else -1 for _, k, _, parent, _ in nodes],
        [-joint for joint, *_ in nodes],
    )


def best_first_reference(level: Level, depth: int, size: int) -> TokenTree:
    """`best_first` by the book: a heap, one expansion and one call of `level` per node."""
    tree = TokenTree([], [], [])
    order = itertools.count()  # by which candidates of equal probability and depth leave the heap in their turn
    heap: list[tuple[float, int, int, int, int]] = []

    def expand(node: int, joint: float, k: int) -> None:
        if k < depth:
            probs, tokens = _candidates(level, k, [tree.tokens[node]] if k else None, 1)
            for p, token in zip(probs[0], tokens[0], strict=True):
                if joint * p > 0:
                    heapq.heappush(heap, (-joint * p, k, next(order), node, token))

    expand(-1, 1.0, 0)
    while heap and len(tree) < size:
        joint, k, _, parent, token = heapq.heappop(heap)
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.joint.append(-joint)
        expand(len(tree) - 1, -joint, k + 1)
    return tree


def merge(tree: TokenTree, branches: Sequence[tuple[Sequence[int], Sequence[float]]]) -> TokenTree:
    """Add chains (tokens, joint), sharing prefixes with `tree` and with one another; new nodes come last.

    A node that both have keeps the larger probability. A chain's own joint may rise: it is cut to what comes before.
    """
    merged = _Trie(list(tree.tokens), list(tree.parents), list(tree.joint))
    for tokens, joint in branches:
        node, bound = -1, 1.0
        for token, p in zip(tokens, joint, strict=True):
            node, bound = merged.child(node, token), min(bound, p)
            merged.joint[node] = max(merged.joint[node], bound)
    return TokenTree(merged.tokens, merged.parents, merged.joint)


def walk_choices(tree: TokenTree, choices: Sequence[int]) -> list[int]:
    """The accepted nodes, first level first; choices[0] is the target's token after the anchor, [i + 1] after node i.

    The token to emit behind them is `choices[path[-1] + 1]`, or `choices[0]` where none is accepted.
    """
    path: list[int] = []
    node = -1
    while True:
        wanted = choices[node + 1]
        following = next((child for child in tree.children[node + 1] if tree.tokens[child] == wanted), None)
        if following is None:
            return path
        path.append(node := following)


class _Trie:
    """The lists of a tree while it grows."""

    def __init__(self, tokens: list[int], parents: list[int], joint: list[float]) -> None:
        self.tokens, self.parents, self.joint = tokens, parents, joint
        self.places = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}

    def child(self, parent: int, token: int) -> int:
        """The node of `token` behind `parent`, made where it is missing."""
        node = self.places.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.joint.append(0.0)
        return node


def _candidates(
    level: Level, k: int, parents: list[int] | None, rows: int
) -> tuple[list[list[float]], list[list[int]]]:
    """Probabilities, at most 1, and tokens of the candidates at depth k: `rows` lists each."""
    log_probs, tokens = level(k, parents)
    # a product with a factor of at most 1 never rises, to the last bit: so no node passes its parent
    probs: list[list[float]] = log_probs.double().exp().clamp_(max=1.0).tolist()
    names: list[list[int]] = tokens.tolist()
    return probs * rows if len(probs) == 1 else probs, names * rows if len(names) == 1 else names
