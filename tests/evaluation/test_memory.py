"""Bytes are those of the tensors that really lie there."""

import pytest
import torch
from conftest import tiny_drafter, tiny_target
from transformers import DynamicCache

from flashmap_hf.evaluation import memory
from flashmap_hf.evaluation.methods import early_exit, plain


def stored(cache: DynamicCache) -> int:
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_is_as_large_as_the_real_one(family, dtype):
    target = tiny_target(family, dtype)
    cache = target(torch.ones(1, 23, dtype=torch.long), use_cache=True).cache
    assert memory.cache_bytes(target.config, 23, dtype) == stored(cache)


def test_a_drafter_keeps_its_window_at_any_context():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, window=8, tap_layers=[1, 3])
    footprint = memory.of_drafter(drafter, target, 1)
    assert footprint.state_bytes(512) == footprint.state_bytes(4096) == 8 * 2 * 32 * 4
    assert footprint.state_bytes(3) == 3 * 2 * 32 * 4
    assert footprint.parameters == sum(p.numel() for p in drafter.parameters())
    assert footprint.weight_bytes == 4 * footprint.parameters + sum(
        b.numel() * b.element_size() for b in drafter.buffers()
    )
    assert footprint.latent_bytes == 5 * 32 * 4
    assert footprint.readout_bytes == 0  # the target's own rows, not a copy
    assert footprint.read_bytes == footprint.weight_bytes + 64 * 32 * 4
    twice = memory.of_drafter(drafter, target, 2)
    assert twice.read_bytes - footprint.read_bytes == footprint.weight_bytes


def test_a_draft_vocabulary_copies_its_rows_and_a_low_rank_head_reads_none():
    target = tiny_target("llama")
    assert memory.of_drafter(tiny_drafter(target, draft_vocab_size=16), target, 1).readout_bytes == 16 * 32 * 4
    low = memory.of_drafter(tiny_drafter(target, head="low_rank", head_rank=4), target, 1)
    assert low.readout_bytes == 0 and low.read_bytes == low.weight_bytes


def test_early_exit_has_a_cache_and_no_weights():
    target = tiny_target("llama")
    footprint = early_exit(target, 2).footprint
    assert footprint.weight_bytes == footprint.parameters == 0 and footprint.per_token
    assert footprint.state_bytes(30) * 3 == memory.cache_bytes(target.config, 30, torch.float32) * 2
    assert 0 < footprint.read_bytes < memory.tensor_bytes(target)
    with pytest.raises(ValueError, match="early_exit=3: must be below the target's 3 layers"):
        early_exit(target, 3)


def test_plain_decoding_asks_for_nothing():
    numbers = plain(tiny_target("llama")).to_dict()
    assert numbers["state_bytes"] == [{"context": 512, "bytes": 0}, {"context": 4096, "bytes": 0}]
    assert (numbers["parameters"], numbers["weight_bytes"], numbers["latent_bytes"]) == (0, 0, None)
