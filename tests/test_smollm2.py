"""The real target with the trained drafter: float32 greedy output is token-identical to plain `generate`."""

from functools import cache
from typing import Any

import pytest
import torch
from conftest import difference

import flashmap_hf
from flashmap_hf import FlashMapDrafter, FlashMapGenerationConfig, drafters, targets

PROMPTS = [
    "Hi!",
    "Write a Python function that reverses a string.",
    "What is 17 times 23? Think step by step.",
    "List three uses of copper.",
    "Translate to French: The weather is nice today.",
    "Who wrote Hamlet?",
    "Explain photosynthesis to a child.",
    "Give me a JSON object with the keys name, age and city.",
    "Summarise: Cats sleep for most of the day. They hunt at dawn and at dusk.",
    "Write a SQL query that counts users per country.",
    "A train travels 60 km in 45 minutes. How fast is it?",
    "Tell me a short joke about programmers.",
    "What are the capital cities of Norway, Sweden and Denmark?",
    "Write a haiku about autumn.",
    "Fix the bug: for i in range(10) print(i)",
    "Name five prime numbers.",
    "How do I boil an egg?",
    "Compare tea and coffee in two sentences.",
    "Continue: Once upon a time, in a village by the sea,",
    "¿Cuál es la capital de España? 日本の首都は？",
]


@cache
def pair() -> tuple[Any, Any, FlashMapDrafter]:
    target, tokenizer = targets.load("smollm2-135m-instruct", dtype=torch.float32)
    folder = drafters.default_drafter("smollm2-135m-instruct")
    return target, tokenizer, FlashMapDrafter.from_pretrained(folder, dtype=torch.float32)


def check(text: str, new_tokens: int) -> tuple[int, int]:
    target, tokenizer, drafter = pair()
    chat = [{"role": "user", "content": text}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)
    options = FlashMapGenerationConfig(do_sample=False, max_new_tokens=new_tokens, adaptive=False)
    with flashmap_hf.record() as stats:
        ours = target.generate(**inputs, generation_config=options, assistant_model=drafter)
    assert ours.tolist() == plain.tolist(), difference(target, plain, ours)
    return stats.committed, stats.target_steps


@pytest.mark.parametrize("text", PROMPTS[1:3])
def test_identical(text: str) -> None:
    committed, steps = check(text, 16)
    assert steps < committed  # something was accepted


@pytest.mark.slow
def test_identical_on_20_prompts() -> None:
    committed, steps = map(sum, zip(*(check(text, 32) for text in PROMPTS), strict=True))
    assert committed / steps > 1.3


def test_the_drafter_fits_its_target() -> None:
    target, tokenizer, drafter = pair()
    flashmap_hf.check_target(drafter.config, target, tokenizer)
    assert not flashmap_hf.chat_template_differs(drafter.config, tokenizer)
    assert drafter.config.tokenizer_size == len(tokenizer)
