"""Generate from a target with and without its drafter, on a chat, a code and a maths prompt, and compare.

python examples/demo.py --dtype float32
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flashmap_hf import drafters, targets
from flashmap_hf.compare import compare
from flashmap_hf.comparison_table import print_comparison, show_text
from flashmap_hf.devices import choose_dtype, default_device
from flashmap_hf.runs import Settings

PROMPTS = {
    "chat": "My neighbour plays loud music late at night. How can I ask him to turn it down without starting a fight?",
    "code": "Write a Python function that takes a list of words and returns a dictionary from each word to how often "
    "it occurs. Add a docstring and show an example call.",
    "maths": "A train leaves at 9:40 and arrives at 13:10 after travelling 245 km. What is its average speed in km/h? "
    "Explain each step.",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=targets.SMOLLM2.name, help="embedded name, folder or Hub id")
    parser.add_argument("--drafter", help="folder or Hub id; default: the one trained for the embedded target")
    parser.add_argument("--dtype", default="auto", help="auto (the device's fastest), float32, bfloat16, float16")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds after the one that is shown")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurement, with its provenance")
    args = parser.parse_args(argv)
    try:
        settings = Settings(max_new_tokens=args.max_new_tokens)
        device = default_device()
        dtype = choose_dtype(args.dtype, device)
        source = args.drafter or drafters.default_drafter(args.target)
        drafters.check(source)
        target, tokenizer = targets.load(args.target, dtype=dtype, device=device)
        drafter = drafters.load(source, dtype=dtype, device=device)
        show = show_text(tokenizer)
        comparison = compare(target, tokenizer, drafter, PROMPTS, settings, rounds=args.rounds, show=show)
        print_comparison(comparison)
        if args.json:
            args.json.write_text(json.dumps(comparison.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
