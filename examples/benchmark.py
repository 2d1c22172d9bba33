"""Does drafting pay on this machine, for these prompts? Plain decoding and FlashMap in turn, in one process.

python examples/benchmark.py --prompts my_prompts.jsonl --rounds 5 --json benchmark.json
"""

import argparse
import json
from pathlib import Path

from flashmap_hf import drafters, targets
from flashmap_hf.compare import compare
from flashmap_hf.comparison_table import print_comparison
from flashmap_hf.devices import choose_dtype, default_device
from flashmap_hf.prompt_files import read_prompts
from flashmap_hf.runs import Settings

PROMPTS = {"story": "Tell me a story about a lighthouse.", "code": "Write a Python function that reverses a list."}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct", help="embedded name, folder or Hub id")
    parser.add_argument("--drafter", help="folder or Hub id; default: the one trained for the embedded target")
    parser.add_argument("--prompts", type=Path, help='JSONL rows with "prompt"; default: two of this file')
    parser.add_argument("--limit", type=int, default=8, help="of the file's prompts, so many from its start")
    parser.add_argument("--dtype", default="auto", help="auto (the device's fastest), float32, bfloat16, float16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the measurement here, with its provenance")
    args = parser.parse_args()

    prompts = PROMPTS
    if args.prompts:
        prompts = {row.id: row.prompt for row in read_prompts(args.prompts)[: args.limit]}
    device = default_device()
    dtype = choose_dtype(args.dtype, device)
    target, tokenizer = targets.load(args.target, dtype=dtype, device=device)
    drafter = drafters.load(args.drafter or drafters.default_drafter(args.target), dtype=dtype, device=device)
    settings = Settings(max_new_tokens=args.max_new_tokens)
    comparison = compare(target, tokenizer, drafter, prompts, settings, rounds=args.rounds)
    print_comparison(comparison)
    if args.json:
        args.json.write_text(json.dumps(comparison.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
