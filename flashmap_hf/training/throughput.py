"""Blocks per second of the trainer on this machine, beside the rate that its matrix products could reach at most.

`python -m flashmap_hf.training.throughput --out throughput.json` times steps on random features, all shapes in turn.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flashmap_hf.configuration_flashmap import FlashMapConfig
from flashmap_hf.devices import choose_dtype, default_device
from flashmap_hf.modeling_flashmap import FlashMapDrafter
from flashmap_hf.provenance import write_record
from flashmap_hf.training.blocks import draw, make_batch
from flashmap_hf.training.config import TrainConfig
from flashmap_hf.training.objective import BlockObjective
from flashmap_hf.training.optimisers import build_optimisers
from flashmap_hf.training.shards import SequenceFeatures

# Of SmolLM2-135M: D, V, layers and taps.
HIDDEN_SIZE, VOCAB_SIZE, NUM_LAYERS, TAPS = 576, 49152, 30, [8, 15, 22, 30]


def measure(
    block_size: int, window: int, layers: int, draft_vocab: int, config: TrainConfig, device: torch.device
) -> tuple[Callable[[], tuple[float, float]], dict[str, Any]]:
    """A function that takes one step, seconds of the losses and of the optimisers, and what the step is."""
    drafter: Any = FlashMapDrafter(  # `PreTrainedModel.to` hides the signature of `nn.Module.to`
        FlashMapConfig(
            target_hidden_size=HIDDEN_SIZE,
            target_num_layers=NUM_LAYERS,
            vocab_size=VOCAB_SIZE,
            tap_layers=TAPS,
            block_size=block_size,
            window=window,
            num_hidden_layers=layers,
            draft_vocab_size=draft_vocab or None,
        )
    )
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator).to(device) / 24
    objective = BlockObjective(drafter.to(device).train(), matrix, matrix, config.position_decay)
    optimisers = build_optimisers([p for p in drafter.parameters() if p.requires_grad], config, device)
    length = window + config.run_length + block_size
    sequence = SequenceFeatures(
        taps=torch.randn(length, len(TAPS) * HIDDEN_SIZE, generator=generator).bfloat16(),
        tokens=torch.randint(draft_vocab or VOCAB_SIZE, (length,), generator=generator).int(),
        argmax=torch.zeros(length - window, dtype=torch.int32),
        f_left=torch.zeros(length - window, dtype=torch.float64),
        f_right=torch.zeros(length - window, dtype=torch.float64),
        first=window,
    )
    batch = make_batch([sequence] * config.runs, [window] * config.runs, config.run_length, window, block_size)
    draws = draw(batch, generator, hide_share=config.hide_share, start_share=config.start_share)
    batch, draws = batch.to(device), draws.to(device)
    bf16 = choose_dtype("auto", device) == torch.bfloat16

    def losses() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            found = objective(batch, draws)
        (found.sums / found.weights.clamp_min(1e-9)).sum().backward()

    def step() -> tuple[float, float]:
        start = clock(device)
        losses()
        middle = clock(device)
        for optimiser in optimisers.values():
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return middle - start, clock(device) - middle

    with FlopCounterMode(display=False) as counter:
        losses()
    facts = {"block_size": block_size, "window": window, "layers": layers, "draft_vocab": draft_vocab,
             "blocks": batch.anchors.numel(), "flop": counter.get_total_flops(), "bfloat16": bf16,
             "parameters": sum(p.numel() for p in drafter.parameters())}  # fmt: skip
    return step, facts


def matrix_rate(device: torch.device, bf16: bool) -> float:
    """GFLOP/s of one product of a layer's size, the best that the losses could reach."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    x, w = torch.randn(2304, 576, device=device, dtype=dtype), torch.randn(1536, 576, device=device, dtype=dtype)
    start = clock(device)
    for _ in range(8):
        nn.functional.linear(x, w)
    return 8 * 2 * 2304 * 576 * 1536 / (clock(device) - start) / 1e9


def clock(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashmap_hf.training.throughput", description=__doc__)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[4, 5, 8])
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--runs", type=int, nargs="+", default=[24], help="of 16 anchors; several batch sizes")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.rounds < 1 or min(args.block_sizes + args.windows + args.runs) < 1:
        parser.error("--rounds, --block-sizes, --windows and --runs must be at least 1")
    device = default_device()
    steps = []
    for runs in args.runs:
        config = TrainConfig(args.out, features=[args.out], runs=runs, run_length=16)
        for window in args.windows:
            for block_size in args.block_sizes:
                steps.append(measure(block_size, window, args.layers, args.draft_vocab, config, device))
    times: list[list[tuple[float, float]]] = [[] for _ in steps]
    rates = []
    for _ in range(args.rounds):
        for (step, facts), taken in zip(steps, times, strict=True):
            rates.append(matrix_rate(device, facts["bfloat16"]))
            taken.append(step())
    best = statistics.median(rates)
    rows = []
    for (_, facts), taken in zip(steps, times, strict=True):
        losses, optimisers = (statistics.median(part) for part in zip(*taken, strict=True))
        rate = facts["flop"] / losses / 1e9
        rows.append(
            facts | {"seconds_losses": losses, "seconds_optimisers": optimisers,
                     "blocks_per_second": facts["blocks"] / (losses + optimisers),
                     "gflops": rate, "share_of_matrix_rate": rate / best}
        )  # fmt: skip
        print(json.dumps(rows[-1]))
    write_record(args.out, {"rounds": args.rounds, "matrix_gflops": best, "rows": rows})


if __name__ == "__main__":
    main()
