"""Features -> batches of blocks. Anchors come in runs, so that the context of a run is computed once and shared."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flashmap_hf.training.features import SequenceFeatures


@dataclass(frozen=True)
class BlockBatch:
    """S runs of A consecutive anchors; B = S * A blocks.

    taps `[S, W + A - 1, N * D]`: anchor j of a run sees positions j..j+W-1.
    taps_mask `[S, W + A - 1]`: False before the sequence's start.
    anchors `[S, A]` token ids; labels `[S, A, K]` the tokens after each anchor; labels_mask `[S, A, K]`.
    f_left, f_right `[S, A, K]` float32 quantile intervals; sampled `[S, A]`: the answer was sampled.
    """

    taps: torch.Tensor
    taps_mask: torch.Tensor
    anchors: torch.Tensor
    labels: torch.Tensor
    labels_mask: torch.Tensor
    f_left: torch.Tensor
    f_right: torch.Tensor
    sampled: torch.Tensor


def make_batch(
    sequences: Sequence[SequenceFeatures], starts: Sequence[int], run: int, window: int, block_size: int
) -> BlockBatch:
    """Cut one run of `run` anchors out of each sequence, the first anchor at position `starts[i]`."""
    width = sequences[0].taps.shape[1]
    count, span = len(sequences), window + run - 1
    taps = torch.zeros(count, span, width)
    taps_mask = torch.zeros(count, span, dtype=torch.bool)
    following = run + block_size  # anchors and the labels of the last one
    tokens = torch.zeros(count, following, dtype=torch.long)
    exists = torch.zeros(count, following, dtype=torch.bool)
    left, right = torch.zeros(count, following), torch.zeros(count, following)
    for i, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        total = len(sequence.tokens)
        low, high = max(0, start - window), min(total, start + run - 1)
        offset = low - (start - window)
        taps[i, offset : offset + high - low] = sequence.taps[low:high].float()
        taps_mask[i, offset : offset + high - low] = True
        end = min(total, start + following)
        tokens[i, : end - start] = sequence.tokens[start:end].long()
        exists[i, : end - start] = True
        interval = slice(start - sequence.first, end - sequence.first)
        left[i, : end - start] = sequence.f_left[interval].float()
        right[i, : end - start] = sequence.f_right[interval].float()

    def blocks(x: torch.Tensor) -> torch.Tensor:  # [S, A + K] -> [S, A, K]: what follows each anchor
        return x[:, 1:].unfold(1, block_size, 1)

    sampled = torch.tensor([bool((s.f_right > 0).any()) for s in sequences])[:, None].expand(count, run)
    return BlockBatch(
        taps, taps_mask, tokens[:, :run], blocks(tokens), blocks(exists), blocks(left), blocks(right), sampled
    )


def epoch_batches(
    sequences: Sequence[SequenceFeatures],
    *,
    epoch: int,
    seed: int,
    runs: int,
    run: int,
    window: int,
    block_size: int,
    skip: int = 0,
) -> Iterator[BlockBatch]:
    """All runs of an epoch, shuffled, with a new random phase in every sequence; `skip` batches are passed over."""
    if min(runs, run) < 1:
        raise ValueError(f"runs={runs}, run_length={run}: both must be at least 1.")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    places: list[tuple[int, int]] = []
    for index, sequence in enumerate(sequences):
        phase = int(torch.randint(run, (1,), generator=generator))
        last = len(sequence.tokens) - 1  # the last token has nothing after it
        starts = range(sequence.first - phase, last, run)
        places += [(index, max(start, sequence.first)) for start in starts]
    if len(places) < runs:  # not one batch: the epochs would go by without a step
        raise ValueError(f"runs={runs}: the answers hold only {len(places)} runs of {run} anchors; ask for fewer.")
    order = torch.randperm(len(places), generator=generator).tolist()
    for begin in range(skip * runs, len(order) - runs + 1, runs):
        chosen = [places[i] for i in order[begin : begin + runs]]
        yield make_batch([sequences[i] for i, _ in chosen], [s for _, s in chosen], run, window, block_size)


def draw_u(batch: BlockBatch, hide: float, generator: torch.Generator) -> torch.Tensor:
    """`[S, A, K]`: uniform in each token's interval (0 when greedy); NaN for a share `hide` of the sampled blocks."""
    uniform = torch.rand(batch.f_left.shape, generator=generator)
    u = batch.f_left + uniform * (batch.f_right - batch.f_left)
    hidden = (torch.rand(batch.sampled.shape, generator=generator) < hide) & batch.sampled
    return u.masked_fill(hidden.unsqueeze(-1), torch.nan)
