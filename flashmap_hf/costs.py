"""What a target forward over n tokens and a drafter pass cost on this machine: a table, measured once per model."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from flashmap_hf.few_rows import FewRows


@dataclass(frozen=True)
class StepCost:
    """What one step costs. verify: seconds of one target forward over n tokens, n = 1 included; draft: of one drafter
    pass, 0 where there is none.

    Raises:
        ValueError: no entry for one token, or a time that is no time.
    """

    verify: dict[int, float]
    draft: float = 0.0

    def __post_init__(self) -> None:
        if 1 not in self.verify or min(self.verify) < 1:
            raise ValueError(f"verify must hold the cost of 1 token and of more, got {sorted(self.verify)}")
        if not all(math.isfinite(s) and s > 0 for s in self.verify.values()):
            raise ValueError(f"verify must hold seconds above 0, got {self.verify}")
        if not (math.isfinite(self.draft) and self.draft >= 0):
            raise ValueError(f"draft must be seconds, 0 or more, got {self.draft}")

    @cached_property
    def _fit(self) -> tuple[list[int], list[float], float]:
        """Token counts, their isotonic costs, and the slope behind the last one."""
        counts = sorted(self.verify)
        blocks: list[tuple[float, int]] = []  # (mean, how many), rising: pool adjacent violators
        for n in counts:
            mean, size = self.verify[n], 1
            while blocks and blocks[-1][0] >= mean:
                before, many = blocks.pop()
                mean, size = (mean * size + before * many) / (size + many), size + many
            blocks.append((mean, size))
        costs = [mean for mean, size in blocks for _ in range(size)]
        slope = 0.0
        if len(counts) > 1:  # the last stretch may be flat by chance
            last = (costs[-1] - costs[-2]) / (counts[-1] - counts[-2])
            slope = max(last, (costs[-1] - costs[0]) / (counts[-1] - counts[0]))
        return counts, costs, slope

    def forward(self, tokens: int) -> float:
        """Seconds of a target forward over `tokens` tokens, all rows together."""
        counts, costs, slope = self._fit
        i = bisect_left(counts, tokens)
        if i == len(counts):
            return costs[-1] + slope * (tokens - counts[-1])
        if counts[i] == tokens:
            return costs[i]
        share = (tokens - counts[i - 1]) / (counts[i] - counts[i - 1])
        return costs[i - 1] + share * (costs[i] - costs[i - 1])

    @cached_property
    def _prices(self) -> dict[tuple[int, int], float]:
        return {}

    @cached_property
    def draft_price(self) -> float:
        """A drafter pass in plain steps. Over several rows it is taken to grow as the target's forward does."""
        return self.draft / self.forward(1)

    def price(self, rows: int, count: int) -> float:
        """Plain steps that verifying `count` drafted tokens in each of `rows` rows costs beyond one plain step."""
        key = rows, count
        if key not in self._prices:
            self._prices[key] = self.forward(rows * (count + 1)) / self.forward(rows) - 1
        return self._prices[key]


@torch.no_grad()  # as in `generate`; what a model keeps for itself must not become an inference tensor
def measure_cost(
    target: Any,  # PreTrainedModel
    drafter_pass: Callable[[], object] | None = None,
    sizes: Sequence[int] = (1, 2, 3, 5, 9, 17),
    rounds: int = 3,
    context: int = 64,
) -> StepCost:
    """The shortest of `rounds` interleaved rounds after one that warms up: other programs only ever add; seconds.

    The forwards run over made-up tokens, behind a cache of `context` of them that is rolled back each time. A target
    with few positions is measured with what fits. Hooks on the models see these forwards.

    Raises:
        ValueError: the target's cache cannot be rolled back.
    """
    text_config = target.config.get_text_config()
    room = getattr(text_config, "max_position_embeddings", None) or math.inf
    context = int(min(context, max(room // 2, 1)))
    sizes = [n for n in sizes if context + n <= room]

    offloaded = target.device.type == "meta"  # its modules fetch their input themselves
    device = torch.device("cpu") if offloaded else target.device

    def ids(start: int, count: int) -> torch.Tensor:  # [1, count]: spread over the vocabulary, the same each time
        return (torch.arange(start, start + count, device=device) * 7919 % text_config.vocab_size)[None]

    def seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if target.device.type != "cpu" and torch.accelerator.is_available():
            torch.accelerator.synchronize(None if offloaded else target.device)
        return time.perf_counter() - start

    cache = target(ids(0, context), use_cache=True).cache
    if not cache.is_croppable:
        raise ValueError(f"The cache of {type(target).__name__} cannot be rolled back: it has no cost of n tokens.")
    cache.activate_past_recording()
    products = FewRows(target)

    def forward(n: int) -> None:
        with products.applied():
            target(ids(context, n), cache=cache, use_cache=True)

    forwards: dict[int, list[float]] = {n: [] for n in sizes}
    drafts: list[float] = []
    for round_index in range(rounds + 1):
        for n in sizes:
            taken = seconds(partial(forward, n))
            cache.crop(-n)
            forwards[n] += [taken] if round_index else []
        if drafter_pass is not None:
            taken = seconds(drafter_pass)
            drafts += [taken] if round_index else []
    return StepCost({n: min(values) for n, values in forwards.items()}, min(drafts, default=0.0))


# No state of a call: only measurements, so that repeated calls decide by the same table. They go with their models.
_KNOWN: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, dict[Any, StepCost]]] = WeakKeyDictionary()


def cost_of(target: Any, drafter: nn.Module, drafter_pass: Callable[[], object], **options: Any) -> StepCost:
    """`measure_cost(target, drafter_pass, **options)`, measured at the first call for this pair and remembered.

    Measured again when a model is moved, cast, or given another attention, and when torch uses more or fewer threads.
    """
    models: tuple[Any, Any] = (target, drafter)
    key = (
        *((model.device, model.dtype, model.config._attn_implementation) for model in models),
        torch.get_num_threads(),
        *sorted(options.items()),
    )
    known = _KNOWN.setdefault(target, WeakKeyDictionary()).setdefault(drafter, {})
    if key not in known:
        devices = [model.device for model in models if model.device.type == "cuda"]
        # dropout draws: the first call with a seed must give what later ones do
        with torch.random.fork_rng(devices, enabled=target.training or drafter.training):
            known[key] = measure_cost(target, drafter_pass, **options)
    return known[key]
