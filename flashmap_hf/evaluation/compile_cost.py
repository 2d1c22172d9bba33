"""Does `flashmap_hf.compile` pay on this machine? One drafter pass, eager and compiled in turn, in one process.

`python -m flashmap_hf.evaluation.compile_cost --out compile.json` measures the pass as `generate` makes it: the
anchor's embedding, a full window, as many Euler steps as the drafter has, and the readout. Beside the wall clock it
counts the process's own CPU time, which other programs on the machine disturb less.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import flashmap_hf
from flashmap_hf import FlashMapDrafter, drafters, targets
from flashmap_hf.candidates import FlashMapCandidateGenerator, drafter_pass
from flashmap_hf.compare import public_name
from flashmap_hf.devices import DTYPES, choose_dtype, default_device
from flashmap_hf.generation_config import DraftOptions
from flashmap_hf.provenance import write_record
from flashmap_hf.runs import Settings, synchronise


def one_pass(target: Any, drafter: FlashMapDrafter) -> Callable[[], Any]:
    """A greedy pass for one sequence whose window is full of made-up states."""
    config, own = Settings(max_new_tokens=1).generation_config(), drafter.config
    options = DraftOptions.resolve({}, None, None, drafter.generation_config, own.block_size, own.num_steps)
    candidates = FlashMapCandidateGenerator(drafter, target, config, [], options)  # type: ignore[arg-type]
    width = len(own.tap_layers or []) * own.target_hidden_size
    taps = torch.randn(1, own.window, width, generator=torch.Generator().manual_seed(0))
    candidates.context.append(taps.to(device=drafter.device, dtype=target.dtype))
    anchor, noise = torch.zeros(1, dtype=torch.long), [torch.zeros(own.block_size)]
    return lambda: drafter_pass([candidates], anchor, noise)


def measure(target: Any, drafter: FlashMapDrafter, rounds: int, mode: str = "default") -> dict[str, Any]:
    """Milliseconds per pass, median and quartiles, after passes that warm up; the order changes from round to round."""
    start = time.perf_counter()
    compiled = flashmap_hf.compile(drafter, mode=mode)
    seconds_compile = time.perf_counter() - start
    passes = {"eager": one_pass(target, drafter), "compiled": one_pass(target, compiled)}
    logits = [call().logits.float() for call in passes.values()]
    wall: dict[str, list[float]] = {name: [] for name in passes}
    cpu: dict[str, list[float]] = {name: [] for name in passes}
    for round_index in range(-3, rounds):
        for name in sorted(passes, reverse=round_index % 2 == 0):
            synchronise(drafter.device)
            start, start_cpu = time.perf_counter(), time.process_time()
            passes[name]()
            synchronise(drafter.device)
            if round_index >= 0:
                wall[name].append(1e3 * (time.perf_counter() - start))
                cpu[name].append(1e3 * (time.process_time() - start_cpu))
    return {
        "mode": mode,
        "rounds": rounds,
        "seconds_compile": seconds_compile,
        "wall_ms": {name: spread(values) for name, values in wall.items()},
        "cpu_ms": {name: spread(values) for name, values in cpu.items()},
        "speedup": spread(ratios(wall)),
        "speedup_cpu": spread(ratios(cpu)),
        "largest_logit": float(logits[0].abs().max()),
        "largest_difference": float((logits[0] - logits[1]).abs().max()),
    }


def ratios(samples: dict[str, list[float]]) -> list[float]:
    """Of the passes of each round."""
    return [eager / compiled for eager, compiled in zip(samples["eager"], samples["compiled"], strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "lower_quartile": low, "upper_quartile": high, "lowest": min(values)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashmap_hf.evaluation.compile_cost", description=__doc__)
    parser.add_argument("--target", default=targets.SMOLLM2.name)
    parser.add_argument("--drafter", help="default: the one trained for the embedded target")
    parser.add_argument("--dtype", default="float32", choices=["auto", *DTYPES])
    parser.add_argument("--mode", default="default", help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error("--rounds must be at least 2")
    device = default_device()
    dtype = choose_dtype(args.dtype, device)
    drafter = drafters.load(args.drafter or drafters.default_drafter(args.target), dtype=dtype, device=device)
    target, _ = targets.load(args.target, dtype=dtype, device=device)
    flashmap_hf.check_target(drafter.config, target)
    found = measure(target, drafter, args.rounds, args.mode)
    names = {"target": args.target, "drafter": public_name(drafter), "dtype": str(dtype).removeprefix("torch.")}
    write_record(args.out, names | {"device": device.type} | found)
    for name, taken in found["wall_ms"].items():
        own = found["cpu_ms"][name]["median"]
        low, high = taken["lower_quartile"], taken["upper_quartile"]
        print(f"{name:8} {taken['median']:.2f} ms per pass ({low:.2f}-{high:.2f}), {own:.2f} ms of CPU time")
    pays = "pays" if found["speedup"]["lower_quartile"] > 1.0 else "does not pay"
    print(f"{found['speedup']['median']:.2f}x, after {found['seconds_compile']:.0f} s: compiling {pays} here")


if __name__ == "__main__":
    main()
