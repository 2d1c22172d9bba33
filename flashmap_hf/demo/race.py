"""Plain decoding against FlashMap on one prompt and one device: the two take turns, one target step at a time.

The turn goes to the side that has used less of the device so far. So at any moment both have had the same share, what
each has written shows the true ratio of their speeds, and no side is measured in a quieter minute than the other.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from flashmap_hf import FlashMapDrafter, Statistics, record
from flashmap_hf.runs import seeded, synchronise


@dataclass(frozen=True)
class Commit:
    """What one target step yielded. The first `accepted` tokens were drafted, the rest is the target's own choice.

    seconds: on the side's own clock, at the end of the step; seconds_drafter, seconds_target and blocks: the sums of
    the call so far (zero on the plain side, which is not taken apart).
    """

    tokens: tuple[int, ...]
    accepted: int
    seconds: float
    seconds_drafter: float = 0.0
    seconds_target: float = 0.0
    blocks: int = 0


class Turns:
    """Who may use the device, for how long each has had it, and the random state that each finds on its turn."""

    def __init__(self, sides: tuple[str, ...], device: torch.device):
        self.device = device
        self.changed = threading.Condition()
        self.used = dict.fromkeys(sides, 0.0)
        self.random = dict.fromkeys(sides, self._random_state())
        self.turn: str | None = sides[0]
        self.since = 0.0

    @contextmanager
    def share(self, side: str) -> Iterator[None]:
        """Take part: waits for the first turn, and gives the last one back."""
        with self.changed:
            self._wait_for(side)
        try:
            yield
        finally:
            with self.changed:
                self._close(side)
                del self.used[side]
                self._choose()

    def clock(self, side: str) -> float:
        """The seconds that `side`, whose turn it is, has used."""
        synchronise(self.device)
        return self.used[side] + time.perf_counter() - self.since

    def hand_over(self, side: str) -> None:
        """End a turn; comes back when the next turn of `side` begins."""
        with self.changed:
            self._close(side)
            self._choose()
            self._wait_for(side)

    def _close(self, side: str) -> None:
        self.used[side] = self.clock(side)
        self.random[side] = self._random_state()

    def _choose(self) -> None:
        self.turn = min(self.used, key=self.used.__getitem__) if self.used else None
        self.changed.notify_all()

    def _wait_for(self, side: str) -> None:
        self.changed.wait_for(lambda: self.turn == side)
        cpu, gpu = self.random[side]
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, self.device)
        self.since = time.perf_counter()

    def _random_state(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        on_gpu = self.device.type == "cuda"
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device) if on_gpu else None


class Side(BaseStreamer):
    """One side's run as it happens: `generate` streams into it, and hands the device over at every put."""

    def __init__(self, name: str, turns: Turns):
        self.name, self.turns = name, turns
        self.commits: list[Commit] = []
        self.stats = Statistics()
        self.finished = False
        self.prompted = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt, which comes first and is no step; then what each target step committed."""
        if not self.prompted:
            self.prompted = True
            return
        tokens = tuple(value.flatten().tolist())
        accepted = min(self.stats.accepted - sum(commit.accepted for commit in self.commits), len(tokens))
        stats = self.stats
        spent = (stats.seconds_drafter, stats.seconds_target - stats.seconds_prefill, stats.blocks)
        self.commits.append(Commit(tokens, accepted, self.turns.clock(self.name), *spent))
        self.turns.hand_over(self.name)

    def end(self) -> None:
        self.finished = True

    @property
    def tokens(self) -> list[int]:
        return [token for commit in list(self.commits) for token in commit.tokens]

    @property
    def seconds(self) -> float:
        """Of the device, prefill included; 0.0 before the first token."""
        return self.commits[-1].seconds if self.commits else 0.0


class StopWhen(StoppingCriteria):
    """Ends a `generate` call at the next step after `asked` has become true."""

    def __init__(self, asked: Callable[[], bool]):
        self.asked = asked

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.asked(), device=input_ids.device, dtype=torch.bool)


class Race:
    """One race; `plain` and `flashmap` may be read from other threads while it runs."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: FlashMapDrafter,
        inputs: Mapping[str, torch.Tensor],  # [1, T] each
        configs: tuple[GenerationConfig, GenerationConfig],  # plain, with the drafter
        seed: int,
        stop_asked: Callable[[], bool],
    ):
        self.target, self.drafter, self.inputs, self.configs = target, drafter, inputs, configs
        self.seed, self.stop_asked = seed, stop_asked
        self.failed = threading.Event()
        with seeded(seed, target.device):  # both sides start from this state
            turns = Turns(("plain", "flashmap"), target.device)
        self.plain, self.flashmap = Side("plain", turns), Side("flashmap", turns)

    def run(self) -> None:
        """Run to the end, or to the next step of each side after a stop; raises what either side raised."""
        with seeded(self.seed, self.target.device), ThreadPoolExecutor(2, "flashmap-race") as threads:
            sides = [
                threads.submit(self._decode, self.plain, self.configs[0], None),
                threads.submit(self._decode, self.flashmap, self.configs[1], self.drafter),
            ]
            done, _ = wait(sides, return_when=FIRST_EXCEPTION)
            if any(side.exception() for side in done):
                self.failed.set()  # ends the other side
        for side in sides:
            side.result()

    def _decode(self, side: Side, config: GenerationConfig, drafter: FlashMapDrafter | None) -> None:
        generate: Any = self.target.generate  # of a mixin that `PreTrainedModel` does not declare
        stop = StopWhen(lambda: self.failed.is_set() or self.stop_asked())
        with side.turns.share(side.name), record() as side.stats:
            generate(
                **self.inputs,
                generation_config=config,
                assistant_model=drafter,
                streamer=side,
                stopping_criteria=[stop],
            )
