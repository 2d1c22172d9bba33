"""Is it right, fast and small on this machine? For whoever has a GPU; it runs on a CPU, too.

python examples/gpu_check.py --json gpu_check.json
python examples/gpu_check.py --target org/model --drafter you/drafter --device cuda:1
python examples/gpu_check.py --device cpu --quick

Right: in float32 the greedy text of every way to draft is that of plain decoding, token for token (exit code 1 if not);
in the fast type, where texts part first and how close the target's two best logits were there. Fast: all ways in turn,
in one process. Small: bytes of weights, of state per request, of the cache, and the peak on the GPU.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import flashmap_hf
from flashmap_hf import FlashMapDrafter, drafters, targets
from flashmap_hf.compare import Spread, first_difference, public_name
from flashmap_hf.devices import choose_dtype, default_device
from flashmap_hf.evaluation.memory import of_drafter
from flashmap_hf.prompts import check_length, encode
from flashmap_hf.provenance import write_record
from flashmap_hf.runs import Settings, run

PROMPTS = {
    "chat": "My neighbour plays loud music late at night. How can I ask him to turn it down?",
    "code": "Write a Python function that reverses a list in place. Add a docstring.",
    "maths": "A train leaves at 9:40 and arrives at 13:10 after 245 km. What is its average speed?",
    "list": "Name three rivers.",
}
WAYS: dict[str, dict[str, Any]] = {  # name -> drafting options
    "chain": {"adaptive": False, "draft_ngrams": False},
    "tree": {"adaptive": False, "draft_ngrams": False, "tree_size": 16},
    "automatic": {"adaptive": True},
}
Inputs = Mapping[str, dict[str, torch.Tensor]]  # prompt -> input_ids and attention_mask [1, T]
Way = tuple[str, FlashMapDrafter, dict[str, Any]]  # name, drafter, drafting options


def ways(drafter: FlashMapDrafter, compiled: bool) -> list[Way]:
    """Every way to draft. The compiled ones draft chains; on a GPU once more through CUDA graphs."""
    found: list[Way] = [(name, drafter, options) for name, options in WAYS.items()]
    modes = (["default", "reduce-overhead"] if drafter.device.type == "cuda" else ["default"]) if compiled else []
    for mode in modes:
        print(f"compiling the drafter ({drafter.dtype}, {mode}) ...", file=sys.stderr, flush=True)
        found.append((f"chain, compiled: {mode}", flashmap_hf.compile(drafter, mode=mode), WAYS["chain"]))
    return found


def together(inputs: Inputs, pad: int) -> dict[str, torch.Tensor]:
    """All prompts as one batch, padded on the left."""
    longest = max(one["input_ids"].shape[1] for one in inputs.values())

    def rows(name: str, value: int) -> torch.Tensor:
        padded = [
            torch.nn.functional.pad(one[name], (longest - one[name].shape[1], 0), value=value)
            for one in inputs.values()
        ]
        return torch.cat(padded)

    return {"input_ids": rows("input_ids", pad), "attention_mask": rows("attention_mask", 0)}


def batch_tokens(
    target: Any, inputs: Inputs, settings: Settings, drafter: FlashMapDrafter, pad: int
) -> list[list[int]]:
    """New tokens of each row of one call over all prompts, without what fills the shorter ones up."""
    batch = together(inputs, pad)
    config = settings.generation_config(pad_token_id=pad, **WAYS["chain"])
    output = target.generate(**batch, generation_config=config, assistant_model=drafter)
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    found = []
    for row in output[:, batch["input_ids"].shape[1] :].tolist():
        end = next((i for i, token in enumerate(row) if token in ends), len(row))
        found.append(row[: end + 1])
    return found


def texts(
    target: Any, inputs: Inputs, settings: Settings, every: Sequence[Way], pad: int
) -> tuple[list[list[int]], dict[str, list[dict[str, Any] | None]]]:
    """Plain greedy tokens of each prompt, and for each way where its own part from them (None: nowhere)."""
    plain = [run(target, one, settings.generation_config(), 0).tokens for one in inputs.values()]
    found: dict[str, list[list[int]]] = {}
    for name, drafter, options in every:
        config = settings.generation_config(**options)
        found[name] = [run(target, one, config, 0, assistant_model=drafter).tokens for one in inputs.values()]
    found["batch"] = batch_tokens(target, inputs, settings, every[0][1], pad)
    parted: dict[str, list[dict[str, Any] | None]] = {}
    for name, rows in found.items():
        parted[name] = []
        for prompt, one, expected, row in zip(inputs, inputs.values(), plain, rows, strict=True):
            place = first_difference(target, one["input_ids"], expected, row, settings)
            parted[name].append(None if place is None else {"prompt": prompt} | asdict(place))
    return plain, parted


def speed(target: Any, inputs: Inputs, settings: Settings, every: Sequence[Way], rounds: int) -> dict[str, Any]:
    """Of each way: tokens per second, speed-up over plain decoding in the same round, tokens per target step, ..."""
    calls: dict[str, tuple[Any, Any]] = {"plain": (settings.generation_config(), None)}
    calls |= {name: (settings.generation_config(**options), drafter) for name, drafter, options in every}
    rates: dict[str, list[float]] = {name: [] for name in calls}
    steps: dict[str, list[float]] = {name: [] for name in calls}
    drafts: dict[str, list[float]] = {name: [] for name in calls}
    peaks: dict[str, int] = {}
    for round_index in range(-1, rounds):  # the first one warms up
        for one in inputs.values():
            for name, (config, assistant) in calls.items():
                if target.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(target.device)
                with flashmap_hf.record() as stats:
                    done = run(target, one, config, 0, assistant_model=assistant)
                if round_index < 0:
                    continue
                rates[name].append(done.tokens_per_second)
                steps[name].append(done.tokens_per_step)
                drafts[name] += [1e3 * stats.seconds_drafter / stats.blocks] if stats.blocks else []
                if target.device.type == "cuda":
                    peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated(target.device))
    return {
        name: {
            "tokens_per_second": asdict(Spread.of(rates[name])),
            "speedup": asdict(Spread.of([r / p for r, p in zip(rates[name], rates["plain"], strict=True)])),
            "tokens_per_step": statistics.mean(steps[name]),
            "drafter_ms": statistics.median(drafts[name]) if drafts[name] else None,
            "peak_bytes": peaks.get(name),
        }
        for name in calls
    }


def memory(target: Any, inputs: Inputs, settings: Settings, drafter: FlashMapDrafter) -> dict[str, Any]:
    """Bytes: what the drafter adds, and the cache after a call, which must be that of plain decoding."""
    one = next(iter(inputs.values()))
    after: dict[str, list[int]] = {}
    for name, assistant in (("plain", None), ("tree", drafter)):
        config = settings.generation_config(return_dict_in_generate=True, **(WAYS["tree"] if assistant else {}))
        output = target.generate(**one, generation_config=config, assistant_model=assistant)
        layers = output.cache.layers
        held = sum(states.numel() * states.element_size() for layer in layers for states in (layer.keys, layer.values))
        after[name] = [held, output.cache.get_seq_length()]
    footprint = of_drafter(drafter, target, drafter.config.num_steps)
    return {
        "drafter_weight_bytes": footprint.weight_bytes,
        "state_bytes_per_request": footprint.state_bytes(drafter.config.window),
        "state_bytes_per_request_at_4096": footprint.state_bytes(4096),
        "copied_readout_bytes_per_call": footprint.readout_bytes,
        "cache_bytes_per_token": after["plain"][0] / after["plain"][1],
        "cache_tokens_plain": after["plain"][1],
        "cache_tokens_drafted": after["tree"][1],
        "cache_bytes_drafted_per_token": after["tree"][0] / after["tree"][1],
    }


def show(record: dict[str, Any]) -> None:
    console = Console()
    table = Table(title=f"{record['target']} on {record['device_name']}, {record['dtype']}")
    numbers = ("tokens/s", "speed-up", "tokens/step", "drafter ms", "peak MB")
    for column in ("", "float32 = plain", "first difference", *numbers):
        table.add_column(column)
    for name in ["plain", *record["float32"]]:
        timed = record["speed"].get(name)
        cells = [name, "" if name == "plain" else where(record["float32"][name])]
        cells.append("" if name == "plain" else where(record["fast_type"][name]))
        if timed is not None:
            rate, gain = timed["tokens_per_second"], timed["speedup"]
            cells += [f"{rate['median']:.1f}", f"{gain['median']:.2f} ({gain['lowest']:.2f}-{gain['highest']:.2f})"]
            cells.append(f"{timed['tokens_per_step']:.2f}")
            cells.append("" if timed["drafter_ms"] is None else f"{timed['drafter_ms']:.2f}")
            cells.append("" if timed["peak_bytes"] is None else f"{timed['peak_bytes'] / 1e6:.0f}")
        table.add_row(*cells)
    console.print(table)
    parted = f"{record['plain_parted']} of {record['prompts']} parted"
    console.print(f"plain {record['dtype']} against plain float32: {parted}")
    for name, value in record["memory"].items():
        console.print(f"{name.replace('_', ' ')}: {value:,.0f}")


def where(parted: Sequence[dict[str, Any] | None]) -> str:
    """ "same", or the earliest place where texts part, with the margin of the target's two best logits there."""
    places = [place for place in parted if place is not None]
    if not places:
        return "same"
    first = min(places, key=lambda place: int(place["position"]))
    return f"{len(places)} parted, token {first['position'] + 1}, margin {first['margin']:.2g}"


