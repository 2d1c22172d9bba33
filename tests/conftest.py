"""Shared by the tests: tiny random targets of every family, drafters for them, and an oracle that knows the target."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported

import pytest
import torch
from hypothesis import settings
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from flashmap_hf import FlashMapConfig, FlashMapDrafter, Statistics
from flashmap_hf.modeling_flashmap import FlashMapOutput
from flashmap_hf.training.answers import Answer

torch.set_num_threads(1)  # tiny matrices gain nothing from a second thread
settings.register_profile("flashmap", deadline=None)
settings.load_profile("flashmap")


@pytest.fixture(autouse=True)
def auto_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests compare token by token: on a CPU that multiplies bfloat16, "auto" would not be exact enough for that."""
    if hasattr(torch.cpu, "get_capabilities"):
        found = torch.cpu.get_capabilities() | dict.fromkeys(("avx512_bf16", "amx_bf16", "bf16"), False)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)


SIZES = {  # names of GPT-2 are translated by its config
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,  # the logits spread over several units: near-ties are as rare as in a trained model
    "tie_word_embeddings": False,  # tied random embeddings repeat the last token for ever
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 48}
GEMMA = {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
FAMILIES: dict[str, dict[str, Any]] = {  # name here -> model_type and what is its own
    "llama": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "mistral": {**GROUPED, "sliding_window": 8},
    "gemma2": GEMMA,  # every second layer slides
    "gemma3_text": {**GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi": {"intermediate_size": 48},
    "phi3": {**GROUPED, "sliding_window": 8},
    "gpt2": {},
    "mixtral": {**GROUPED, **EXPERTS, "num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {**GROUPED, **EXPERTS, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24},
}
DRAFTER_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def tiny_target(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Any:
    """A random model of `family` in eval mode; `overrides` are fields of its config. The global generator is kept."""
    fields = {**SIZES, **FAMILIES.get(family, {}), **overrides}
    implementation = fields.pop("attn_implementation", None)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    return model.eval()


def tiny_drafter(target: PreTrainedModel, seed: int = 0, **overrides: Any) -> FlashMapDrafter:
    """An untrained drafter for `target` in eval mode; `overrides` are fields of `FlashMapConfig`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return fixed(FlashMapDrafter.from_target(target, **{**DRAFTER_SIZES, **overrides}))


def fixed(drafter: Any) -> Any:
    """In eval mode, drafting a whole block at every step: what a tiny target's forwards cost says nothing."""
    drafter.generation_config.adaptive = False
    return drafter.eval()


class OracleDrafter(FlashMapDrafter):
    """Drafts the text it was taught, spoilt at a random place, so that 0, 1, ..., K tokens of a block are accepted.

    It finds its place in the text by the newest hidden state in its context: wrong context, no acceptance.
    """

    def __init__(self, config: FlashMapConfig):
        super().__init__(config)
        self.random = torch.Generator().manual_seed(0)
        self.states = self.text = torch.empty(0)

    @torch.no_grad()
    def teach(self, target: PreTrainedModel, text: torch.Tensor, padding: int = 0) -> None:  # [1, T]
        """`text` is what plain decoding made of a prompt with `padding` tokens on its left."""
        mask = torch.ones_like(text)
        mask[:, :padding] = 0
        inputs = {"input_ids": text, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        self.states = target(**inputs, output_hidden_states=True).hidden_states[-1][0, padding:]
        self.text = text[0, padding:]

    def forward(self, taps: torch.Tensor, *args: Any, **kwargs: Any) -> FlashMapOutput:  # type: ignore[override]
        slots, vocab_size = self.config.block_size, self.head.size
        newest = taps[0, -1, -self.config.target_hidden_size :]
        place = int((self.states.float() - newest.float()).square().sum(-1).argmin())
        draft = torch.zeros(slots, dtype=torch.long)
        following = self.text[place + 2 : place + 2 + slots]  # the anchor, at place + 1, is committed
        draft[: len(following)] = following
        right = int(torch.randint(slots + 1, (), generator=self.random))
        if right < slots:
            draft[right] = (draft[right] + 1) % vocab_size
        return FlashMapOutput(logits=10.0 * torch.nn.functional.one_hot(draft, vocab_size)[None].float())


def oracle_for(target: PreTrainedModel, **overrides: Any) -> OracleDrafter:
    """An oracle that fits `target`; teach it a text before use."""
    drafter = fixed(OracleDrafter.from_target(target, **{**DRAFTER_SIZES, **overrides}))
    assert isinstance(drafter, OracleDrafter)
    return drafter


def inputs_of(*tokens: int, padding: int = 0) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of one prompt, padded on the left."""
    ids = torch.tensor([[0] * padding + list(tokens)])
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def random_prompt(length: int, vocab_size: int, seed: int, padding: int = 0) -> dict[str, torch.Tensor]:
    """A prompt of `length` tokens that are neither padding nor other special ones."""
    generator = torch.Generator().manual_seed(seed)
    return inputs_of(*torch.randint(3, vocab_size, (length,), generator=generator).tolist(), padding=padding)


def lengths_accepted(stats: Statistics) -> list[int]:
    """How many blocks had exactly 0, 1, ..., K tokens accepted (a block cut short counts as what it kept)."""
    reached = [stats.drafted_by_position[0], *stats.accepted_by_position, 0]
    return [more - fewer for more, fewer in pairwise(reached)]


@torch.no_grad()
def difference(target: PreTrainedModel, expected: torch.Tensor, found: torch.Tensor, padding: int = 0) -> str:
    """For a failure message: the first position that differs, and the margin between the target's two best logits."""
    shorter = min(expected.shape[1], found.shape[1])
    unequal = (expected[0, :shorter] != found[0, :shorter]).nonzero()
    if not len(unequal):
        return f"lengths {expected.shape[1]} and {found.shape[1]}"
    place = int(unequal[0])
    prefix = expected[:, padding:place]
    best = target(prefix).logits[0, -1].float().topk(2)
    margin = float(best.values[0] - best.values[1])
    return f"position {place}: {int(expected[0, place])} became {int(found[0, place])}; margin {margin:.3g}"


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    """Every test starts from the same global generator, alone or in a suite."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_llama() -> Any:
    """A random Llama: tests must not change it."""
    return tiny_target("llama")


@pytest.fixture(scope="session")
def target() -> LlamaForCausalLM:
    """A tiny random target without an end token; the training tests learn its answers."""
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
