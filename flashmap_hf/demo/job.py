"""One visitor's race from the first click to the last number, in a thread of its own; one at a time has the device."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Literal

import torch

from flashmap_hf.compare import Difference, first_difference
from flashmap_hf.demo.controls import Controls
from flashmap_hf.demo.race import Race
from flashmap_hf.demo.shelf import Pair, Shelf
from flashmap_hf.prompts import check_length, encode

logger = logging.getLogger(__name__)

TICK = 0.15  # seconds between two looks at a race
PATIENCE = 20.0  # seconds without anybody looking, after which a race ends itself
WARM_UP = 4  # tokens of each side, after the models were loaded

Phase = Literal["waiting", "loading", "warming", "racing", "checking", "done"]


class Line:
    """Races wait here for the device, first come, first served."""

    def __init__(self) -> None:
        self.tickets: list[object] = []

    @contextmanager
    def joined(self) -> Iterator[Callable[[], int]]:
        """A place at the end of the line; yields what says how many are ahead."""
        ticket = object()
        self.tickets.append(ticket)
        try:
            yield lambda: self.tickets.index(ticket)
        finally:
            self.tickets.remove(ticket)


class Job:
    """Starts at once. `watch` follows it; everything else may be read meanwhile, from any thread."""

    def __init__(self, controls: Controls, shelf: Shelf, line: Line):
        self.controls, self.shelf, self.line = controls, shelf, line
        self.phase: Phase = "waiting"
        self.ahead = 0
        self.pair: Pair | None = None
        self.race: Race | None = None
        self.difference: Difference | None = None
        self.stop = threading.Event()
        self.stopped = False
        self.seen = time.monotonic()
        thread = ThreadPoolExecutor(1, "flashmap-job")
        self.future: Future[None] = thread.submit(self._run)
        thread.shutdown(wait=False)  # the thread ends with the job

    def watch(self) -> Iterator[None]:
        """Yields now and then until the job has ended, and once more then; a watcher who leaves ends the job."""
        try:
            while not self.future.done():
                self.seen = time.monotonic()
                yield
                wait([self.future], TICK)
            self.phase = "done"
            yield
        finally:
            self.stop.set()

    @property
    def complaint(self) -> str | None:
        """One sentence on what went wrong, once the job has ended."""
        error = self.future.exception() if self.future.done() else None
        return None if error is None else explain(error)

    def _stop_asked(self) -> bool:
        return self.stop.is_set() or time.monotonic() - self.seen > PATIENCE

    def _run(self) -> None:
        with self.line.joined() as ahead:
            while (places := ahead()) and not self._stop_asked():
                self.ahead = places
                self.stop.wait(TICK)
            if not self._stop_asked():
                self._race()
            self.stopped = self._stop_asked()

    def _race(self) -> None:
        controls = self.controls
        self.phase = "loading"
        fresh = not self.shelf.holds(controls)
        pair = self.pair = self.shelf.get(controls)
        inputs = encode(pair.target, pair.tokenizer, controls.prompt)
        check_length(pair.target, inputs["input_ids"].shape[1], controls.max_new_tokens)

        def race(tokens: int) -> Race:
            configs = controls.plain(), controls.drafted()
            for config in configs:
                config.max_new_tokens = tokens
            return Race(pair.target, pair.drafter, inputs, configs, controls.seed, self._stop_asked)

        if fresh:
            self.phase = "warming"
            race(min(WARM_UP, controls.max_new_tokens)).run()
        self.race = race(controls.max_new_tokens)
        self.phase = "racing"
        self.race.run()
        self.phase = "checking"
        plain, flashmap = self.race.plain.tokens, self.race.flashmap.tokens
        if controls.temperature == 0.0:
            shared = min(len(plain), len(flashmap)) if self._stop_asked() else None
            self.difference = first_difference(
                pair.target, inputs["input_ids"], plain[:shared], flashmap[:shared], controls.settings
            )


def explain(error: BaseException) -> str:
    """What the visitor can do about it, in one sentence; what nobody expected goes to the log as well."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "The device ran out of memory: choose a smaller target, a shorter prompt or fewer tokens."
    if isinstance(error, ValueError | OSError):
        return text[:1].upper() + text[1:]
    logger.error("A race failed", exc_info=error)
    return f"The race failed ({type(error).__name__}: {text[:300]}); the log of the server says where."
