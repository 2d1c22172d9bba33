"""The shape of a small drafter for the tiny target."""

from typing import Any

from transformers import LlamaForCausalLM

from flashmap_hf import FlashMapConfig, FlashMapDrafter

TAPS, K, W = [2, 4], 3, 4


def like(target: LlamaForCausalLM, **overrides: Any) -> FlashMapConfig:
    fields = {"tap_layers": TAPS, "window": W, "block_size": K, "num_hidden_layers": 2, "hidden_size": 64,
              "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip
    return FlashMapDrafter.from_target(target, **(fields | overrides)).config
