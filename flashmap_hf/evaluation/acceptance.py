"""Measure a drafter on a file of prompts, through the real `generate`: tokens per target step, acceptance by position.

A run that was killed goes on where it stopped: `evaluate.partial.jsonl` keeps each prompt's result until
`evaluate.json` and its plots (`evaluate.png`, `evaluate.svg`) are written.
"""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from flashmap_hf import FlashMapDrafter, FlashMapGenerationConfig, Statistics, drafters, record, targets
from flashmap_hf.compare import first_difference, public_name
from flashmap_hf.compatibility import chat_template_differs, check_target
from flashmap_hf.devices import choose_dtype, default_device
from flashmap_hf.evaluation.acceptance_plot import plot
from flashmap_hf.evaluation.acceptance_summary import PromptResult, print_summary, summarise
from flashmap_hf.evaluation.partial import append, resume
from flashmap_hf.evaluation.prompt_choice import balanced
from flashmap_hf.generation_config import Verification
from flashmap_hf.options import option
from flashmap_hf.progress import ProgressLog
from flashmap_hf.prompt_files import PromptRow, read_prompts
from flashmap_hf.prompts import check_length, encode
from flashmap_hf.provenance import write_record
from flashmap_hf.runs import Run, Settings, run

Inputs = Mapping[str, torch.Tensor]  # [1, T] each
RESULT, PARTIAL = "evaluate.json", "evaluate.partial.jsonl"
WARM_UP = 8  # new tokens
NOT_MEASURED = ("out", "prompts", "drafter", "target", "dtype")  # options that the record has in another form


@dataclass(frozen=True)
class Options:
    """What to measure, on which prompts.

    Raises:
        ValueError: a value is out of range; names it.
    """

    prompts: Path = option(help="JSONL of `prompt`, or `turns` of which the first counts; optional `id`, `category`")
    drafter: str | None = option(None, "folder or Hub id (default: the one trained for the embedded target)")
    target: str = option(targets.SMOLLM2.name, "an embedded target, a folder or a Hub id")
    out: Path | None = option(None, "folder for evaluate.json (default: the drafter's)")
    max_new_tokens: int = option(128, "per prompt")
    temperatures: list[float] = option(factory=lambda: [0.0, 1.0], help="0 is greedy")
    limit: int | None = option(None, "at most so many prompts, in turn from every category, seeded")
    per_category: int | None = option(None, "at most so many prompts of each category, `a/b` being a part of `a`")
    verification: Verification = option("auto", "the accept rule when sampling (default: the drafter's own)")
    num_steps: int | None = option(None, "1 Euler step or 2, the midpoint rule (default: the drafter's own)")
    num_assistant_tokens: int | None = option(None, "tokens per block at most (default: the drafter's block size)")
    timed: bool = option(False, "also decode plainly, in turn, for the wall-clock speed-up")
    dtype: str = option("auto", "of both models; auto: the device's fastest")
    seed: int = option(0, "of the choice of prompts and of the sampling")

    def __post_init__(self) -> None:
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures={self.temperatures}: name at least one, and each once.")
        if self.verification != "auto" and not any(self.temperatures):
            raise ValueError(f"verification={self.verification!r} is a rule for sampling: add a temperature above 0.")
        for name in ("limit", "per_category", "num_assistant_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}.")
        for temperature in self.temperatures:
            self.drafted(self.settings(temperature))

    def settings(self, temperature: float, index: int = 0) -> Settings:
        """For the prompt at `index`: each has noise of its own."""
        rule: Verification = self.verification if temperature else "auto"
        seed = (self.seed + index) % 2**64 if self.seed >= 0 else self.seed
        return Settings(self.max_new_tokens, temperature, rule, seed)

    def drafted(self, settings: Settings) -> FlashMapGenerationConfig:
        """The configuration of a call with the drafter."""
        # every block whole: what is measured is the drafter, not when it pays
        return settings.generation_config(
            num_steps=self.num_steps, num_assistant_tokens=self.num_assistant_tokens, adaptive=False
        )

    def public(self) -> dict[str, Any]:
        """JSON-ready, without what is a name of this machine."""
        return {name: value for name, value in asdict(self).items() if name not in NOT_MEASURED}


