"""One `generate` call seen from outside: what each target forward was given, what it committed, where the time went.

It knows nothing of the method: hooks on the target see the drafted tokens, a streamer sees the committed ones. So
every method is counted by the same rule.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from flashmap_hf.runs import synchronise
from flashmap_hf.statistics import Statistics


@dataclass
class Steps:
    """One entry per step, the prefill first. A step ends when tokens are committed.

    drafted_tokens: proposed to the target. kept: how many of them, from the first on, were committed. committed: tokens
    of the step, the target's own included. forwards: of the target.
    draft_ms: from the last commit to the target's forward; verify_ms: in it; commit_ms: from there to the commit.
    """

    drafted_tokens: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    draft_ms: list[float] = field(default_factory=list)
    verify_ms: list[float] = field(default_factory=list)
    commit_ms: list[float] = field(default_factory=list)


class Watch(BaseStreamer):
    """The streamer of the call; its hooks are set by `watched`.

    statistics: of a call with token trees, whose forwards do not show which path was tried; None: read the forwards.
    """

    def __init__(self, target: PreTrainedModel, prompt_length: int, statistics: Statistics | None = None):
        self.target, self.prompt_length, self.statistics = target, prompt_length, statistics
        self.layers = self._layers()
        self.steps = Steps()
        self.draft: list[int] = []
        self.counted = (0, 0)  # drafted, accepted of `statistics`
        self.forwards = 0
        self.draft_seconds = self.verify_seconds = 0.0
        self.last = self.begun = time.perf_counter()

    def _layers(self) -> int:
        base: Any = self.target.base_model
        layers: int = base.config.get_text_config().num_hidden_layers
        return layers

    def _drafting(self) -> bool:
        """Whether the target drafts for itself: early exit takes layers away meanwhile."""
        return self._layers() != self.layers

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward begins."""
        if self._drafting():
            return
        synchronise(self.target.device)
        self.begun = time.perf_counter()
        if self.forwards == 0:
            self.draft_seconds = self.begun - self.last
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None:
            # the cache lacks the newest committed token, and before the prefill all of them
            known = 1 if self.steps.committed else self.prompt_length
            self.draft = ids[0, known:].tolist()

    def after(self, *_: Any) -> None:
        """It has ended."""
        if self._drafting():
            return
        synchronise(self.target.device)
        self.verify_seconds += time.perf_counter() - self.begun
        self.forwards += 1

    def put(self, value: torch.Tensor) -> None:
        """The prompt, before any forward; then what each step commits."""
        tokens = value.flatten().tolist()
        if not self.steps.committed and self.forwards == 0:
            return
        synchronise(self.target.device)
        now = time.perf_counter()
        drafted, kept = self._counts(tokens)
        steps = self.steps
        steps.drafted_tokens.append(drafted)
        steps.kept.append(kept)
        steps.committed.append(len(tokens))
        steps.forwards.append(self.forwards)
        steps.draft_ms.append(1e3 * self.draft_seconds)
        steps.verify_ms.append(1e3 * self.verify_seconds)
        steps.commit_ms.append(1e3 * (now - self.last - self.draft_seconds - self.verify_seconds))
        self.forwards, self.draft, self.last = 0, [], now
        self.draft_seconds = self.verify_seconds = 0.0

    def _counts(self, tokens: list[int]) -> tuple[int, int]:
        """Drafted and kept in this step. A refused token is never emitted in its place, so equality tells."""
        if self.statistics is not None:
            before, self.counted = self.counted, (self.statistics.drafted, self.statistics.accepted)
            return self.counted[0] - before[0], self.counted[1] - before[1]
        pairs = list(zip(self.draft, tokens, strict=False))
        kept = next((i for i, (drafted, token) in enumerate(pairs) if drafted != token), len(pairs))
        return len(self.draft), kept

    def end(self) -> None:
        """Nothing is held back."""


@contextmanager
def watched(target: PreTrainedModel, prompt_length: int, statistics: Statistics | None = None) -> Iterator[Watch]:
    """A `Watch` whose hooks are on `target` inside the block."""
    watch = Watch(target, prompt_length, statistics)
    handles = [
        target.register_forward_pre_hook(watch.before, with_kwargs=True),
        target.register_forward_hook(watch.after),
    ]
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()
