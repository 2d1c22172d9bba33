"""A target and a drafter that cost nothing, whose laws can be enumerated; and the chi-square test of a long call."""

from __future__ import annotations

from typing import Any

import torch
from conftest import DRAFTER_SIZES, fixed, lengths_accepted
from scipy.stats import chi2
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import flashmap_hf
from flashmap_hf import FlashMapConfig, FlashMapDrafter, FlashMapGenerationConfig, Statistics
from flashmap_hf.modeling_flashmap import FlashMapOutput
from flashmap_hf.verification import quantile_token

V, K, N = 5, 3, 3  # vocabulary, block size, tokens of a window
RIGHT, WRONG = 1e-4, 1e-6  # p-values: a right rule stays above the first, a wrong one falls below the second


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
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        stored, _ = cache.update(input_ids[:, None, :, None].float(), input_ids[:, None, :, None].float(), 0)
        tokens = F.pad(stored[:, 0, :, 0].long(), (1, 0))
        fed = input_ids.shape[1]
        before = torch.arange(tokens.shape[1] - fed - 1, tokens.shape[1] - 1).expand(len(tokens), -1)
        if attention_mask is not None and attention_mask.dim() == 4:  # the newest key that it sees beside its own
            seen = (attention_mask[:, 0] if attention_mask.dtype == torch.bool else attention_mask[:, 0] == 0).int()
            older = seen * (torch.arange(seen.shape[-1]) < before[..., None])
            before = (older * torch.arange(1, seen.shape[-1] + 1)).amax(-1)
        logits = self.table[tokens.gather(1, before), tokens[:, -fed:]]
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
        rows = []
        for i in range(len(taps)):
            before, token = taps[i, -1, -V:].argmax(), anchor_embeds[i].argmax()
            slots = []
            for k in range(K):
                logits = self.table[before, token]
                if noise is not None:
                    logits = logits + 0.7 * noise[i, k]
                if u is not None:
                    trust = 20.0 * torch.cos(torch.pi * u[i, (k + 1) % K])
                    logits = logits + trust * F.one_hot(quantile_token(logits, u[i, k]), V)
                before, token = token, logits.argmax()
                slots.append(logits)
            rows.append(torch.stack(slots))
        logits = torch.stack(rows)
        return FlashMapOutput(z_1=logits, logits=logits)  # D = V


def table_pair(**overrides: Any) -> tuple[TableModel, TableDrafter]:
    target = TableModel(TableConfig()).eval()
    drafter = fixed(TableDrafter.from_target(target, **{**DRAFTER_SIZES, "block_size": K, "window": 2, **overrides}))
    with torch.no_grad():
        drafter.table += target.table
        if drafter.head.transition is not None:
            torch.nn.init.normal_(
                drafter.head.transition.readout.weight, std=0.5, generator=torch.Generator().manual_seed(3)
            )
    return target, drafter


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


SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # what changes the law


def long_run(
    target: Any, drafter: FlashMapDrafter, seed: int, tokens: int, rule: str, **options: Any
) -> tuple[float, Statistics]:
    """p-value of all windows of one long call."""
    states = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    law = enumerate_law(target, states, N, **{k: v for k, v in options.items() if k in SAMPLING})
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


def check_law(p: float, stats: Statistics) -> None:
    # up to a block's length; an n-gram is longer, and rarely right to its end
    assert min(lengths_accepted(stats)[: K + 1]) > 0, lengths_accepted(stats)
    assert p > RIGHT, p