def main(options: Options) -> None:
    """Check what needs no model, load, measure what is missing, write the record, draw it."""
    rows = read_prompts(options.prompts)
    device = default_device()
    dtype = choose_dtype(options.dtype, device)
    source = options.drafter or str(drafters.default_drafter(options.target))
    drafters.check(source)
    if options.out is None and not Path(source).is_dir():
        raise ValueError(f"drafter {source!r} is on the Hub: name a folder for the results with --out")
    out = options.out or Path(source)
    out.mkdir(parents=True, exist_ok=True)
    target, tokenizer = targets.load(options.target, dtype=dtype, device=device)
    drafter = drafters.load(source, dtype=dtype, device=device)
    check_target(drafter.config, target, tokenizer)
    if chat_template_differs(drafter.config, tokenizer):
        say("the drafter was trained with another chat template: expect a lower acceptance")
    inputs, too_long = encoded(target, tokenizer, rows, options)
    if not inputs:
        raise ValueError(
            f"every prompt of {options.prompts} is too long for {public_name(target)} and {options.max_new_tokens} new "
            "tokens: lower --max-new-tokens or shorten the prompts"
        )
    fitting = [row for row in rows if row.id in inputs]
    chosen = balanced(fitting, options.limit, options.per_category, options.seed)
    head = {
        "target": public_name(target),
        "drafter": public_name(drafter),
        "drafter_weights": weights_identity(source, drafter),
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "drafter_dtype": str(drafter.dtype).removeprefix("torch."),
        "device": target.device.type,
        "threads": torch.get_num_threads(),
        "prompts": {
            "file": options.prompts.name,
            "sha256": hashlib.sha256(options.prompts.read_bytes()).hexdigest(),
            "in_file": len(rows),
            "too_long": too_long,
            "measured": len(chosen),
        },
        "options": options.public(),
    }
    results = measure_all(target, drafter, {row: inputs[row.id] for row in chosen}, options, out / PARTIAL, head)
    seconds = sum(result.seconds + (result.plain_seconds or 0.0) for result in results)
    summed = head | {"seconds": seconds, "temperatures": summarise(results, options.temperatures)}
    write_record(out / RESULT, summed)
    plot(summed, out)
    (out / PARTIAL).unlink()
    console = Console()
    print_summary(summed, console)
    console.print(f"{len(chosen)} prompts; {out / RESULT}", markup=False, soft_wrap=True)


def say(message: str) -> None:
    print(f"flashmap: {message}", file=sys.stderr)


def weights_identity(source: str, drafter: PreTrainedModel) -> str:
    """Which weights were measured: the sha256 of a folder's file, the commit of a Hub repository."""
    if not Path(source).is_dir():
        return f"commit {getattr(drafter.config, '_commit_hash', None)}"
    digest = hashlib.sha256()
    for file in sorted(Path(source).glob("*.safetensors")):
        digest.update(file.read_bytes())
    return f"sha256 {digest.hexdigest()}"


# --- which prompts --------------------------------------------------------------------------------------------------


def encoded(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Iterable[PromptRow], options: Options
) -> tuple[dict[str, Inputs], int]:
    """The inputs of each prompt, by id, and how many prompts the target cannot hold."""
    inputs: dict[str, Inputs] = {}
    skipped: list[str] = []
    for row in rows:
        ids = encode(target, tokenizer, row.prompt)
        try:
            check_length(target, ids["input_ids"].shape[1], options.max_new_tokens)
        except ValueError as error:
            skipped.append(f"{row.id}: {error}")
        else:
            inputs[row.id] = ids
    if skipped:
        say(f"{len(skipped)} of {len(skipped) + len(inputs)} prompts are left out, the first one ({skipped[0]})")
    return inputs, len(skipped)