def check(args: argparse.Namespace) -> dict[str, Any]:
    try:
        device = torch.device(args.device) if args.device else default_device()
    except RuntimeError as error:
        raise ValueError(f"--device {args.device}: {error}") from error
    dtype = choose_dtype(args.dtype, device)
    rounds, new_tokens = (1, min(args.max_new_tokens, 12)) if args.quick else (args.rounds, args.max_new_tokens)
    prompts = dict(list(PROMPTS.items())[:2]) if args.quick else PROMPTS
    settings = Settings(max_new_tokens=new_tokens)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    source = args.drafter or drafters.default_drafter(args.target)
    drafters.check(source)

    def load(dtype: torch.dtype) -> tuple[Any, Inputs, list[Way], int]:
        target, tokenizer = targets.load(args.target, dtype=dtype, device=device)
        drafter = drafters.load(source, dtype=dtype, device=device)
        flashmap_hf.check_target(drafter.config, target, tokenizer)
        inputs = {name: encode(target, tokenizer, text) for name, text in prompts.items()}
        for one in inputs.values():
            check_length(target, one["input_ids"].shape[1], new_tokens)
        return target, inputs, ways(drafter, not args.no_compile), int(tokenizer.pad_token_id or 0)

    target, inputs, every, pad = load(torch.float32)
    exact, parted = texts(target, inputs, settings, every, pad)
    plain, fast = exact, parted
    if dtype != torch.float32:
        del target, every  # two copies of a large target may not fit
        target, inputs, every, pad = load(dtype)
        plain, fast = texts(target, inputs, settings, every, pad)
    return {
        "target": public_name(target),
        "drafter": public_name(every[0][1]),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "prompts": len(prompts),
        "rounds": rounds,
        "max_new_tokens": new_tokens,
        "float32": parted,
        "fast_type": fast,
        "plain_parted": sum(a != b for a, b in zip(exact, plain, strict=True)),
        "speed": speed(target, inputs, settings, every, rounds),
        "memory": memory(target, inputs, settings, every[0][1]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=targets.SMOLLM2.name, help="embedded name, folder or Hub id")
    parser.add_argument("--drafter", help="folder or Hub id; default: the one trained for the embedded target")
    parser.add_argument("--device", help="cuda, cuda:1, cpu, ...; default: the accelerator, where there is one")
    parser.add_argument("--dtype", default="auto", help="the fast type: auto, bfloat16, float16, float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled drafter, which takes minutes")
    parser.add_argument("--quick", action="store_true", help="two prompts, a dozen tokens, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here, with its provenance")
    args = parser.parse_args(argv)
    try:
        record = check(args)
        show(record)
        if args.json:
            write_record(args.json, record)
    except (ValueError, OSError) as error:
        print(f"gpu_check: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    differing = [name for name, places in record["float32"].items() if any(places)]
    print("float32: " + (f"DIFFERS from plain: {', '.join(differing)}" if differing else "all equal to plain"))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
