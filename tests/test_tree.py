"""Token trees: best-first equals its heap, the mask shows ancestors, merging by prefix, the accepted path."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashmap_hf.tree import (
    TokenTree,
    best_first,
    best_first_reference,
    chain,
    merge,
    walk_choices,
)

#        anchor
#       /   |   \
#      5    6    7        nodes 0, 1, 3
#     / \   |
#    8   9  8             nodes 2, 5, 4
SMALL = TokenTree([5, 6, 8, 7, 8, 9], [-1, -1, 0, -1, 1, 0], [0.5, 0.3, 0.3, 0.1, 0.2, 0.1])


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> TokenTree:
    """Any tree: parents before children, distinct siblings, probabilities that never rise, many ties."""
    tree = TokenTree([], [], [])
    taken: set[tuple[int, int]] = set()
    for node in range(draw(st.integers(0, most))):
        parent = draw(st.integers(-1, node - 1))
        free = [token for token in range(most) if (parent, token) not in taken]
        token = draw(st.sampled_from(free))
        taken.add((parent, token))
        above = tree.joint[parent] if parent >= 0 else 1.0
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.joint.append(above * draw(st.sampled_from([1.0, 0.5, 0.25, 0.1])))
    return tree


def check(tree: TokenTree) -> None:
    """What every tree promises."""
    assert len(tree.tokens) == len(tree.parents) == len(tree.joint) == len(tree)
    assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)
    assert all(
        p <= (tree.joint[parent] if parent >= 0 else 1.0) for p, parent in zip(tree.joint, tree.parents, strict=True)
    )


def texts(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """The tree as a set of token paths, with the probability of each."""
    return {tuple(tree.tokens[n] for n in tree.path(node)): tree.joint[node] for node in range(len(tree))}


# --- the tree itself ------------------------------------------------------------------------------------------------


def test_a_tree_knows_its_shape():
    assert SMALL.depths == [1, 1, 2, 1, 2, 2]
    assert SMALL.children == [[0, 1, 3], [2, 5], [4], [], [], [], []]
    assert SMALL.path(5) == [0, 5]
    assert SMALL.path(-1) == []
    assert not SMALL.is_chain
    assert len(TokenTree([], [], [])) == 0
    assert TokenTree([], [], []).children == [[]]


def test_a_chain_is_one():
    tree = chain([4, 4, 2], [0.9, 0.5, 0.5])
    check(tree)
    assert tree == TokenTree([4, 4, 2], [-1, 0, 1], [0.9, 0.5, 0.5])
    assert tree.is_chain
    assert chain([], []).is_chain
    assert not TokenTree([1, 2], [-1, -1], [0.5, 0.5]).is_chain
    assert torch.equal(tree.mask(), torch.ones(4, 4).tril().bool())


def test_the_mask_shows_ancestors():
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 0, 1],
    ]
    assert torch.equal(SMALL.mask(), torch.tensor(expected).bool())


@given(trees())
def test_the_mask_is_the_path_of_each_node(tree):
    mask = tree.mask()
    assert mask.shape == (len(tree) + 1, len(tree) + 1)
    assert mask.dtype == torch.bool
    for node in range(-1, len(tree)):
        assert mask[node + 1].nonzero().flatten().tolist() == [0, *(n + 1 for n in tree.path(node))]
        if node >= 0:
            assert tree.depths[node] == len(tree.path(node))


@given(trees(), st.integers(0, 13))
def test_best_keeps_the_most_probable_nodes_in_order(tree, size):
    best = tree.best(size)
    check(best)
    assert len(best) == min(size, len(tree))
    order = sorted(range(len(tree)), key=lambda node: (-tree.joint[node], tree.depths[node], node))
    kept = sorted(order[:size])
    assert [tuple(best.tokens[n] for n in best.path(i)) for i in range(len(best))] == [
        tuple(tree.tokens[n] for n in tree.path(node)) for node in kept
    ]
    assert best.joint == [tree.joint[node] for node in kept]


# --- best first -----------------------------------------------------------------------------------------------------


def lattice(log_probs: Tensor, tokens: Tensor):
    """[K, C] each, the same candidates after every node."""

    def level(k: int, parents: list[int] | None) -> tuple[Tensor, Tensor]:
        return log_probs[k : k + 1], tokens[k : k + 1]

    return level


def markov(table: Tensor, width: int):
    """[K, V, V]: at depth k, the law after each token; the anchor stands for token 0."""

    def level(k: int, parents: list[int] | None) -> tuple[Tensor, Tensor]:
        assert (parents is None) == (k == 0)
        rows = table[k, [0] if parents is None else parents]
        order = rows.sort(dim=-1, descending=True, stable=True)
        return order.values[:, :width], order.indices[:, :width]

    return level


def random_table(seed: int, depth: int, vocab_size: int, coarse: bool) -> Tensor:
    """Log-probabilities [K, V, V]; coarse ones tie within a row, between rows and between depths, and some are 0."""
    generator = torch.Generator().manual_seed(seed)
    shape = (depth, vocab_size, vocab_size)
    if coarse:
        return torch.tensor([0.5, 0.25, 0.125, 0.0])[torch.randint(4, shape, generator=generator)].log()
    return (torch.randn(shape, generator=generator) * 2).log_softmax(-1)


SHAPES = st.tuples(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 6), st.booleans())


@given(SHAPES, st.integers(1, 4), st.integers(0, 20))
def test_best_first_equals_the_heap(shape, width, size):
    level = markov(random_table(*shape), width)
    tree = best_first(level, shape[1], size)
    check(tree)
    assert tree == best_first_reference(level, shape[1], size)
    assert tree.joint == sorted(tree.joint, reverse=True)


@given(SHAPES, st.integers(0, 20), st.randoms(use_true_random=False))
def test_best_first_equals_the_heap_on_a_lattice_in_any_order(shape, size, random):
    log_probs = random_table(*shape)[:, 0]
    tokens = torch.tensor([random.sample(range(100), shape[2]) for _ in range(shape[1])])
    level = lattice(log_probs, tokens)
    tree = best_first(level, shape[1], size)
    check(tree)
    assert tree == best_first_reference(level, shape[1], size)


@given(SHAPES, st.integers(1, 12))
def test_best_first_keeps_the_most_probable_of_all_paths(shape, size):
    seed, depth, vocab_size, _ = shape
    table = random_table(seed, depth := min(depth, 3), vocab_size, False)
    tree = best_first(markov(table, vocab_size), depth, size)
    every = []
    for length in range(1, depth + 1):
        for path in itertools.product(range(vocab_size), repeat=length):
            steps = zip(range(depth), (0, *path), path, strict=False)
            every.append(math.exp(sum(float(table[k, before, after]) for k, before, after in steps)))
    assert tree.joint == pytest.approx(sorted(every, reverse=True)[:size], rel=1e-5)


def test_a_level_is_asked_once_for_nodes_that_can_still_matter():
    asked = []
    log_probs = torch.tensor([[0.6, 0.4], [0.5, 0.5], [0.9, 0.1]]).log()
    tokens = torch.tensor([[3, 4], [5, 6], [7, 8]])

    def level(k: int, parents: list[int] | None) -> tuple[Tensor, Tensor]:
        asked.append((k, parents))
        return log_probs[k : k + 1], tokens[k : k + 1]

    tree = best_first(level, 3, 3)
    # 3 (0.6), 4 (0.4), then 3 5 (0.3) before 3 6 (0.3): it came first among the candidates
    assert (tree.tokens, tree.parents) == ([3, 4, 5], [-1, -1, 0])
    assert asked == [(0, None), (1, [3, 4]), (2, [5])]


def test_ties_go_to_the_earlier_depth_then_parent_then_candidate():
    tree = best_first(lattice(torch.zeros(2, 2), torch.tensor([[1, 2], [3, 4]])), 2, 6)
    assert tree.tokens == [1, 2, 3, 4, 3, 4]
    assert tree.parents == [-1, -1, 0, 0, 1, 1]


def test_impossible_candidates_are_left_out_and_a_broken_one_too():
    log_probs = torch.tensor([[0.0, -math.inf, math.nan], [1e-6, -1.0, -math.inf]])  # rounding may pass 0
    tree = best_first(lattice(log_probs, torch.tensor([[1, 2, 3], [4, 5, 6]])), 2, 9)
    check(tree)
    assert tree == best_first_reference(lattice(log_probs, torch.tensor([[1, 2, 3], [4, 5, 6]])), 2, 9)
    assert tree.tokens == [1, 4, 5]
    assert len(best_first(lattice(log_probs, torch.tensor([[1, 2, 3], [4, 5, 6]])), 0, 9)) == 0


# --- merging --------------------------------------------------------------------------------------------------------

BRANCHES = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.1, 0.5, 0.9])), max_size=4).map(
        lambda pairs: ([token for token, _ in pairs], [p for _, p in pairs])
    ),
    max_size=4,
)


def test_merge_shares_prefixes():
    merged = merge(SMALL, [([5, 8, 1], [0.4, 0.4, 0.2]), ([5, 8, 2], [0.4, 0.1, 0.6])])
    assert merged.tokens == [*SMALL.tokens, 1, 2]
    assert merged.parents == [*SMALL.parents, 2, 2]
    # 5 8: 0.3 and 0.4 and 0.1; the last branch rises from 0.1 to 0.6, which is cut
    assert merged.joint == [0.5, 0.3, 0.4, 0.1, 0.2, 0.1, 0.2, 0.1]
    assert SMALL.tokens == [5, 6, 8, 7, 8, 9]
    assert merge(SMALL, []) == SMALL


@given(trees(), BRANCHES)
def test_merge_is_the_union_of_texts(tree, branches):
    merged = merge(tree, branches)
    check(merged)
    expected = texts(tree)
    for tokens, joint in branches:
        for length in range(1, len(tokens) + 1):
            text, p = tuple(tokens[:length]), min(joint[:length])
            expected[text] = max(expected.get(text, 0.0), p)
    assert texts(merged) == expected
    assert merged.tokens[: len(tree)] == tree.tokens
    assert merged.parents[: len(tree)] == tree.parents


# --- the accepted path ----------------------------------------------------------------------------------------------


@given(trees(), st.data())
def test_the_accepted_path_is_the_longest_that_the_target_spells(tree, data):
    choices = data.draw(st.lists(st.integers(0, 4), min_size=len(tree) + 1, max_size=len(tree) + 1))
    accepted = walk_choices(tree, choices)
    paths = [tree.path(node) for node in range(-1, len(tree))]
    right = [
        path
        for path in paths
        if all(tree.tokens[child] == choices[node + 1] for node, child in zip([-1, *path], path, strict=False))
    ]
    assert accepted == max(right, key=len)


def test_the_accepted_path_of_the_small_tree():
    assert walk_choices(SMALL, [5, 9, 0, 0, 0, 0, 3]) == [0, 5]
    assert walk_choices(SMALL, [7, 0, 0, 0, 0, 0, 0]) == [3]
    assert walk_choices(SMALL, [1, 0, 0, 0, 0, 0, 0]) == []
    assert walk_choices(TokenTree([], [], []), [1]) == []
