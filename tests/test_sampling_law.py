"""Sampling with a drafter through the real `generate` keeps the target's law: chi-square against exact enumeration.

The targets depend on their last two tokens only. So one long call holds thousands of samples: every window of N tokens
is a draw from the law that follows the two tokens before it, and windows fall on blocks in every alignment.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import tiny_drafter, tiny_target
from table_model import RIGHT, WRONG, K, N, V, check_law, enumerate_law, long_run, p_value, table_pair
from transformers import GenerationMixin

import flashmap_hf
from flashmap_hf import FlashMapDrafter, FlashMapGenerationConfig, Statistics
from flashmap_hf.candidates import Draft, FlashMapCandidateGenerator
from flashmap_hf.verification import NodeVerdict, draw

TOKENS = 2400
PLAIN = {"top_k": 0}  # the default of generate is 50
FILTERS = {"temperature": 0.7, "top_k": 4, "top_p": 0.9}


def mistral_pair(**overrides: Any) -> tuple[Any, FlashMapDrafter]:
    """A real target (one layer, sliding window of two tokens: the window passes inside every block) and drafter."""
    target = tiny_target(
        "mistral", vocab_size=V, num_hidden_layers=1, sliding_window=2, max_position_embeddings=2**16,
        pad_token_id=None,
        bos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    return target, tiny_drafter(target, block_size=K, window=3, initializer_range=0.5, **overrides)


MODES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # rule, drafter, options of generate
    "shared noise": ("shared_noise", {}, PLAIN),
    "rejection": ("rejection", {}, PLAIN),
    "one-hot": ("one_hot", {}, PLAIN),
    "shared noise, filters": ("shared_noise", {}, FILTERS),
    "rejection, filters": ("rejection", {}, FILTERS),
    "one-hot, filters": ("one_hot", {}, FILTERS),
    "rejection, independent": ("rejection", {"coupling": "independent"}, PLAIN),
    "one-hot, independent": ("one_hot", {"coupling": "independent"}, PLAIN),
    "shared noise, stops early": ("shared_noise", {}, {**PLAIN, "assistant_confidence_threshold": 0.4}),
    "rejection, stops early": ("rejection", {}, {**PLAIN, "assistant_confidence_threshold": 0.25}),
    "rejection, short blocks": ("rejection", {}, {**PLAIN, "num_assistant_tokens": 2}),
    "shared noise, short blocks": ("shared_noise", {}, {**PLAIN, "num_assistant_tokens": 2}),
    "rejection, transition": ("rejection", {"transition_rank": 3}, PLAIN),
    "rejection, transition, stops early": (
        "rejection",
        {"transition_rank": 3},
        {**FILTERS, "assistant_confidence_threshold": 0.3},
    ),
    "rejection, sharper drafts": ("rejection", {"transition_rank": 3}, {**FILTERS, "draft_temperature": 0.5}),
    "rejection, flatter drafts": ("rejection", {}, {**PLAIN, "draft_temperature": 3.0}),
    "rejection, min-p": ("rejection", {}, {**PLAIN, "min_p": 0.15, "temperature": 1.3}),
}


@pytest.mark.parametrize("mode", MODES)
def test_law_of_a_table(mode: str) -> None:
    rule, overrides, options = MODES[mode]
    check_law(*long_run(*table_pair(**overrides), seed=1, tokens=TOKENS, rule=rule, **options))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_law_of_a_table_with_many_samples(mode: str) -> None:
    rule, overrides, options = MODES[mode]
    check_law(*long_run(*table_pair(**overrides), seed=2, tokens=15_000, rule=rule, **options))


@pytest.mark.parametrize("rule", ["shared_noise", "rejection", "one_hot"])
def test_law_of_a_real_model(rule: str) -> None:
    check_law(*long_run(*mistral_pair(), seed=3, tokens=1000, rule=rule, **PLAIN))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "coupling"), [("shared_noise", "quantile"), ("one_hot", "quantile"),
                                                ("rejection", "quantile"), ("rejection", "independent")])  # fmt: skip
def test_law_of_a_real_model_with_many_samples(rule: str, coupling: str) -> None:
    check_law(*long_run(*mistral_pair(coupling=coupling), seed=4, tokens=8000, rule=rule, **FILTERS))


@pytest.mark.parametrize(
    ("coupling", "options"), [("quantile", {}), ("independent", {}), ("independent", {"draft_temperature": 0.5})]
)
def test_law_of_the_stock_loop_with_our_candidates(
    coupling: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows no shared noise: a drafter with the quantile coupling is verified there as one-hot."""
    stock: Any = GenerationMixin._assisted_decoding.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", stock)
    p, _ = long_run(*table_pair(coupling=coupling), seed=10, tokens=TOKENS, rule="auto", **PLAIN, **options)
    assert p > RIGHT, p


