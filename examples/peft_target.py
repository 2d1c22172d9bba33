"""A target under a peft adapter: the adapter stays active, and the output is that of plain decoding.

python examples/peft_target.py --adapter you/lora       without --adapter: a fresh LoRA, to try it out
"""

import argparse
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DynamicCache

import flashmap_hf
from flashmap_hf import FlashMapDrafter, drafters, targets


def virtual_tokens(tuned: Any) -> DynamicCache:
    """What prompt and prefix tuning put before the text, as the cache of a first turn."""
    with torch.no_grad():
        learned = tuned.get_prompt(batch_size=1)
        if isinstance(learned, DynamicCache):  # prefix tuning learns keys and values
            return learned
        cache = DynamicCache(config=tuned.get_base_model().config)
        tuned.get_base_model()(inputs_embeds=learned, cache=cache, use_cache=True)
        return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct", help="embedded name, folder or Hub id")
    parser.add_argument("--adapter", help="folder or Hub id of a peft adapter for the target")
    parser.add_argument("--drafter", help="folder or Hub id; best one adapted to the tuned target (docs/training.md)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()
    base, tokenizer = targets.load(args.target, dtype=torch.float32)
    fresh = LoraConfig(r=8, task_type="CAUSAL_LM", target_modules="all-linear")
    tuned: Any = PeftModel.from_pretrained(base, args.adapter) if args.adapter else get_peft_model(base, fresh)
    tuned.eval()
    drafter = FlashMapDrafter.from_pretrained(args.drafter or drafters.default_drafter(args.target))
    call: Any = {**tokenizer("The first thing to know is", return_tensors="pt")}
    call |= {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    virtual = tuned.active_peft_config.num_virtual_tokens if tuned.active_peft_config.is_prompt_learning else 0
    if virtual:  # the mask covers them, too
        call["attention_mask"] = torch.cat([torch.ones(1, virtual, dtype=torch.long), call["attention_mask"]], dim=1)

    def generate(**options: Any) -> torch.Tensor:
        if virtual:
            return tuned.get_base_model().generate(**call, **options, cache=virtual_tokens(tuned))
        return tuned.generate(**call, **options)

    plain = generate()
    with flashmap_hf.record() as stats:
        drafted = generate(assistant_model=drafter)
    print(tokenizer.decode(drafted[0], skip_special_tokens=True))
    print(f"identical to plain: {torch.equal(plain, drafted)}; {stats.tokens_per_step:.2f} tokens per target step")


if __name__ == "__main__":
    main()
