"""One timed `generate` call, with or without a drafter."""

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from flashmap_hf.generation_config import FlashMapGenerationConfig, Verification


@dataclass(frozen=True)
class Settings:
    """How to generate. temperature 0 is greedy; verification, the accept rule, concerns sampling with a drafter.

    Raises:
        ValueError: a value is out of range; names it.
    """

    max_new_tokens: int = 96
    temperature: float = 0.0
    verification: Verification = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, lowest in (("max_new_tokens", 1), ("seed", 0)):
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} must be at least {lowest}, not {getattr(self, name)}")
        if self.seed >= 2**64:
            raise ValueError(f"seed must be below 2**64, not {self.seed}")
        lowest_temperature = torch.finfo(torch.float32).eps  # far below it the scores overflow
        if self.temperature != 0.0 and not lowest_temperature <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 (greedy) or a positive number, {lowest_temperature:.2g} or more, "
                f"not {self.temperature}"
            )
        if self.temperature == 0.0 and self.verification != "auto":
            raise ValueError(f"verification={self.verification!r} is a rule for sampling: set a temperature above 0")

    def generation_config(self, **overrides: Any) -> FlashMapGenerationConfig:
        """For `generate`; what it leaves open comes from the target's own, as always."""
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        fields = {"max_new_tokens": self.max_new_tokens, "return_dict_in_generate": False, **sampling, **overrides}
        return FlashMapGenerationConfig(verification=self.verification, **fields)


@dataclass(frozen=True)
class Run:
    """One `generate` call. forwards: seconds of each target forward, the prefill first."""

    tokens: list[int]
    seconds: float
    forwards: list[float]

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Tokens per target forward, the prefill included."""
        return len(self.tokens) / len(self.forwards)

    @property
    def step_ms(self) -> float | None:
        """Mean time of a forward after the prefill."""
        return 1e3 * statistics.mean(self.forwards[1:]) if len(self.forwards) > 1 else None


@contextmanager
def metered(target: PreTrainedModel) -> Iterator[list[float]]:
    """The seconds of each forward of `target` inside the block, in order."""
    seconds: list[float] = []

    def before(*_: Any) -> None:
        synchronise(target.device)
        seconds.append(-time.perf_counter())

    def after(*_: Any) -> None:
        synchronise(target.device)
        seconds[-1] += time.perf_counter()

    handles = [target.register_forward_pre_hook(before), target.register_forward_hook(after)]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators inside the block and put them back after it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def run(
    target: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],  # [1, T] each
    config: FlashMapGenerationConfig,
    seed: int,
    **generate_kwargs: Any,
) -> Run:
    """Time one `generate` call."""
    generate: Any = target.generate  # of a mixin that `PreTrainedModel` does not declare
    with seeded(seed, target.device), metered(target) as forwards:
        synchronise(target.device)
        start = time.perf_counter()
        output = generate(**inputs, generation_config=config, **generate_kwargs)
        synchronise(target.device)
        seconds = time.perf_counter() - start
    return Run(output[0, inputs["input_ids"].shape[1] :].tolist(), seconds, forwards)
