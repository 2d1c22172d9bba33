"""What happened in `generate` calls: `with flashmap_hf.record() as stats:`. Nothing is stored on the models."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch


@dataclass
class Statistics:
    """Counts over the `generate` calls of one `record()` block.

    committed: tokens emitted. target_steps: target forwards, the prefill included, so that plain decoding has exactly
    one token per step; a forward over a batch counts once for each of its rows. blocks: drafter passes, per row.
    nodes: tokens verified beside the anchors. drafted / accepted: tokens proposed along the deepest branch / kept.
    drafted_by_position[k] and accepted_by_position[k]: how often a block reached position k + 1 / stood up to it.
    seconds_drafter, seconds_target: wall-clock inside the two forwards (synchronised on accelerators).
    plain_calls: calls that went on without the drafter, after a warning.
    """

    calls: int = 0
    plain_calls: int = 0
    committed: int = 0
    target_steps: int = 0
    blocks: int = 0
    nodes: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    seconds_drafter: float = 0.0
    seconds_target: float = 0.0
    seconds_prefill: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Committed tokens per target forward; 0.0 before any."""
        return self.committed / self.target_steps if self.target_steps else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of blocks whose first k + 1 tokens were all accepted, among the blocks that reached position k + 1."""
        return [a / d for a, d in zip(self.accepted_by_position, self.drafted_by_position, strict=True)]

    def add_block(self, drafted: int, accepted: int) -> None:
        """Count one verified block of `drafted` tokens."""
        self.drafted += drafted
        self.accepted += accepted
        for counts, reached in ((self.drafted_by_position, drafted), (self.accepted_by_position, accepted)):
            missing = max(drafted - len(counts), 0)
            counts.extend([0] * missing)
            for position in range(reached):
                counts[position] += 1


_active: ContextVar[tuple[Statistics, ...]] = ContextVar("flashmap_statistics", default=())


@contextmanager
def record() -> Iterator[Statistics]:
    """Record the `generate` calls made inside the block, in this thread (or async task); blocks may nest."""
    statistics = Statistics()
    token = _active.set((*_active.get(), statistics))
    try:
        yield statistics
    finally:
        _active.reset(token)


class Recorder:
    """Writes one call into all active statistics; does nothing, and never synchronises, when there are none."""

    def __init__(self, device: torch.device):
        self.statistics = _active.get()
        self.device = device

    def add(self, **counts: int) -> None:
        """Add to the named counters."""
        for statistics in self.statistics:
            for name, count in counts.items():
                setattr(statistics, name, getattr(statistics, name) + count)

    def add_block(self, drafted: int, accepted: int) -> None:
        """Count one verified block."""
        for statistics in self.statistics:
            statistics.add_block(drafted, accepted)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the wall-clock of the block to the counter `name`."""
        if not self.statistics:
            yield
            return
        self._synchronise()
        start = time.perf_counter()
        yield
        self._synchronise()
        seconds = time.perf_counter() - start
        for statistics in self.statistics:
            setattr(statistics, name, getattr(statistics, name) + seconds)

    def _synchronise(self) -> None:
        if self.device.type != "cpu" and torch.accelerator.is_available():  # an offloaded model is on "meta"
            torch.accelerator.synchronize(None if self.device.type == "meta" else self.device)
