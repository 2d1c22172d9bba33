"""Timed runs of every method on the same prompts, in turn, in one process; each is kept as soon as it is made."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flashmap_hf import record
from flashmap_hf.evaluation.bench_prompts import Item
from flashmap_hf.evaluation.methods import PLAIN, Inputs, Method, plain
from flashmap_hf.evaluation.partial import append, resume
from flashmap_hf.evaluation.watch import watched
from flashmap_hf.progress import ProgressLog
from flashmap_hf.prompts import check_length, encode
from flashmap_hf.runs import Settings, seeded, synchronise

WARM_UP = 8  # new tokens
# Sampling is from the target's own law at the temperature, so that it can be checked against that law.
NO_FILTERS = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Measurement:
    """One `generate` call. turn, round: from 0. session: which start of the command made it.

    The lists after `seconds` have one entry per step, the prefill first: see `watch.Steps`.
    """

    id: str
    category: str
    turn: int
    method: str
    dtype: str
    temperature: float
    round: int
    session: int
    prompt_tokens: int
    tokens: list[int]
    seconds: float  # of the whole call
    drafted_tokens: list[int]
    kept: list[int]
    committed: list[int]
    forwards: list[int]
    draft_ms: list[float]
    verify_ms: list[float]
    commit_ms: list[float]

    @property
    def place(self) -> tuple[str, int]:
        """The turn of a prompt."""
        return self.id, self.turn

    @property
    def key(self) -> tuple[str, int, str, str, float, int]:
        """What makes it another measurement."""
        return self.id, self.turn, self.method, self.dtype, self.temperature, self.round

    @property
    def tokens_per_second(self) -> float:
        """Of the whole call, prefill included."""
        return len(self.tokens) / self.seconds

    @cached_property
    def step_ms(self) -> list[float]:
        """Each step's whole time."""
        return [sum(parts) for parts in zip(self.draft_ms, self.verify_ms, self.commit_ms, strict=True)]

    @property
    def drafted(self) -> list[int]:
        """Blocks that had each position."""
        return above(self.drafted_tokens, max(self.drafted_tokens, default=0))

    @property
    def judged(self) -> list[int]:
        """Of them, those in which the target judged it: no earlier refusal, no end of the text before it."""
        sizes = [min(d, c) for d, c in zip(self.drafted_tokens, self.committed, strict=True)]
        return above(sizes, max(self.drafted_tokens, default=0))

    @property
    def accepted(self) -> list[int]:
        """Of them, those that kept it."""
        return above(self.kept, max(self.drafted_tokens, default=0))


def above(sizes: Sequence[int], length: int) -> list[int]:
    """Entry k: how many of `sizes` are above k."""
    return [sum(size > k for size in sizes) for k in range(length)]


def measure(
    target: PreTrainedModel, method: Method, item: Item, inputs: Inputs, settings: Settings, round: int, session: int
) -> Measurement:
    """Time one call. A round has its own seed on every prompt, the same for every method.

    Raises:
        ValueError: the method does not stream what it returns, so that its steps cannot be counted.
    """
    config = settings.generation_config(**((NO_FILTERS if settings.temperature else {}) | method.options))
    length = inputs["input_ids"].shape[1]
    with (
        seeded((settings.seed + 1000 * item.index + round) % 2**64, target.device),
        record() as statistics,
        watched(target, length, statistics if method.tree else None) as watch,
    ):
        synchronise(target.device)
        start = watch.last = time.perf_counter()
        output = method.generate(inputs, config, watch)
        synchronise(target.device)
        seconds = time.perf_counter() - start
    tokens = output[0, length:].tolist()
    if sum(watch.steps.committed) != len(tokens):
        raise ValueError(
            f"method {method.name} streamed {sum(watch.steps.committed)} tokens and returned {len(tokens)}: it must "
            "hand the streamer to generate, or its steps cannot be counted."
        )
    return Measurement(
        id=item.id,
        category=item.category,
        turn=item.turn,
        method=method.name,
        dtype=dtype_name(target),
        temperature=settings.temperature,
        round=round,
        session=session,
        prompt_tokens=length,
        tokens=tokens,
        seconds=seconds,
        **asdict(watch.steps),
    )


