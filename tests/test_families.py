"""Greedy output in float32 is token-identical to plain `generate`, for random models of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FAMILIES, difference, lengths_accepted, oracle_for, random_prompt, tiny_drafter, tiny_target

import flashmap_hf

# One token; shorter than, as long as, and far beyond both the drafter's window and the sliding windows of 8; padded.
PROMPTS = [
    {"length": length, "padding": padding}
    for length, padding in [
        (1, 0), (2, 0), (3, 0), (5, 0), (7, 0), (8, 0), (9, 0), (19, 0), (64, 0), (1, 3), (4, 9), (12, 5),
    ]
]  # fmt: skip
NEW_TOKENS = 20
BLOCK, WINDOW = 5, 4


def check(target: Any, drafter: Any, inputs: dict[str, torch.Tensor], padding: int, teach: bool) -> None:
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
    if teach:
        drafter.teach(target, plain, padding)
    with flashmap_hf.record() as stats:
        found = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=drafter)
    assert found.tolist() == plain.tolist(), difference(target, plain, found, padding)
    assert stats.committed == NEW_TOKENS
    assert stats.accepted + stats.target_steps == NEW_TOKENS


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_plain_generate(family: str) -> None:
    """12 prompts per family, 120 in all, with every number of accepted tokens from 0 to K."""
    target = tiny_target(family)
    oracle = oracle_for(target, block_size=BLOCK, window=WINDOW)
    with flashmap_hf.record() as stats:
        for seed, prompt in enumerate(PROMPTS):
            inputs = random_prompt(prompt["length"], 64, seed, prompt["padding"])
            check(target, oracle, inputs, prompt["padding"], teach=True)
    assert min(lengths_accepted(stats)) > 0, lengths_accepted(stats)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untrained_drafter_does_not_change_the_output(family: str) -> None:
    target = tiny_target(family, seed=1)
    drafter = tiny_drafter(target, block_size=BLOCK, window=WINDOW)
    check(target, drafter, random_prompt(11, 64, seed=100), 0, teach=False)
