"""Batches through the real `generate`: rows advance at their own speed, and each is what it would be alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import DRAFTER_SIZES, fixed, random_prompt, tiny_drafter, tiny_target
from table_model import RIGHT, K, N, V, enumerate_law, p_value, table_pair
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, TextStreamer

import flashmap_hf
from flashmap_hf import FlashMapConfig, FlashMapDrafter, FlashMapGenerationConfig
from flashmap_hf.modeling_flashmap import FlashMapOutput

FULL = ("llama", "qwen3", "phi", "gpt2", "mixtral", "qwen3_moe")
LENGTHS = (7, 3, 9, 1)
MODES = {"chain": {}, "tree": {"tree_size": 10}, "tree with n-grams": {"tree_size": 10, "draft_ngrams": True}}


def padded(count: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """`count` prompts of different lengths, padded on the left."""
    longest = max(LENGTHS[:count])
    rows = [random_prompt(n, 64, seed + i, padding=longest - n) for i, n in enumerate(LENGTHS[:count])]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


class RowOracle(FlashMapDrafter):
    """Knows the text of every row; finds row and place by the newest hidden state. Each block is right up to a random
    place, so rows fall apart at once."""

    def __init__(self, config: FlashMapConfig):
        super().__init__(config)
        self.random = torch.Generator().manual_seed(0)
        self.known: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def teach(self, target: Any, texts: torch.Tensor, mask: torch.Tensor) -> None:  # [B, T], [B, P]
        for text, real in zip(texts, mask, strict=True):
            text = text[len(real) - int(real.sum()) :]
            self.known.append((target(text[None], output_hidden_states=True).hidden_states[-1][0], text))

    def forward(self, taps: torch.Tensor, *args: Any, **kwargs: Any) -> FlashMapOutput:  # type: ignore[override]
        slots, size = self.config.block_size, self.head.size
        logits = torch.randn(len(taps), slots, size, generator=self.random)
        for i, row in enumerate(taps):
            newest = row[-1, -self.config.target_hidden_size :].float()
            distances = [(states.float() - newest).square().sum(-1) for states, _ in self.known]
            which = min(range(len(distances)), key=lambda j: float(distances[j].min()))
            place = int(distances[which].argmin())
            following = self.known[which][1][place + 2 : place + 2 + slots]
            right = int(torch.randint(slots + 1, (), generator=self.random))
            for slot, token in enumerate(following.tolist()[:right]):
                logits[i, slot, token] += 4.0
        return FlashMapOutput(logits=logits)


def oracle_of(target: Any, **overrides: Any) -> RowOracle:
    return fixed(RowOracle.from_target(target, **{**DRAFTER_SIZES, "block_size": 4, "window": 4, **overrides}))


def config(**options: Any) -> FlashMapGenerationConfig:
    return FlashMapGenerationConfig(**{"do_sample": False, "max_new_tokens": 20, "adaptive": False} | options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FULL)
def test_each_row_is_what_it_is_alone(family: str, mode: str) -> None:
    target = tiny_target(family)
    inputs = padded(4)
    alone = [
        target.generate(inputs["input_ids"][i : i + 1, -n:], do_sample=False, max_new_tokens=20)[0, n:].tolist()
        for i, n in enumerate(LENGTHS)
    ]
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20)
    oracle = oracle_of(target)
    oracle.teach(target, plain, inputs["attention_mask"])
    with flashmap_hf.record() as stats:
        found = target.generate(**inputs, generation_config=config(**MODES[mode]), assistant_model=oracle)
    assert found.tolist() == plain.tolist()
    assert found[:, inputs["input_ids"].shape[1] :].tolist() == alone
    assert stats.accepted > 20 and stats.target_steps < 80


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_end_on_their_own(mode: str, attention: str) -> None:
    """Each row has another end token in its text; what follows is padding, as in plain decoding."""
    target = tiny_target("llama", attn_implementation=attention)
    inputs = padded(4)
    start = inputs["input_ids"].shape[1]
    free = target.generate(**inputs, do_sample=False, max_new_tokens=20)
    ends = [int(free[i, start + 3 + 4 * i]) for i in range(4)]
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20, eos_token_id=ends, pad_token_id=0)
    oracle = oracle_of(target)
    oracle.teach(target, free, inputs["attention_mask"])
    options = config(eos_token_id=ends, pad_token_id=0, **MODES[mode])
    found = target.generate(**inputs, generation_config=options, assistant_model=oracle)
    assert found.tolist() == plain.tolist()
    assert len({row.index(0) if 0 in row else len(row) for row in found[:, start:].tolist()}) > 1


def test_holes_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a long answer the cache of a batch stays near its longest row."""
    target = tiny_target("llama")
    inputs = padded(4)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=150)
    oracle = oracle_of(target)
    oracle.teach(target, plain, inputs["attention_mask"])
    lengths: list[tuple[int, int]] = []
    pack = flashmap_hf.target_steps.TargetSteps._pack

    def spied(self: Any) -> None:
        pack(self)
        lengths.append((self.length, int(self.valid.sum(-1).max())))

    monkeypatch.setattr("flashmap_hf.target_steps.TargetSteps._pack", spied)
    found = target.generate(**inputs, generation_config=config(max_new_tokens=150), assistant_model=oracle)
    assert found.tolist() == plain.tolist()
    assert all(length <= 1.25 * longest + 16 for length, longest in lengths)
    assert any(length < before for (before, _), (length, _) in pairwise(lengths))


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_everything_that_generate_returns(mode: str) -> None:
    target = tiny_target("llama", attn_implementation="eager")
    inputs = padded(3)
    flags = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    options = {"return_dict_in_generate": True} | dict.fromkeys(flags, True)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12, **options)
    oracle = oracle_of(target)
    oracle.teach(target, plain.sequences, inputs["attention_mask"])
    ours = target.generate(
        **inputs, generation_config=config(max_new_tokens=12, **MODES[mode], **options), assistant_model=oracle
    )
    assert ours.sequences.tolist() == plain.sequences.tolist()
    real = inputs["attention_mask"].bool()
    for name in ("scores", "logits", "hidden_states", "attentions"):
        for step, (mine, theirs) in enumerate(zip(getattr(ours, name), getattr(plain, name), strict=True)):
            mine, theirs = ((x,) if isinstance(x, torch.Tensor) else x for x in (mine, theirs))
            for one, other in zip(mine, theirs, strict=True):
                assert one.shape == other.shape
                if step == 0 and name in ("hidden_states", "attentions"):  # what padding sees is nobody's business
                    where = real if name == "hidden_states" else real[:, None, :].expand(-1, one.shape[1], -1)
                    one, other = one[where], other[where]
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_num_return_sequences_samples_each_on_its_own() -> None:
    target = tiny_target("llama")
    inputs = padded(2)
    options = config(do_sample=True, top_k=0, num_return_sequences=3, seed=5)
    drafter = tiny_drafter(target, block_size=4, window=4)
    found = target.generate(**inputs, generation_config=options, assistant_model=drafter)
    again = target.generate(**inputs, generation_config=options, assistant_model=drafter)
    assert found.shape[0] == 6 and found.tolist() == again.tolist()
    assert len({tuple(row) for row in found.tolist()}) == 6


