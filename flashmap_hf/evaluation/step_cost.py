"""What one target forward costs at 1..T tokens: the number that decides whether drafting pays on a machine.

`python -m flashmap_hf.evaluation.step_cost --out step_cost.json` measures all token counts interleaved in one process,
with the products of few rows as torch computes them and as the engine does.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from flashmap_hf import targets
from flashmap_hf.few_rows import FewRows
from flashmap_hf.provenance import provenance

CONTEXT = 128  # tokens in the cache while measuring


@torch.inference_mode()
def measure(target: PreTrainedModel, tokens: Sequence[int], rounds: int) -> dict[str, Any]:
    """Milliseconds of a forward, median and quartiles, and as a multiple of the forward of one token.

    `engine_ms` and `engine_plain_steps`: the same forward within the engine (few_rows.py), in the same plain steps.
    """
    vocabulary = target.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(vocabulary, (1, count), generator=generator).to(target.device)

    cache = target(ids(CONTEXT), use_cache=True).cache
    cache.activate_past_recording()
    samples: dict[int, list[float]] = {}
    engine: dict[int, list[float]] = {}
    products = FewRows(target)
    for round_index in range(rounds + 1):
        for count in tokens:
            for found, how in ((samples, nullcontext()), (engine, products.applied())):
                inputs = ids(count)
                start = time.perf_counter()
                with how:
                    target(inputs, cache=cache, use_cache=True)
                if target.device.type != "cpu":
                    torch.accelerator.synchronize(target.device)
                seconds = time.perf_counter() - start
                cache.crop(-count)
                if round_index > 0:  # the first round warms up
                    found.setdefault(count, []).append(seconds * 1e3)
    plain = statistics.median(samples[1])
    rows = []
    for count, values in sorted(samples.items()):
        low, middle, high = statistics.quantiles(values, n=4)
        ours = statistics.median(engine[count])
        rows.append(
            {"tokens": count, "ms": middle, "ms_quartiles": [low, high], "plain_steps": middle / plain}
            | {"engine_ms": ours, "engine_plain_steps": ours / plain}
        )
    return {"dtype": str(target.dtype).removeprefix("torch."), "rounds": rounds, "context": CONTEXT, "rows": rows}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashmap_hf.evaluation.step_cost", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 9, 12, 16])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if 1 not in args.tokens or min(args.tokens) < 1 or args.rounds < 2:
        parser.error("--tokens must hold 1, the unit, and --rounds must be at least 2")
    results = []
    for dtype in args.dtypes:
        target, _ = targets.load(args.target, dtype=dtype)
        results.append(measure(target.eval(), args.tokens, args.rounds))
    record = {"provenance": provenance(), "target": args.target, "results": results}
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    for result in results:
        print(result["dtype"])
        for row in result["rows"]:
            print(
                f"  {row['tokens']:3} tokens: {row['ms']:7.1f} ms, {row['plain_steps']:.2f} plain steps; "
                f"in the engine {row['engine_ms']:7.1f} ms, {row['engine_plain_steps']:.2f}"
            )


if __name__ == "__main__":
    main()
