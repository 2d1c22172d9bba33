"""What a step of the engine takes beside the two forwards: our own Python, next to what plain `generate` takes.

`python -m flashmap_hf.evaluation.overhead --out overhead.json` runs all ways interleaved in one process.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashmap_hf import FlashMapDrafter, FlashMapGenerationConfig, drafters, targets
from flashmap_hf.evaluation.watch import watched
from flashmap_hf.provenance import provenance
from flashmap_hf.runs import synchronise

PROMPT = "Write a Python function that tells whether a word is a palindrome, and explain how it works."
FIXED = {"adaptive": False}
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "top_k": 0}
WAYS: dict[str, dict[str, Any]] = {  # fields of the call's generation config
    "greedy, chain": {**GREEDY, **FIXED},
    "greedy, tree of 16": {**GREEDY, **FIXED, "tree_size": 16},
    "greedy, automatic": {**GREEDY, "adaptive": True},
    "greedy, automatic, n-grams": {**GREEDY, "adaptive": True, "draft_ngrams": True},
    "shared noise, chain": {**SAMPLED, **FIXED, "verification": "shared_noise"},
    "rejection, chain": {**SAMPLED, **FIXED, "verification": "rejection"},
}


class Clock:
    """Seconds inside of a module's forward, whoever calls it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.begun = device, 0.0, 0.0

    def before(self, *_: Any) -> None:
        synchronise(self.device)
        self.begun = time.perf_counter()

    def after(self, *_: Any) -> None:
        synchronise(self.device)
        self.seconds += time.perf_counter() - self.begun


@contextmanager
def timed(module: nn.Module, device: torch.device) -> Iterator[Clock]:
    clock = Clock(device)
    handles = [module.register_forward_pre_hook(clock.before), module.register_forward_hook(clock.after)]
    try:
        yield clock
    finally:
        for handle in handles:
            handle.remove()


def measure(target: Any, tokenizer: Any, drafter: FlashMapDrafter, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Per way the median over `rounds` of the milliseconds of a step after the prefill, without the forwards."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(target.device)
    plain: dict[str, dict[str, Any]] = {"plain, greedy": dict(GREEDY), "plain, sampled": dict(SAMPLED)}
    samples: dict[str, list[float]] = {}
    steps: dict[str, int] = {}
    for round_index in range(rounds + 1):
        for name, options in (plain | WAYS).items():
            config = FlashMapGenerationConfig(max_new_tokens=new_tokens, seed=round_index, **options)
            keywords = {} if name in plain else {"assistant_model": drafter}
            with watched(target, inputs["input_ids"].shape[1]) as watch, timed(drafter, drafter.device) as clock:
                target.generate(**inputs, generation_config=config, streamer=watch, **keywords)
            outside = sum(watch.steps.draft_ms[1:]) + sum(watch.steps.commit_ms[1:]) - 1e3 * clock.seconds
            if round_index > 0 and len(watch.steps.committed) > 1:  # the first round calibrates and warms up
                samples.setdefault(name, []).append(outside / (len(watch.steps.committed) - 1))
                steps[name] = len(watch.steps.committed) - 1
    return {
        name: {"own_ms": statistics.median(values), "lowest": min(values), "highest": max(values), "steps": steps[name]}
        for name, values in samples.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashmap_hf.evaluation.overhead", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", help="folder or Hub id (default: the one trained for the embedded target)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.new_tokens < 8:
        parser.error("--rounds must be at least 1 and --new-tokens at least 8")
    target, tokenizer = targets.load(args.target, dtype=args.dtype)
    source = args.drafter or drafters.default_drafter(args.target)
    drafter = drafters.load(source, dtype=target.dtype, device=target.device)
    ways = measure(target.eval(), tokenizer, drafter, args.new_tokens, args.rounds)
    record = {"provenance": provenance(), "target": args.target, "dtype": args.dtype, "ways": ways}
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    for name, row in ways.items():
        print(f"{name:28} {row['own_ms']:6.2f} ms a step ({row['lowest']:.2f} to {row['highest']:.2f})")


if __name__ == "__main__":
    main()
