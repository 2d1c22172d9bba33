"""Decode with a drafter's repository alone: `custom_generate=` runs the file `custom_generate/generate.py` in it.

python examples/custom_generate_from_hub.py "Why is the sky blue?" --drafter org/drafter

It runs code from that repository, hence `trust_remote_code=True`: read the file first. The package is needed all the
same; `assistant_model=drafter` (examples/generate.py) needs no such trust.
"""

import argparse
from typing import Any

from transformers import TextStreamer

from flashmap_hf import drafters, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="embedded name, folder or Hub id")
    parser.add_argument("--drafter", help="folder or Hub id with custom_generate/generate.py and the weights")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    target: Any  # type checkers do not see the `generate` of a PreTrainedModel
    target, tokenizer = targets.load(args.target)
    inputs: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    target.generate(
        **inputs,
        custom_generate=str(args.drafter or drafters.default_drafter(args.target)),
        trust_remote_code=True,
        do_sample=False,
        max_new_tokens=args.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )


if __name__ == "__main__":
    main()