def dtype_name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Job:
    """What to measure: the methods at each of the settings (one per temperature), in so many rounds of each."""

    methods: Sequence[Method]
    settings: Sequence[Settings]
    rounds: Sequence[int]

    def calls(self, item: Item) -> Iterator[tuple[Settings, int, Method]]:
        """Round after round; in each another method goes first, so that none always follows the same one."""
        for place, (settings, rounds) in enumerate(zip(self.settings, self.rounds, strict=True)):
            for round in range(rounds):
                here = [method for method in self.methods if not method.once or place == round == 0]
                shift = (item.index + round) % len(here)
                yield from ((settings, round, method) for method in here[shift:] + here[:shift])


class Bench:
    """All measurements of a benchmark: those that an interrupted run left in `path`, then the missing ones.

    Raises:
        ValueError: a whole line of the file is damaged; names it.
    """

    def __init__(self, path: Path, head: dict[str, Any], tokenizer: PreTrainedTokenizerBase):
        self.path, self.tokenizer = path, tokenizer
        self.results: list[Measurement] = resume(path, head, Measurement)
        self.keys = {result.key for result in self.results}
        self.session = 1 + max((result.session for result in self.results), default=0)
        self.too_long: set[tuple[str, int]] = set()
        if self.results:
            print(f"flashmap: {len(self.results)} measurements are in {path} already", file=sys.stderr)

    def inputs(self, target: PreTrainedModel, item: Item, new: int) -> Inputs | None:
        """The conversation up to the item's turn, answered by plain greedy decoding; None where it is too long."""
        texts = [item.row.prompt]
        for turn in range(item.turn):
            before = replace(item, turn=turn)
            if (answer := self.answer(target, before, new)) is None:
                return None
            texts += [answer, item.row.later_turns[turn]]
        ids = encode(target, self.tokenizer, texts)
        try:
            check_length(target, ids["input_ids"].shape[1], new)
        except ValueError:
            self.too_long.add((item.id, item.turn))
            return None
        return ids

    def answer(self, target: PreTrainedModel, item: Item, new: int) -> str | None:
        """What plain greedy decoding says at `item`: from the measurements, else generated now."""
        greedy = (r for r in self.results if r.method == PLAIN and r.temperature == 0.0)
        tokens = next((r.tokens for r in greedy if r.place == (item.id, item.turn)), None)
        if tokens is None:
            inputs = self.inputs(target, item, new)
            if inputs is None:
                return None
            tokens = measure(target, plain(target), item, inputs, Settings(new), 0, 0).tokens
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def measure(self, target: PreTrainedModel, items: Sequence[Item], job: Job) -> None:
        """Measure what is missing, after a warm-up of every method that has something missing."""
        dtype, new = dtype_name(target), job.settings[0].max_new_tokens

        def missing(item: Item) -> list[tuple[Settings, int, Method]]:
            return [
                (settings, round, method)
                for settings, round, method in job.calls(item)
                if (item.id, item.turn, method.name, dtype, settings.temperature, round) not in self.keys
            ]

        todo = [(item, calls) for item in items if (calls := missing(item))]
        columns = (TextColumn(f"measuring in {dtype}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with ProgressLog(*columns) as progress:
            task = progress.add_task("", total=sum(len(calls) for _, calls in todo))
            warm: set[str] = set()
            for item, calls in todo:
                inputs = self.inputs(target, item, new)
                for settings, round, method in calls:
                    if inputs is not None:
                        if method.name not in warm:
                            short = replace(settings, max_new_tokens=min(WARM_UP, new))
                            measure(target, method, item, inputs, short, round, self.session)
                            warm.add(method.name)
                        self.keep(measure(target, method, item, inputs, settings, round, self.session))
                    progress.advance(task)

    def keep(self, result: Measurement) -> None:
        append(self.path, asdict(result))
        self.results.append(result)
        self.keys.add(result.key)
