"""What `generate` and `pipeline` take together with a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_prompt, tiny_drafter, tiny_target
from tiny_files import write_target
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import flashmap_hf
from flashmap_hf import FlashMapGenerationConfig


@pytest.mark.parametrize(
    "options",
    [{"verification": "rejection"}, {"tree_size": 4}, {"adaptive": False, "draft_ngrams": True}, {"num_steps": 2}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_ours_as_keywords_of_generate(options: dict[str, Any]) -> None:
    target = tiny_target("llama")
    inputs, drafter = random_prompt(7, 64, seed=3), tiny_drafter(target)
    sampling = {"do_sample": True, "seed": 3, "max_new_tokens": 12}
    by_keyword = target.generate(**inputs, assistant_model=drafter, **sampling, **options)
    config = FlashMapGenerationConfig(**sampling, **options)
    assert torch.equal(by_keyword, target.generate(**inputs, assistant_model=drafter, generation_config=config))
    with pytest.raises(ValueError, match="tree_size='many'"):
        target.generate(**inputs, assistant_model=drafter, tree_size="many")
    with pytest.raises(ValueError, match="tree_sise"):  # a typing error is still one
        target.generate(**inputs, assistant_model=drafter, tree_sise=4)


def test_an_empty_prompt_is_named() -> None:
    target = tiny_target("llama")
    with pytest.raises(ValueError, match="input_ids is empty"):
        target.generate(torch.empty(1, 0, dtype=torch.long), assistant_model=tiny_drafter(target), max_new_tokens=4)


def test_a_pipeline_takes_the_drafter_when_it_is_made(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    drafter = tiny_drafter(target, tokenizer=tokenizer)
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    ours = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    asked = {"max_new_tokens": 12, "do_sample": False}
    with flashmap_hf.record() as stats:
        assert ours("What is a prime number?", **asked) == plain("What is a prime number?", **asked)
    assert stats.blocks > 0
