"""Several prompts at once, and several drafted continuations per step: a left-padded batch, verified as token trees.

python examples/batch_and_tree.py "Name three rivers." "What is a prime number?" --tree-size 16
"""

import argparse
from typing import Any

import torch

import flashmap_hf
from flashmap_hf import FlashMapDrafter, FlashMapGenerationConfig, drafters, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=["Name three rivers.", "What is a prime number?"])
    parser.add_argument("--target", default="smollm2-135m-instruct", help="embedded name, folder or Hub id")
    parser.add_argument("--drafter", help="folder or Hub id; default: the one trained for the embedded target")
    parser.add_argument("--tree-size", type=int, default=12, help="drafted tokens per verification")
    parser.add_argument("--num-drafts", type=int, default=3, help="sampled drafts merged into one tree, when sampling")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()

    drafter = FlashMapDrafter.from_pretrained(args.drafter or drafters.default_drafter(args.target))
    target: Any  # type checkers do not see the `generate` of a PreTrainedModel
    target, tokenizer = targets.load(args.target, dtype=torch.float32)
    chats = [[{"role": "user", "content": prompt}] for prompt in args.prompts]
    tokenizer.padding_side = "left"  # new tokens follow the prompt's last one
    inputs: Any = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )

    length = {"max_new_tokens": args.max_new_tokens}
    greedy = FlashMapGenerationConfig(tree_size=args.tree_size, do_sample=False, **length)
    sampled = FlashMapGenerationConfig(
        num_drafts=args.num_drafts, verification="rejection", do_sample=True, temperature=0.8, seed=0, **length
    )
    for name, config in (("greedy", greedy), ("sampled", sampled)):
        with flashmap_hf.record() as stats:
            output = target.generate(**inputs, generation_config=config, assistant_model=drafter)
        print(f"--- {name}: {stats.tokens_per_step:.2f} tokens per target step and row")
        for row in output[:, inputs["input_ids"].shape[1] :]:
            print(tokenizer.decode(row, skip_special_tokens=True), end="\n\n")
    plain = target.generate(**inputs, do_sample=False, **length)
    drafted = target.generate(**inputs, generation_config=greedy, assistant_model=drafter)
    print("greedy rows identical to plain:", bool(torch.equal(plain, drafted)))


if __name__ == "__main__":
    main()