@pytest.mark.parametrize("rule", ["shared_noise", "one_hot"])
def test_a_row_draws_the_same_whatever_the_others_do(rule: str) -> None:
    target = tiny_target("llama")
    inputs = padded(2)
    options = config(do_sample=True, top_k=0, seed=5, verification=rule)
    drafter = tiny_drafter(target, block_size=4, window=4)
    both = target.generate(**inputs, generation_config=options, assistant_model=drafter)
    first = {name: value[:1] for name, value in inputs.items()}
    assert target.generate(**first, generation_config=options, assistant_model=drafter).tolist() == both[:1].tolist()


@pytest.mark.parametrize("options", [{}, {"num_drafts": 3}], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", ["shared_noise", "one_hot", "rejection"])
def test_law(rule: str, options: dict[str, Any]) -> None:
    """The first N tokens of many rows, which are decoded together and fall apart."""
    target, drafter = table_pair()
    prompt = torch.tensor([[1, 2]])
    law = enumerate_law(target, prompt, N, top_k=0)
    config = FlashMapGenerationConfig(
        verification=rule, do_sample=True, max_new_tokens=N + K, top_k=0, num_return_sequences=100, **options
    )
    counts = torch.zeros(1, V**N)
    powers = V ** torch.arange(N - 1, -1, -1)
    with flashmap_hf.record() as stats:
        for seed in range(6):
            torch.manual_seed(seed)
            mask = torch.ones_like(prompt)
            text = target.generate(prompt, attention_mask=mask, generation_config=config, assistant_model=drafter)
            counts[0] += torch.bincount((text[:, 2 : 2 + N] * powers).sum(-1), minlength=V**N)
    assert stats.accepted > 0
    assert p_value(counts, law) > RIGHT


def test_a_function_of_the_rows_number_is_told_it() -> None:
    target = tiny_target("llama")
    inputs = padded(3)

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return list(range(3 + row, 64, 3))

    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12, prefix_allowed_tokens_fn=allowed)
    found = target.generate(
        **inputs, generation_config=config(max_new_tokens=12), assistant_model=tiny_drafter(target, block_size=4),
        prefix_allowed_tokens_fn=allowed,
    )  # fmt: skip
    assert found.tolist() == plain.tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 5},
        {"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 1},
    ],
    ids=str,
)  # fmt: skip
def test_processors(settings: dict[str, Any]) -> None:
    target = tiny_target("llama")
    inputs = padded(3)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12, eos_token_id=5, **settings)
    oracle = oracle_of(target)
    oracle.teach(target, plain, inputs["attention_mask"])
    options = config(max_new_tokens=12, eos_token_id=5, tree_size=8, **settings)
    assert target.generate(**inputs, generation_config=options, assistant_model=oracle).tolist() == plain.tolist()


class Own(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        (
            "mistral",
            lambda t: {},
            "A batch of 2 rows cannot be drafted for: the cache of MistralForCausalLM has layers",
        ),
        ("llama", lambda t: {"logits_processor": LogitsProcessorList([Own()])}, "Own may keep state of a whole batch"),
        ("llama", lambda t: {"streamer": TextStreamer.__new__(Silent)}, "A streamer takes one sequence, not 2"),
        ("llama", lambda t: {"cache": filled(t)}, "A cache of an earlier turn cannot be combined with a batch"),
    ],
    ids=["sliding window", "own processor", "streamer", "cache"],
)
def test_what_takes_one_sequence_says_so_before_any_forward(family: str, extra: Any, message: str) -> None:
    target = tiny_target(family)
    arguments = extra(target)
    forwards: list[int] = []
    target.register_forward_hook(lambda *_: forwards.append(1))
    with pytest.raises(ValueError, match=message):
        target.generate(
            **padded(2), generation_config=config(), assistant_model=tiny_drafter(target, block_size=4), **arguments
        )
    assert not forwards


class Silent(TextStreamer):
    def put(self, value: torch.Tensor) -> None:
        pass


def filled(target: Any) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(torch.tensor([[3, 4], [5, 6]]), cache=cache)
    return cache
