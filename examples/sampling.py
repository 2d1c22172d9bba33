"""Sample with a drafter: temperature and filters as ever, the accept rule by option, the same seed the same text.

python examples/sampling.py "Tell me a story about a lighthouse." --temperature 0.8 --top-p 0.95
"""

import argparse
from typing import Any

import torch

import flashmap_hf
from flashmap_hf import FlashMapDrafter, FlashMapGenerationConfig, drafters, targets
from flashmap_hf.generation_config import Verification

# All three keep the target's law; they differ in what they accept.
RULES: tuple[Verification, ...] = ("shared_noise", "rejection", "one_hot")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Tell me a story about a lighthouse.")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="embedded name, folder or Hub id")
    parser.add_argument("--drafter", help="folder or Hub id; default: the one trained for the embedded target")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    drafter = FlashMapDrafter.from_pretrained(args.drafter or drafters.default_drafter(args.target))
    target: Any  # type checkers do not see the `generate` of a PreTrainedModel
    target, tokenizer = targets.load(args.target)
    inputs: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )

    for rule in RULES:
        config = FlashMapGenerationConfig(
            verification=rule,
            do_sample=True,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=0,  # the library's default would keep 50
            max_new_tokens=args.max_new_tokens,
        )
        texts = []
        for _ in range(2):
            torch.manual_seed(7)
            with flashmap_hf.record() as stats:
                output = target.generate(**inputs, generation_config=config, assistant_model=drafter)
            texts.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        print(f"--- {rule}: {stats.tokens_per_step:.2f} tokens per target step\n{texts[0]}")
        print("the same again with the same seed" if texts[0] == texts[1] else f"ANOTHER TEXT: {texts[1]}")


if __name__ == "__main__":
    main()
