"""Features -> batches of blocks. Anchors come in runs, so that the context of a run is computed once and shared."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from flashmap_hf.training.shards import SequenceFeatures
from flashmap_hf.training.sources import FeatureSource


@dataclass(frozen=True)
class BlockBatch:
    """S runs of A consecutive anchors; B = S * A blocks.

    taps `[S, W + A - 1, N * D]`: anchor j of a run sees positions j..j+W-1.
    taps_mask `[S, W + A - 1]`: False before the sequence's start.
    following `[S, W + A - 1]`: the token after each of these positions; the last A are the anchors.
    final `[S, A + K - 1, D]`: the target's final hidden state at the first anchor and after it, zero past the end.
    anchors `[S, A]` token ids; labels `[S, A, K]` the tokens after each anchor; labels_mask `[S, A, K]`.
    f_left, f_right `[S, A, K]` float32 quantile intervals; sampled `[S, A]`: the answer was sampled.
    """

    taps: torch.Tensor
    taps_mask: torch.Tensor
    following: torch.Tensor
    final: torch.Tensor
    anchors: torch.Tensor
    labels: torch.Tensor
    labels_mask: torch.Tensor
    f_left: torch.Tensor
    f_right: torch.Tensor
    sampled: torch.Tensor

    def to(self, device: torch.device) -> "BlockBatch":
        return BlockBatch(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


@dataclass(frozen=True)
class Draws:
    """The randomness of a batch. u `[S, A, K]`, NaN: hidden; s `[S, A]` times; noise `[S, A, K, D]` or None."""

    u: torch.Tensor
    s: torch.Tensor
    noise: torch.Tensor | None

    def to(self, device: torch.device) -> "Draws":
        noise = None if self.noise is None else self.noise.to(device, non_blocking=True)
        return Draws(self.u.to(device, non_blocking=True), self.s.to(device, non_blocking=True), noise)


def make_batch(
    sequences: Sequence[SequenceFeatures],
    starts: Sequence[int],
    run: int,
    window: int,
    block_size: int,
    hidden_size: int = 0,
) -> BlockBatch:
    """Cut one run of `run` anchors out of each sequence, the first anchor at position `starts[i]`.

    hidden_size: D, the last columns of the taps, which become `final`; 0: nobody asks for it.
    """
    width = sequences[0].taps.shape[1]
    count, span = len(sequences), window + run - 1
    taps = torch.zeros(count, span, width)
    taps_mask = torch.zeros(count, span, dtype=torch.bool)
    following = torch.zeros(count, span, dtype=torch.long)
    final = torch.zeros(count, run + block_size - 1, hidden_size)
    reach = run + block_size  # anchors and the labels of the last one
    tokens = torch.zeros(count, reach, dtype=torch.long)
    exists = torch.zeros(count, reach, dtype=torch.bool)
    left, right = torch.zeros(count, reach), torch.zeros(count, reach)
    for i, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        total = len(sequence.tokens)
        low, high = max(0, start - window), min(total, start + run - 1)
        offset = low - (start - window)
        taps[i, offset : offset + high - low] = sequence.taps[low:high].float()
        taps_mask[i, offset : offset + high - low] = True
        after = sequence.tokens[low + 1 : high + 1].long()
        following[i, offset : offset + len(after)] = after
        if hidden_size:
            last = sequence.taps[start : start + run + block_size - 1, -hidden_size:]
            final[i, : len(last)] = last.float()
        end = min(total, start + reach)
        tokens[i, : end - start] = sequence.tokens[start:end].long()
        exists[i, : end - start] = True
        interval = slice(start - sequence.first, end - sequence.first)
        left[i, : end - start] = sequence.f_left[interval].float()
        right[i, : end - start] = sequence.f_right[interval].float()

    def blocks(x: torch.Tensor) -> torch.Tensor:  # [S, A + K] -> [S, A, K]: what follows each anchor
        return x[:, 1:].unfold(1, block_size, 1)

    sampled = torch.tensor([s.sampled for s in sequences])[:, None].expand(count, run)
    return BlockBatch(
        taps, taps_mask, following, final, tokens[:, :run], blocks(tokens), blocks(exists), blocks(left),
        blocks(right), sampled,
    )  # fmt: skip


def epoch_batches(
    source: FeatureSource,
    *,
    epoch: int,
    seed: int,
    runs: int,
    run: int,
    window: int,
    block_size: int,
    hidden_size: int = 0,
    skip: int = 0,
    process: int = 0,
    processes: int = 1,
) -> Iterator[BlockBatch]:
    """All runs of an epoch, shuffled, with a new random phase in every sequence; `skip` batches are passed over.

    A batch of `processes * runs` runs is dealt out: this is the share of `process`. Runs are shuffled within the groups
    of sequences that the source can hold at once.
    """
    if min(runs, run) < 1:
        raise ValueError(f"runs={runs}, run_length={run}: both must be at least 1.")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    together = runs * processes
    order = torch.randperm(len(source), generator=generator).tolist()
    left_over: list[tuple[int, int]] = []
    batch = 0
    for begin in range(0, len(order), source.group):
        places = left_over
        for index in sorted(order[begin : begin + source.group]):
            first, length = source.first_and_length(index)
            phase = int(torch.randint(run, (1,), generator=generator))
            starts = range(first - phase, length - 1, run)  # the last token has nothing after it
            places += [(index, max(start, first)) for start in starts]
        places = [places[i] for i in torch.randperm(len(places), generator=generator).tolist()]
        whole = len(places) // together * together
        left_over = places[whole:]
        for at in range(0, whole, together):
            if batch >= skip:
                chosen = places[at + process : at + together : processes]
                rows = [source[i] for i, _ in chosen]
                yield make_batch(rows, [start for _, start in chosen], run, window, block_size, hidden_size)
            batch += 1
    if batch == 0:  # the epochs would go by without a step
        raise ValueError(f"runs={runs}: the answers hold only {len(left_over)} runs of {run} anchors; ask for fewer.")


def draw(
    batch: BlockBatch,
    generator: torch.Generator,
    *,
    hide_share: float,
    start_share: float,
    hide_greedy: float = 0.0,
    noise_size: int = 0,
    process: int = 0,
    processes: int = 1,
) -> Draws:
    """The randomness of `batch`, which is the share of `process`: together the shares draw what one process would.

    u is uniform in each token's interval, 0 when greedy; hidden (NaN) for `hide_share` of the sampled blocks and
    `hide_greedy` of the greedy ones.
    s is 0 for `start_share` of the blocks, else uniform in [0, 0.9). noise_size: D of the independent prior, or 0.
    """

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape[0] * processes, *shape[1:], generator=generator)[process::processes]

    count, run, size = batch.labels.shape
    u = batch.f_left + uniform(count, run, size) * (batch.f_right - batch.f_left)
    hidden = uniform(count, run) < torch.where(batch.sampled, hide_share, hide_greedy)
    s = torch.where(uniform(count, run) < start_share, torch.zeros(()), uniform(count, run) * 0.9)
    noise = None
    if noise_size:
        noise = torch.randn(count * processes, run, size, noise_size, generator=generator)[process::processes]
    return Draws(u.masked_fill(hidden.unsqueeze(-1), torch.nan), s, noise)
