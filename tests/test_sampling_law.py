"""Sampling with a drafter through the real `generate` keeps the target's law: chi-square against exact enumeration.

The targets depend on their last two tokens only. So one long call holds thousands of samples: every window of N tokens
is a draw from the law that follows the two tokens before it, and windows fall on blocks in every alignment.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import DRAFTER_SIZES, lengths_accepted, tiny_drafter, tiny_target
from scipy.stats import chi2
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import flashmap_hf
from flashmap_hf import FlashMapConfig, FlashMapDrafter, FlashMapGenerationConfig, Statistics
from flashmap_hf.candidates import Draft, FlashMapCandidateGenerator
from flashmap_hf.modeling_flashmap import FlashMapOutput
from flashmap_hf.verification import Verdict, draw, quantile_token

V, K, N = 5, 3, 3  # vocabulary, block size, tokens of a window
RIGHT, WRONG = 1e-4, 1e-6  # p-values: a right rule stays above the first, a wrong one falls below the second
TOKENS = 2400
PLAIN = {"top_k": 0}  # the default of generate is 50
FILTERS = {"temperature": 0.7, "top_k": 4, "top_p": 0.9}


class TableConfig(PreTrainedConfig):
    model_type = "table"
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = V, V, 1, 1
    max_position_embeddings = 2**16


class TableModel(PreTrainedModel, GenerationMixin):
    """A target that costs nothing: logits are a table of the last two tokens, and the first of them is read back from
    the key-value cache, so a cache that is rolled back by one token too few or too many changes the law."""

    config_class = TableConfig

    def __init__(self, config: TableConfig, spread: float = 1.0):
        super().__init__(config)
        generator = torch.Generator().manual_seed(1)
        self.table = torch.nn.Parameter(spread * torch.randn(V, V, V, generator=generator))
        self.embedding = torch.nn.Embedding.from_pretrained(torch.eye(V))
        self.unembedding = torch.nn.Linear(V, V, bias=False)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.unembedding

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, cache: Any = None, logits_to_keep: int = 0, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        stored, _ = cache.update(input_ids[:, None, :, None].float(), input_ids[:, None, :, None].float(), 0)
        tokens = F.pad(stored[:, 0, :, 0].long(), (1, 0))
        fed = input_ids.shape[1]
        logits = self.table[tokens[:, -fed - 1 : -1], tokens[:, -fed:]]
        state = self.embedding(input_ids)
        return CausalLMOutputWithPast(logits=logits[:, -logits_to_keep:], cache=cache, hidden_states=(state, state))


class TableDrafter(FlashMapDrafter):
    """Knows the target's table roughly and walks along it. What it says in a slot depends on the noise of the next one,
    as attention among the slots may have it: whether a token is accepted tells about the noise behind it."""

    def __init__(self, config: FlashMapConfig):
        super().__init__(config)
        generator = torch.Generator().manual_seed(2)
        self.table = torch.nn.Parameter(0.4 * torch.randn(V, V, V, generator=generator))

    def forward(  # type: ignore[override]
        self,
        taps: torch.Tensor,
        anchor_embeds: torch.Tensor,
        u: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> FlashMapOutput:
        before, token = taps[0, -1, -V:].argmax(), anchor_embeds[0].argmax()
        slots = []
        for k in range(K):
            logits = self.table[before, token]
            if noise is not None:
                logits = logits + 0.7 * noise[0, k]
            if u is not None:
                trust = 20.0 * torch.cos(torch.pi * u[0, (k + 1) % K])
                logits = logits + trust * F.one_hot(quantile_token(logits, u[0, k]), V)
            before, token = token, logits.argmax()
            slots.append(logits)
        logits = torch.stack(slots)[None]
        return FlashMapOutput(z_1=logits, logits=logits)  # D = V


def table_pair(**overrides: Any) -> tuple[TableModel, TableDrafter]:
    target = TableModel(TableConfig()).eval()
    drafter = TableDrafter.from_target(target, **{**DRAFTER_SIZES, "block_size": K, "window": 2, **overrides}).eval()
    with torch.no_grad():
        drafter.table += target.table
        if drafter.head.transition is not None:
            torch.nn.init.normal_(
                drafter.head.transition.readout.weight, std=0.5, generator=torch.Generator().manual_seed(3)
            )
    return target, drafter


def mistral_pair(**overrides: Any) -> tuple[Any, FlashMapDrafter]:
    """A real target (one layer, sliding window of two tokens: the window passes inside every block) and drafter."""
    target = tiny_target(
        "mistral", vocab_size=V, num_hidden_layers=1, sliding_window=2, max_position_embeddings=2**16,
        pad_token_id=None,
        bos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    return target, tiny_drafter(target, block_size=K, window=3, initializer_range=0.5, **overrides)


@torch.no_grad()
def enumerate_law(target: Any, prompts: torch.Tensor, n: int, **options: Any) -> torch.Tensor:  # [S, P] -> [S, V^n]
    """Probability of each continuation of n tokens, from the scores of plain `generate` after every prefix."""
    law = torch.ones(len(prompts), 1, dtype=torch.float64)
    prefixes = prompts
    for _ in range(n):
        step = target.generate(
            prefixes, attention_mask=torch.ones_like(prefixes), do_sample=True, max_new_tokens=1,
            return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
        p = step.scores[0].double().softmax(-1)
        law = (law.reshape(-1, 1) * p).reshape(len(prompts), -1)
        prefixes = torch.cat([prefixes.repeat_interleave(V, 0), torch.arange(V).repeat(len(prefixes))[:, None]], 1)
    return law


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:  # [S, C], [S, C]
    """Chi-square of counts given each row's total; within a row, cells are pooled until they expect 5."""
    assert not counts[law == 0].any(), "a token of probability zero was emitted"
    statistic, freedom = 0.0, 0
    for row, p in zip(counts, law, strict=True):
        expected, order = (row.sum() * p).sort(descending=True)
        pools = [[0.0, 0.0]]
        for e, o in zip(expected.tolist(), row[order].tolist(), strict=True):
            if pools[-1][0] >= 5:
                pools.append([0.0, 0.0])
            pools[-1][0] += e
            pools[-1][1] += o
        if len(pools) > 1 and pools[-1][0] < 5:
            e, o = pools.pop()
            pools[-1][0] += e
            pools[-1][1] += o
        if len(pools) > 1:
            statistic += sum((o - e) ** 2 / e for e, o in pools)
            freedom += len(pools) - 1
    assert freedom > 20, "too few samples to say anything"
    return float(chi2.sf(statistic, freedom))