def test_drafts_that_are_sharper_than_the_law_they_are_said_to_be_drawn_from_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = FlashMapCandidateGenerator.drawn
    monkeypatch.setattr(FlashMapCandidateGenerator, "drawn", lambda self, laws: drawn(self, laws**2))
    p, _ = long_run(*table_pair(), seed=11, tokens=TOKENS, rule="rejection", **PLAIN)
    assert p < WRONG, p


def short_calls(rule: str, seed: int, calls: int, **options: Any) -> tuple[float, Statistics]:
    """p-value of the first N tokens of many calls, for laws that depend on the whole text."""
    target, drafter = table_pair()
    prompt = torch.tensor([[1, 2]])
    law = enumerate_law(target, prompt, N, **{k: v for k, v in options.items() if "assistant" not in k})
    config = FlashMapGenerationConfig(verification=rule, do_sample=True, max_new_tokens=N + 2, **options)
    powers = V ** torch.arange(N - 1, -1, -1)
    counts = torch.zeros(1, V**N)
    torch.manual_seed(seed)
    with flashmap_hf.record() as stats:
        for _ in range(calls):
            text = target.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=config, assistant_model=drafter
            )
            counts[0, (text[0, 2 : 2 + N] * powers).sum()] += 1
    return p_value(counts, law), stats


REPETITION = {**PLAIN, "repetition_penalty": 1.8}  # the law of a token depends on all before it
PENALISED = {
    "shared noise": ("shared_noise", REPETITION),
    "rejection": ("rejection", REPETITION),
    "one-hot": ("one_hot", REPETITION),
    "rejection, stops early": ("rejection", {**REPETITION, "assistant_confidence_threshold": 0.3}),
}


@pytest.mark.parametrize("mode", ["shared noise", "rejection, stops early"])
def test_law_with_a_repetition_penalty(mode: str) -> None:
    rule, options = PENALISED[mode]
    check_law(*short_calls(rule, seed=5, calls=500, **options))


@pytest.mark.slow
@pytest.mark.parametrize("mode", PENALISED)
def test_law_with_a_repetition_penalty_and_many_samples(mode: str) -> None:
    rule, options = PENALISED[mode]
    check_law(*short_calls(rule, seed=6, calls=4000, **options))


# The harness can fail: each of these rules is wrong, and each looks innocent.


def accept_backwards(tokens: torch.Tensor, q: torch.Tensor, logits: torch.Tensor, generator: Any) -> NodeVerdict:
    """Accepts with min(1, q/p)."""
    p, token = logits.softmax(-1), tokens[0]
    if torch.rand(()) * p[token] < q[0, token]:
        return NodeVerdict(torch.tensor(0), token)
    return NodeVerdict(torch.tensor(-1), draw(p, torch.rand((), dtype=torch.float64)))


def test_a_wrong_accept_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmap_hf.emission.verify_children", accept_backwards)
    p, _ = long_run(*table_pair(), seed=7, tokens=TOKENS, rule="rejection", **PLAIN)
    assert p < WRONG, p


def test_noise_drawn_again_after_a_refusal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    noise_of = FlashMapCandidateGenerator.noise_of

    def redraw(self: FlashMapCandidateGenerator, u: torch.Tensor) -> torch.Tensor | None:
        u.copy_(torch.rand_like(u))  # the loop's own numbers: u is a view of them
        return noise_of(self, u)

    monkeypatch.setattr(FlashMapCandidateGenerator, "noise_of", redraw)
    p, _ = long_run(*table_pair(), seed=8, tokens=6000, rule="shared_noise", **PLAIN)
    assert p < WRONG, p


def test_a_block_that_stops_at_an_unlikely_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    read = FlashMapCandidateGenerator.read

    def drop_unlikely(self: FlashMapCandidateGenerator, input_ids: torch.Tensor, output: Any, size: int) -> Draft:
        block = read(self, input_ids, output, size)
        if block.probs is None:  # no room for a block
            return block
        likely = block.probs.gather(1, block.tokens[:, None])[:, 0] > 0.3
        size = int(likely.cumprod(0).sum())
        return Draft.of_chain(block.tokens[:size], block.probs[:size])

    monkeypatch.setattr(FlashMapCandidateGenerator, "read", drop_unlikely)
    p, _ = long_run(*table_pair(), seed=9, tokens=TOKENS, rule="rejection", **PLAIN)
    assert p < WRONG, p
