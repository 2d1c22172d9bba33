"""Compare FlashMap with what one would take instead: the same prompts, in turn, in one process.

Plain decoding, prompt lookup, stock assisted generation and the trained baselines are measured beside it. A run that
was killed goes on where it stopped: `benchmark.partial.jsonl` keeps each call's measurement until `benchmark.json` and
its plots are written.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flashmap_hf import check_target, drafters, targets
from flashmap_hf.compare import public_name
from flashmap_hf.compatibility import chat_template_differs
from flashmap_hf.devices import choose_dtype, default_device
from flashmap_hf.evaluation import methods as table
from flashmap_hf.evaluation.bench_plots import plot
from flashmap_hf.evaluation.bench_prompts import PromptSet, items_of
from flashmap_hf.evaluation.bench_record import SCHEMA, Measured, build
from flashmap_hf.evaluation.bench_verdict import print_benchmark
from flashmap_hf.evaluation.methods import Method
from flashmap_hf.evaluation.paired import Bench, Job, dtype_name
from flashmap_hf.evaluation.prompt_choice import balanced
from flashmap_hf.options import option
from flashmap_hf.prompt_files import PromptRow
from flashmap_hf.prompts import check_length, encode
from flashmap_hf.provenance import write_record
from flashmap_hf.runs import Settings

RESULT, PARTIAL = "benchmark.json", "benchmark.partial.jsonl"
FULL = {"max_new_tokens": 128, "turns": 2, "rounds": 3, "limit": None}
QUICK = {"max_new_tokens": 40, "turns": 1, "rounds": 1, "limit": 3}
# options that the record has in another form, or that are names of this machine
NOT_MEASURED = ("out", "prompts", "drafter", "target", "dtype", "baselines", "assistant", "variants")


@dataclass(frozen=True)
class Options:
    """What to measure, on which prompts.

    Raises:
        ValueError: a value is out of range; names it.
    """

    prompts: Path | None = option(None, "JSONL as of Spec-Bench or HumanEval (default: 32 prompts of our own)")
    drafter: str | None = option(None, "folder or Hub id (default: the one trained for the embedded target)")
    target: str = option(targets.SMOLLM2.name, "an embedded target, a folder or a Hub id")
    out: Path | None = option(None, "folder for benchmark.json and the plots (default: the drafter's)")
    quick: bool = option(False, "a few prompts, first turns, 40 tokens, one round: minutes")
    baselines: Path | None = option(None, "folder of the trained baselines, as `flashmap baselines` writes it")
    assistant: str | None = option(None, "a small language model for stock assisted generation, folder or Hub id")
    early_exit: int | None = option(None, "also draft with so many of the target's own layers, if it is trained to")
    variants: list[str] = option(factory=list, help="further FlashMap drafters, as other depths, heads, block sizes")
    prompt_lookup_tokens: int = option(10, "drafted by stock prompt lookup")
    temperatures: list[float] = option(factory=lambda: [0.0, 1.0], help="0 is greedy")
    max_new_tokens: int | None = option(None, "per prompt (default: 128; quick: 40)")
    turns: int | None = option(None, "of a conversation, at most (default: 2; quick: 1)")
    rounds: int | None = option(None, "of every method on every prompt (default: 3; quick: 1)")
    limit: int | None = option(None, "at most so many prompts, in turn from every category (default: all; quick: 3)")
    per_category: int | None = option(None, "at most so many prompts of each category")
    no_k_curve: bool = option(False, "leave out one step at every block size")
    drift: bool = option(False, "also compare greedy bfloat16 with float32, untimed: slow where it is emulated")
    dtype: str = option("auto", "of all models; auto: the device's fastest")
    seed: int = option(0, "of the choice of prompts and of the sampling")

    def __post_init__(self) -> None:
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures={self.temperatures}: name at least one, and each once.")
        for name in (*FULL, "per_category", "prompt_lookup_tokens", "early_exit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}.")
        names = [Path(source).name for source in self.variants]
        if len(set(names)) < len(names):
            raise ValueError(f"variants={self.variants}: two folders have the same name; rename one.")
        if self.baselines is not None and not self.baselines.is_dir():
            raise ValueError(f"baselines={self.baselines} is no folder: train them with `flashmap baselines`.")
        self.settings()

    def value(self, name: str) -> Any:
        """Of an option that --quick presets."""
        given = getattr(self, name)
        return given if given is not None else (QUICK if self.quick else FULL)[name]

    def settings(self) -> list[Settings]:
        """One per temperature."""
        return [Settings(self.value("max_new_tokens"), t, "auto", self.seed) for t in self.temperatures]

    def public(self) -> dict[str, Any]:
        """JSON-ready, without what is a name of this machine."""
        public = {name: value for name, value in asdict(self).items() if name not in NOT_MEASURED}
        return public | {name: self.value(name) for name in FULL}


def main(options: Options) -> None:
    """Check what needs no model, load, measure what is missing, write the record, draw it, show it."""
    prompts = PromptSet.read(options.prompts)
    device = default_device()
    dtype = choose_dtype(options.dtype, device)
    source = options.drafter or str(drafters.default_drafter(options.target))
    for name in (source, *options.variants):
        drafters.check(name)
    if options.out is None and not Path(source).is_dir():
        raise ValueError(f"drafter {source!r} is on the Hub: name a folder for the results with --out")
    out = options.out or Path(source)
    out.mkdir(parents=True, exist_ok=True)
    target, tokenizer = targets.load(options.target, dtype=dtype, device=device)
    methods = methods_of(options, target, tokenizer, source)
    skipped = left_out(options)
    for line in skipped:
        say(f"left out: {line}")
    rows = fitting(target, tokenizer, prompts.rows, options)
    chosen = balanced(rows, options.value("limit"), options.per_category, options.seed)
    items = items_of(chosen, options.value("turns"))
    head = {
        "schema": SCHEMA,
        "target": public_name(target),
        "drafter": Path(source).name if Path(source).exists() else source,
        "drafter_weights": next(m for m in methods if m.name == table.FLASHMAP).details["drafter"]["weights"],
        "dtype": dtype_name(target),
        "device": target.device.type,
        "threads": torch.get_num_threads(),
        "prompts": prompts.to_dict() | {"fit": len(rows), "chosen": len(chosen)},
        "options": options.public(),
        "methods": [method.to_dict() for method in methods],
        "skipped": skipped,
    }
    bench = Bench(out / PARTIAL, head, tokenizer)
    settings = options.settings()
    bench.measure(target, items, Job(methods, settings, [options.value("rounds")] * len(settings)))
    measured = Measured(bench, target, items, methods, settings, options.seed)
    low = low_precision(options, measured, source) if options.drift else None
    record = head | build(measured, low)
    write_record(out / RESULT, record)
    plot(record, out)
    (out / PARTIAL).unlink()
    print_benchmark(record)
    print(f"prompts: {len(chosen)}, turns: {len(items)}; {out / RESULT}")


def say(message: str) -> None:
    print(f"flashmap: {message}", file=sys.stderr)


def methods_of(
    options: Options, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str
) -> list[Method]:
    """All that is compared, plain decoding first; raises as loading does."""
    drafter = drafters.load(source, dtype=target.dtype, device=target.device)
    check_target(drafter.config, target, tokenizer)
    if chat_template_differs(drafter.config, tokenizer):
        say("the drafter was trained with another chat template: expect a lower acceptance")
    methods = [table.plain(target), table.prompt_lookup(target, options.prompt_lookup_tokens)]
    if options.assistant is not None:
        methods.append(table.assistant(target, tokenizer, options.assistant))
    if options.early_exit is not None:
        methods.append(table.early_exit(target, options.early_exit))
    if options.baselines is not None:
        methods += table.trained_baselines(target, options.baselines)
    methods += table.flashmap(drafter, target, source, curve=not options.no_k_curve)
    return methods + [table.variant(target, tokenizer, name) for name in options.variants]


def left_out(options: Options) -> list[str]:
    """What is not compared, and why."""
    lines = []
    if options.baselines is None:
        lines.append("the three trained baselines (no --baselines)")
    if options.assistant is None:
        lines.append("stock assisted generation with a small language model (no --assistant)")
    return lines


def fitting(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[PromptRow], options: Options
) -> list[PromptRow]:
    """The rows whose first turn the target can hold.

    Raises:
        ValueError: none is.
    """
    fit, problem = [], ""
    for row in rows:
        try:
            length = encode(target, tokenizer, row.prompt)["input_ids"].shape[1]
            check_length(target, length, options.value("max_new_tokens"))
        except ValueError as error:
            problem = problem or f"{row.id}: {error}"
        else:
            fit.append(row)
    if not fit:
        raise ValueError(f"no prompt fits into {public_name(target)} ({problem})")
    if problem:
        say(f"{len(rows) - len(fit)} of {len(rows)} prompts are left out, the first one ({problem})")
    return fit


def low_precision(options: Options, measured: Measured, source: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The target in bfloat16 and in float32; whichever of the two was not the benchmark's is measured now, greedily."""
    models = {dtype_name(measured.target): measured.target}
    greedy = [Settings(options.value("max_new_tokens"), 0.0, "auto", options.seed)]
    for name in ("float32", "bfloat16"):
        if name not in models:
            dtype = choose_dtype(name, measured.target.device)
            models[name], _ = targets.load(options.target, dtype=dtype, device=measured.target.device)
        methods = measured.methods
        if models[name] is not measured.target:
            methods = methods_of(options, models[name], measured.bench.tokenizer, source)
        wanted = [m for m in methods if not m.once and (name == "bfloat16" or m.name == table.PLAIN)]
        measured.bench.measure(models[name], measured.items, Job(wanted, greedy, [1]))
    return models["bfloat16"], models["float32"]