def long_run(
    target: Any, drafter: FlashMapDrafter, seed: int, tokens: int, rule: str, **options: Any
) -> tuple[float, Statistics]:
    """p-value of all windows of one long call."""
    states = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    law = enumerate_law(target, states, N, **{k: v for k, v in options.items() if "assistant" not in k})
    torch.manual_seed(seed)
    config = FlashMapGenerationConfig(verification=rule, do_sample=True, max_new_tokens=tokens, **options)
    prompt = torch.tensor([[1, 2]])
    with flashmap_hf.record() as stats:
        text = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=config, assistant_model=drafter
        )[0]
    powers = V ** torch.arange(N - 1, -1, -1)
    starts = torch.arange(0, len(text) - 2 - N + 1, N)
    state = text[starts] * V + text[starts + 1]
    window = sum(text[starts + 2 + i] * powers[i] for i in range(N))
    counts = torch.zeros(V * V, V**N).index_put_((state, window), torch.ones(len(starts)), accumulate=True)
    return p_value(counts, law), stats


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
    "rejection, min-p": ("rejection", {}, {**PLAIN, "min_p": 0.15, "temperature": 1.3}),
}


def check_law(p: float, stats: Statistics) -> None:
    assert min(lengths_accepted(stats)) > 0, lengths_accepted(stats)
    assert p > RIGHT, p


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


@pytest.mark.parametrize("coupling", ["quantile", "independent"])
def test_law_of_the_stock_loop_with_our_candidates(coupling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no shared noise: a drafter with the quantile coupling is verified there as one-hot."""
    stock: Any = GenerationMixin._assisted_decoding.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", stock)
    p, _ = long_run(*table_pair(coupling=coupling), seed=10, tokens=TOKENS, rule="auto", **PLAIN)
    assert p > RIGHT, p


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


def accept_backwards(tokens: torch.Tensor, q: torch.Tensor, logits: torch.Tensor) -> Verdict:
    """Accepts with min(1, q/p)."""
    p = logits.softmax(-1)
    at = tokens[:, None]
    u = torch.rand(len(tokens))
    accepted = int((u * p[:-1].gather(1, at)[:, 0] < q.gather(1, at)[:, 0]).cumprod(0).sum())
    return Verdict(torch.tensor(accepted), draw(p[accepted], torch.rand((), dtype=torch.float64)))


def test_a_wrong_accept_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmap_hf.decoding.verify_rejection", accept_backwards)
    p, _ = long_run(*table_pair(), seed=7, tokens=TOKENS, rule="rejection", **PLAIN)
    assert p < WRONG, p


def test_noise_drawn_again_after_a_refusal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = FlashMapCandidateGenerator.draft

    def redraw(self: FlashMapCandidateGenerator, input_ids: torch.Tensor, u: torch.Tensor) -> Draft:
        u.copy_(torch.rand_like(u))  # the loop's own numbers: u is a view of them
        return draft(self, input_ids, u)

    monkeypatch.setattr(FlashMapCandidateGenerator, "draft", redraw)
    p, _ = long_run(*table_pair(), seed=8, tokens=6000, rule="shared_noise", **PLAIN)
    assert p < WRONG, p


def test_a_block_that_stops_at_an_unlikely_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = FlashMapCandidateGenerator.draft

    def drop_unlikely(self: FlashMapCandidateGenerator, input_ids: torch.Tensor, u: torch.Tensor | None) -> Draft:
        block = draft(self, input_ids, u)
        if block.probs is None:  # no room for a block
            return block
        likely = block.probs.gather(1, block.tokens[:, None])[:, 0] > 0.3
        size = int(likely.cumprod(0).sum())
        return Draft(block.tokens[:size], block.probs[:size])

    monkeypatch.setattr(FlashMapCandidateGenerator, "draft", drop_unlikely)
    p, _ = long_run(*table_pair(), seed=9, tokens=TOKENS, rule="rejection", **PLAIN)
    assert p < WRONG, p
