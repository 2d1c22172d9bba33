"""Cutting blocks: against a plain loop, and every anchor once per epoch."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmap_hf.training.blocks import BlockBatch, draw, epoch_batches, make_batch
from flashmap_hf.training.shards import SequenceFeatures
from flashmap_hf.training.sources import LoadedFeatures


def sequence(first: int, response: int, seed: int = 0, sampled: bool = False) -> SequenceFeatures:
    generator = torch.Generator().manual_seed(seed)
    total = first + response
    left = torch.rand(response, generator=generator, dtype=torch.float64) * 0.5 if sampled else torch.zeros(response)
    return SequenceFeatures(
        taps=torch.arange(1.0, total + 1)[:, None].repeat(1, 2).to(torch.bfloat16),
        tokens=torch.arange(100, 100 + total, dtype=torch.int32),
        argmax=torch.zeros(response, dtype=torch.int32),
        f_left=left.double(),
        f_right=(left + 0.25).double() if sampled else left.double(),
        first=first,
    )


@settings(max_examples=60)
@given(
    st.integers(1, 6), st.integers(2, 12), st.integers(0, 11), st.integers(1, 5), st.integers(1, 8), st.integers(1, 4)
)
def test_batch_equals_a_plain_loop(first: int, response: int, offset: int, run: int, window: int, block: int) -> None:
    item = sequence(first, response, sampled=True)
    start = first + min(offset, response - 1)
    batch = make_batch([item], [start], run, window, block)
    total = first + response
    for j in range(run):
        anchor = start + j
        for w in range(window):
            position = anchor - window + w
            there = 0 <= position < total
            assert bool(batch.taps_mask[0, j + w]) == (there and position < start + run - 1)
            if batch.taps_mask[0, j + w]:
                assert batch.taps[0, j + w, 0].item() == position + 1
        if anchor < total:
            assert batch.anchors[0, j].item() == 100 + anchor
        for k in range(block):
            position = anchor + 1 + k
            assert bool(batch.labels_mask[0, j, k]) == (position < total)
            if position < total:
                assert batch.labels[0, j, k].item() == 100 + position
                assert batch.f_left[0, j, k].item() == pytest.approx(item.f_left[position - first].item(), abs=1e-6)


def test_an_epoch_visits_every_anchor_once_and_resumes() -> None:
    items = [sequence(3, 4 + i, seed=i) for i in range(7)]
    options = {"epoch": 2, "seed": 5, "runs": 1, "run": 4, "window": 3, "block_size": 2}
    seen: Counter[tuple[int, int]] = Counter()
    source = LoadedFeatures(items, [1], 8)
    batches = list(epoch_batches(source, **options))
    for batch in batches:
        for anchor, mask in zip(batch.anchors[0].tolist(), batch.labels_mask[0, :, 0].tolist(), strict=True):
            if mask:
                seen[(batch.labels_mask[0].sum().item(), anchor)] += 1
    # every response position but the last, of every answer; runs shortened by the phase may see an anchor twice
    assert {a for _, a in seen} == set(range(103, 103 + 9))
    resumed = list(epoch_batches(source, **options, skip=2))
    assert all(torch.equal(a.taps, b.taps) for a, b in zip(batches[2:], resumed, strict=True))
    other = list(epoch_batches(source, **(options | {"epoch": 3})))
    assert not all(torch.equal(a.anchors, b.anchors) for a, b in zip(batches, other, strict=False))


def test_groups_visit_every_anchor_and_resume() -> None:
    """A source that holds two answers at once: blocks are shuffled within the group, none is lost between groups."""
    items = [sequence(3, 6 + i, seed=i) for i in range(7)]
    source = LoadedFeatures(items, [1], 8)
    source.group = 2
    options = {"epoch": 0, "seed": 0, "runs": 3, "run": 4, "window": 3, "block_size": 2}
    batches = list(epoch_batches(source, **options))
    whole = LoadedFeatures(items, [1], 8)
    assert len(batches) == len(list(epoch_batches(whole, **options)))
    resumed = list(epoch_batches(source, **options, skip=3))
    assert all(torch.equal(a.taps, b.taps) for a, b in zip(batches[3:], resumed, strict=True))


def test_shares_of_two_processes_are_the_batch_of_one() -> None:
    items = [sequence(3, 9 + i, seed=i, sampled=i % 2 == 0) for i in range(6)]
    source = LoadedFeatures(items, [1], 8)
    options = {"epoch": 1, "seed": 0, "run": 4, "window": 3, "block_size": 2}
    whole = next(epoch_batches(source, **options, runs=4))
    parts = [next(epoch_batches(source, **options, runs=2, process=i, processes=2)) for i in range(2)]
    drawn = {"hide_share": 0.5, "start_share": 0.5, "noise_size": 3}
    of_whole = draw(whole, torch.Generator().manual_seed(0), **drawn)
    for i, part in enumerate(parts):
        assert torch.equal(part.taps, whole.taps[i::2]) and torch.equal(part.labels, whole.labels[i::2])
        draws = draw(part, torch.Generator().manual_seed(0), **drawn, process=i, processes=2)
        assert torch.equal(draws.u.nan_to_num(-1), of_whole.u[i::2].nan_to_num(-1))
        assert torch.equal(draws.s, of_whole.s[i::2])
        assert draws.noise is not None and of_whole.noise is not None
        assert torch.equal(draws.noise, of_whole.noise[i::2])


def test_final_states_follow_the_anchor() -> None:
    item = sequence(2, 6)
    batch = make_batch([item], [4], 3, 2, 2, hidden_size=1)
    assert batch.final[0, :, 0].tolist() == [5.0, 6.0, 7.0, 8.0]  # positions 4 to 7 carry their place plus one


def draws_of(batch: BlockBatch, hide: float, seed: int = 0) -> torch.Tensor:
    return draw(batch, torch.Generator().manual_seed(seed), hide_share=hide, start_share=1.0).u


def test_noise_lies_in_the_interval_and_is_hidden_for_sampled_answers_only() -> None:
    items = [sequence(2, 40, seed=1, sampled=True), sequence(2, 40)]
    batch = make_batch(items, [2, 2], 30, 4, 3)
    u = draws_of(batch, 0.5)
    hidden = u.isnan().any(-1)
    assert 5 < int(hidden[0].sum()) < 25 and not hidden[1].any()
    assert torch.equal(u.isnan().all(-1), hidden)
    shown = u[0][~hidden[0]]
    inside = batch.labels_mask[0][~hidden[0]]
    assert bool(((shown >= batch.f_left[0][~hidden[0]]) & (shown <= batch.f_right[0][~hidden[0]]))[inside].all())
    assert not u[1].any()


def test_greedy_blocks_are_hidden_by_a_share_of_their_own() -> None:
    batch = make_batch([sequence(2, 40, seed=1, sampled=True), sequence(2, 40)], [2, 2], 30, 4, 3)
    u = draw(batch, torch.Generator().manual_seed(0), hide_share=0.0, start_share=1.0, hide_greedy=0.5).u
    hidden = u.isnan().any(-1)
    assert not hidden[0].any() and 5 < int(hidden[1].sum()) < 25 and torch.equal(u.isnan().all(-1), hidden)


def test_times_start_at_zero_for_their_share() -> None:
    batch = make_batch([sequence(2, 400)], [2], 300, 2, 2)
    s = draw(batch, torch.Generator().manual_seed(0), hide_share=0.0, start_share=0.75).s
    assert 0.65 < float((s == 0).float().mean()) < 0.85 and float(s.max()) < 0.9