# --- measuring ------------------------------------------------------------------------------------------------------


class BlockCounter(BaseStreamer):
    """Counts the positions that the target judged: it stops at a refused token, and at the end of the text."""

    def __init__(self, stats: Statistics):
        self.stats, self.drafted = stats, 0
        self.judged: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """What one target forward committed; the prompt, which comes first, holds no block."""
        size, self.drafted = self.stats.drafted - self.drafted, self.stats.drafted
        self.judged.extend([0] * (size - len(self.judged)))
        for position in range(min(size, value.numel())):
            self.judged[position] += 1

    def end(self) -> None:
        """Nothing is held back."""


def measure_all(
    target: PreTrainedModel,
    drafter: FlashMapDrafter,
    inputs: Mapping[PromptRow, Inputs],
    options: Options,
    path: Path,
    head: dict[str, Any],
) -> list[PromptResult]:
    """The results of every prompt at every temperature: those in the partial file, then those still missing."""
    results = resume(path, head, PromptResult)
    done = {(result.id, result.temperature) for result in results}
    todo = [
        (index, row, temperature)
        for index, row in enumerate(inputs)
        for temperature in options.temperatures
        if (row.id, temperature) not in done
    ]
    if done:
        say(f"{len(done)} results are in {path} already")
    if todo:
        short = replace(options, max_new_tokens=min(WARM_UP, options.max_new_tokens))
        measure(target, drafter, todo[0][1], inputs[todo[0][1]], todo[0][2], 0, short)
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with ProgressLog(*columns) as progress:
        task = progress.add_task("", total=len(done) + len(todo), completed=len(done))
        for index, row, temperature in todo:
            result = measure(target, drafter, row, inputs[row], temperature, index, options)
            append(path, asdict(result))
            results.append(result)
            progress.advance(task)
    return results


def measure(
    target: PreTrainedModel,
    drafter: FlashMapDrafter,
    row: PromptRow,
    inputs: Inputs,
    temperature: float,
    index: int,
    options: Options,
) -> PromptResult:
    """One prompt at one temperature; when timed also plainly, and every second time plainly first."""
    settings = options.settings(temperature, index)
    plain: Run | None = None
    if options.timed and index % 2:
        plain = run(target, inputs, settings.generation_config(), settings.seed)
    with record() as stats:
        blocks = BlockCounter(stats)
        config = options.drafted(settings)
        flashmap = run(target, inputs, config, settings.seed, assistant_model=drafter, streamer=blocks)
    if options.timed and plain is None:
        plain = run(target, inputs, settings.generation_config(), settings.seed)
    verified = stats.target_steps - stats.calls
    result = PromptResult(
        id=row.id,
        category=row.category,
        temperature=temperature,
        prompt_tokens=inputs["input_ids"].shape[1],
        new_tokens=stats.committed,
        target_steps=stats.target_steps,
        blocks=stats.blocks,
        plain_calls=stats.plain_calls,
        drafted=stats.drafted_by_position,
        judged=blocks.judged,
        accepted=stats.accepted_by_position,
        seconds=flashmap.seconds,
        drafter_ms=1e3 * stats.seconds_drafter / stats.blocks if stats.blocks else None,
        verify_ms=1e3 * (stats.seconds_target - stats.seconds_prefill) / verified if verified else None,
    )
    if plain is None:
        return result
    result = replace(
        result, plain_new_tokens=len(plain.tokens), plain_seconds=plain.seconds, plain_step_ms=plain.step_ms
    )
    if temperature > 0.0:
        return result
    difference = first_difference(target, inputs["input_ids"], plain.tokens, flashmap.tokens, settings)
    return replace(result, identical=difference is None, difference=asdict(difference) if difference else None)
