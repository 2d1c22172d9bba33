"""A tiny target and answers that it wrote itself."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flashmap_hf.training.answers import Answer


@pytest.fixture(scope="session")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def answers(target: LlamaForCausalLM) -> list[Answer]:
    """Four greedy answers and four at temperature 1."""
    rows = []
    for i in range(8):
        torch.manual_seed(i)
        prompt = torch.randint(2, 40, (1, 3 + i))
        output = target.generate(prompt, max_new_tokens=12 + i, do_sample=i % 2 == 1, top_k=0)
        new = output[0, prompt.shape[1] :].tolist()
        rows.append(Answer(f"a{i}", float(i % 2), prompt[0].tolist(), new))
    return rows
