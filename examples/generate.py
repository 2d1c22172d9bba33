"""Speed up `model.generate` with a drafter: load both, pass one as `assistant_model`, and nothing else changes.

python examples/generate.py "Why is the sky blue?"
"""

import argparse
from typing import Any

from transformers import TextStreamer

import flashmap_hf
from flashmap_hf import FlashMapDrafter, drafters, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Write a haiku about the sea, then explain it in two sentences.")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="embedded name, folder or Hub id")
    parser.add_argument("--drafter", help="folder or Hub id; default: the one trained for the embedded target")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()

    drafter = FlashMapDrafter.from_pretrained(args.drafter or drafters.default_drafter(args.target))
    target: Any  # type checkers do not see the `generate` of a PreTrainedModel
    target, tokenizer = targets.load(args.target)
    inputs: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )

    with flashmap_hf.record() as stats:
        target.generate(
            **inputs,
            assistant_model=drafter,
            do_sample=False,
            max_new_tokens=args.max_new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
    print(f"\n{stats.committed} tokens in {stats.target_steps} target steps: {stats.tokens_per_step:.2f} per step")


if __name__ == "__main__":
    main()
