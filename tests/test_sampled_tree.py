"""Trees of certain and drawn tokens: their shape, and how much of the target's law their children cover."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashmap_hf.sampled_tree import OVERLAP, WIDTH, Shares, expected, floor_for, grow
from flashmap_hf.verification import draw, verify_children

V = 12


def law_of(seed: int, rows: int = 1, spread: float = 1.5) -> Tensor:
    return (spread * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def drawing(seed: int):
    generator = torch.Generator().manual_seed(seed)

    def drawn(laws: Tensor, nodes: list[int]) -> Tensor:
        return draw(laws, torch.rand(len(nodes), dtype=torch.float64, generator=generator))

    return drawn


def level_of(seed: int):
    """Another law behind each path."""

    def level(k: int, paths: list[list[int]]) -> Tensor:
        return torch.cat([law_of(hash((seed, k, *path)) % 2**31) for path in paths])

    return level


@given(seed=st.integers(0, 200), depth=st.integers(1, 4), size=st.integers(1, 20), floor=st.floats(0.001, 0.3))
def test_a_tree_is_well_formed_and_says_how_each_node_was_made(seed: int, depth: int, size: int, floor: float) -> None:
    level = level_of(seed)
    tree, offers = grow(level, depth, size, floor, drawing(seed))
    assert len(tree) <= size and len(offers) == len(tree) + 1
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert sorted(node for given in offers for node, _ in given) == list(range(len(tree)))
    for place, given_here in enumerate(offers):
        if not given_here:
            continue
        path = [tree.tokens[node] for node in tree.path(place - 1)]
        q = level(len(path), [path])[0]
        *certain, (last, law) = given_here
        assert [node for node, _ in given_here] == tree.children[place] and len(given_here) <= WIDTH
        assert all(no_law is None for _, no_law in certain)
        names = [tree.tokens[node] for node, _ in certain]
        assert names == q.topk(len(names)).indices.tolist()  # the likeliest, in order
        rest = q.clone()
        rest[names] = 0.0
        assert law is not None
        torch.testing.assert_close(law, rest / rest.sum())
        assert law[tree.tokens[last]] > 0
        reach = tree.joint[place - 1] if place else 1.0
        assert sum(tree.joint[node] for node, _ in given_here) <= reach + 1e-6


def test_how_many_children_a_node_gets_does_not_depend_on_its_own_draw() -> None:
    """A choice that knew the token would condition it on having been kept."""
    shapes, tokens = set(), set()
    for seed in range(60):
        tree, offers = grow(level_of(5), 3, 9, 0.03, drawing(seed))
        shapes.add(len(offers[0]))
        tokens.add(tree.tokens[offers[0][-1][0]])
    assert len(shapes) == 1 and len(tokens) > 3


@pytest.mark.parametrize("children", [1, 2, 4])
def test_children_are_accepted_with_what_is_certain_and_the_overlap_of_the_rest(children: int) -> None:
    q, p = law_of(1)[0], law_of(2)[0]
    accepted = kept = 0
    generator = torch.Generator().manual_seed(0)
    for seed in range(3000):
        tree, offers = grow(lambda k, paths: q[None], 1, children, 0.0001, drawing(seed))
        certain = [torch.nn.functional.one_hot(torch.tensor(tree.tokens[i]), V).float() for i, _ in offers[0][:-1]]
        laws = torch.stack([*certain, offers[0][-1][1]])
        verdict = verify_children(torch.tensor(tree.tokens), laws, p.log(), generator)
        accepted += int(verdict.child >= 0)
        kept += len(tree)
    assert kept == 3000 * children
    names = q.topk(children - 1).indices
    rest_p, rest_q = p.clone(), q.clone()
    rest_p[names] = rest_q[names] = 0.0
    share = p[names].sum() + torch.minimum(rest_p, rest_p.sum() * rest_q / rest_q.sum()).sum()
    spread = (share * (1 - share) / 3000).sqrt()
    assert abs(accepted / 3000 - share) < 4 * spread


def test_shares_of_a_sure_law_and_of_a_flat_one() -> None:
    sure = torch.zeros(1, V)
    sure[0, 3] = 1.0
    shares = Shares.of(sure)
    assert shares.accepted[0] == pytest.approx([1.0] * WIDTH)
    assert shares.children(0, 1.0, 0.01, 5) == 1  # nothing is left for a second one
    flat = Shares.of(torch.full((1, V), 1 / V))
    assert flat.accepted[0][0] == pytest.approx(OVERLAP + (1 - OVERLAP) / V)
    assert all(b >= a for a, b in zip(flat.accepted[0], flat.accepted[0][1:], strict=False))


def test_a_law_that_allows_nothing_has_no_children() -> None:
    nothing = torch.full((1, V), torch.nan)
    tree, offers = grow(lambda k, paths: nothing, 3, 5, 0.01, drawing(0))
    assert len(tree) == 0 and offers == [[]]


def test_where_laws_end_the_tokens_so_far_stand() -> None:
    tree, offers = grow(lambda k, paths: law_of(1, len(paths)) if k == 0 else None, 3, 5, 0.01, drawing(0))
    assert len(tree) > 0 and set(tree.depths) == {1} and len(offers) == len(tree) + 1


@given(seed=st.integers(0, 100), depth=st.integers(1, 5), size=st.integers(1, 32))
def test_a_floor_gives_about_so_many_nodes_and_claims_that_never_rise(seed: int, depth: int, size: int) -> None:
    laws = law_of(seed, depth)
    claims = expected(Shares.of(laws), size)
    assert 1 <= len(claims) <= size
    assert claims == sorted(claims, reverse=True)
    tree, _ = grow(
        lambda k, paths: laws[k].expand(len(paths), -1), depth, size, floor_for(Shares.of(laws), size), drawing(seed)
    )
    assert 1 <= len(tree) <= size
    assert sum(tree.joint) == pytest.approx(sum(claims[: len(tree)]), rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("sure", [0.99, 0.9999, 0.999999, 1.0])
def test_a_sure_drafter_gets_about_as_many_nodes_as_are_wanted(sure: float, size: int) -> None:
    laws = torch.full((8, V), (1 - sure) / (V - 1))
    laws[:, 2] = sure
    shares = Shares.of(laws)
    assert size - (size > 1) <= len(expected(shares, size)) <= size
    tree, _ = grow(
        lambda k, paths: laws[k].expand(len(paths), -1), 8, size, floor_for(shares, size), drawing(0)
    )  # fmt: skip
    assert size - (size > 1) <= len(tree) <= size
