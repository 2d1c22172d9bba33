"""An autoregressive feature drafter: each pass turns (feature, next token) into the next feature, K passes a block.

One transformer layer over the pairs, as in EAGLE; committed positions bring fused taps, drafted ones the drafter's own
features, in training too, as in EAGLE-3. Source: Li et al., "EAGLE" (2024) and "EAGLE-3" (2025).
"""

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from flashmap_hf.conditioning import ContextEncoder
from flashmap_hf.evaluation.baselines.candidates import StepCandidates
from flashmap_hf.evaluation.baselines.configuration import BaselineConfig
from flashmap_hf.evaluation.baselines.modeling import BaselineDrafter, endpoint_projection, windows
from flashmap_hf.velocity import SlotLayer

KeyValues = tuple[torch.Tensor, torch.Tensor]  # [B, Hkv, T, head_dim] twice


class FeatureDrafter(BaselineDrafter):
    """`kind="eagle"`. A pair sees the W - 1 pairs before it: with its own feature, W committed positions."""

    def __init__(self, config: BaselineConfig):
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        assert config.tap_layers is not None  # filled by the config
        self.context_encoder = ContextEncoder(len(config.tap_layers), config.target_hidden_size, width, eps)
        self.token_norm = nn.RMSNorm(config.target_hidden_size, eps=eps)
        self.pair_proj = nn.Linear(width + config.target_hidden_size, width, bias=False)
        self.layer = SlotLayer(config)
        self.norm = nn.RMSNorm(width, eps=eps)
        self.endpoint_proj = endpoint_projection(config)
        self.post_init()

    def pair(self, features: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """`[B, T, H]` features and `[B, T, D]` embeddings of the tokens after them -> `[B, T, H]`."""
        return self.pair_proj(torch.cat([features, self.token_norm(embeds.to(self.dtype))], dim=-1))

    def keys_values(self, pairs: torch.Tensor, positions: torch.Tensor) -> KeyValues:  # [B, T, H], [B, T]
        return self.layer.attention.keys_values(self.layer.attention_norm(pairs), self.rotation(positions))

    def advance(
        self, pair: torch.Tensor, position: torch.Tensor, context: KeyValues, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The next feature. pair `[B, 1, H]`, position `[B, 1]`, mask `[B, T]` of the context -> `[B, 1, H]`."""
        if mask is not None:
            mask = nn.functional.pad(mask, (0, 1), value=True)[:, None, None, :]
        return self.norm(self.layer(pair, self.rotation(position), context, mask))

    def extended(self, context: KeyValues, pair: torch.Tensor, position: torch.Tensor) -> KeyValues:
        """The context with one more pair."""
        keys, values = self.keys_values(pair, position)
        return torch.cat([context[0], keys], dim=2), torch.cat([context[1], values], dim=2)

    def endpoints(
        self,
        taps: torch.Tensor,
        taps_mask: torch.Tensor,
        following: torch.Tensor,
        labels: torch.Tensor,
        embeddings: torch.Tensor,
    ) -> torch.Tensor:
        window, (runs, run, size) = self.config.window, labels.shape
        pairs = self.pair(self.context_encoder(taps.to(self.dtype)), embeddings[following])  # [S, W + A - 1, H]
        keys, values = self.keys_values(pairs, torch.arange(pairs.shape[1], device=taps.device)[None])
        context = windows(keys, window)[:, :, :-1], windows(values, window)[:, :, :-1]
        mask = taps_mask.unfold(1, window, 1)[..., :-1].flatten(0, 1)  # [S * A, W - 1]
        pair = pairs[:, window - 1 :].flatten(0, 1).unsqueeze(1)  # [S * A, 1, H]
        position = (window - 1 + torch.arange(run, device=taps.device).repeat(runs))[:, None]
        found = []
        for k in range(size):
            feature = self.advance(pair, position, context, mask)
            found.append(self.endpoint_proj(feature))
            if k + 1 < size:
                context = self.extended(context, pair, position)
                mask = nn.functional.pad(mask, (0, 1), value=True)
                pair = self.pair(feature, embeddings[labels[:, :, k].flatten()].unsqueeze(1))
                position = position + 1
        return torch.cat(found, dim=1)

    def candidates(
        self, target: PreTrainedModel, generation_config: GenerationConfig, logits_processor: LogitsProcessorList
    ) -> "FeatureCandidates":
        return FeatureCandidates(self, target, generation_config, logits_processor)

    def state_values(self, context: int) -> int:
        config = self.config
        kept = min(max(context - 1, 0), config.window - 1)  # the newest pair is kept as it is
        return 2 * config.num_key_value_heads * config.head_dim * kept + config.hidden_size


class FeatureCandidates(StepCandidates):
    """Keys and values of the last committed pairs are kept; those of drafted pairs last for a block."""

    drafter: FeatureDrafter

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.context: KeyValues | None = None  # [1, Hkv, <= W - 1, head_dim] twice
        self.newest = torch.empty(0)  # [1, 1, H], the pair of the newest feature and the anchor
        self.position = -1  # its place among the pairs that were observed
        # of the block in progress
        self.drafted: KeyValues = (torch.empty(0), torch.empty(0))
        self.pair = self.feature = torch.empty(0)  # [1, 1, H]

    def observe(self, taps: torch.Tensor, following: torch.Tensor) -> None:
        drafter, window = self.drafter, self.drafter.config.window
        pairs = drafter.pair(drafter.context_encoder(taps.to(drafter.dtype)), self.embed(following))
        older = pairs[:, :-1]
        if self.context is not None:
            older = torch.cat([self.newest, older], dim=1)  # its token is known now, and so was its feature
        start = self.position + pairs.shape[1] - older.shape[1]
        positions = torch.arange(start, start + older.shape[1], device=pairs.device)[None]
        keys, values = drafter.keys_values(older, positions)
        if self.context is not None:
            keys, values = torch.cat([self.context[0], keys], dim=2), torch.cat([self.context[1], values], dim=2)
        first = max(keys.shape[2] - (window - 1), 0)
        self.context = keys[:, :, first:].clone(), values[:, :, first:].clone()
        self.newest, self.position = pairs[:, -1:].clone(), self.position + pairs.shape[1]

    def step(self, k: int, token: torch.Tensor) -> torch.Tensor:
        drafter = self.drafter
        if k == 0:
            assert self.context is not None
            self.drafted, self.pair = self.context, self.newest
        else:
            before = torch.tensor([[self.position + k - 1]], device=drafter.device)
            self.drafted = drafter.extended(self.drafted, self.pair, before)
            self.pair = drafter.pair(self.feature, self.embed(token[None]))
        position = torch.tensor([[self.position + k]], device=drafter.device)
        self.feature = drafter.advance(self.pair, position, self.drafted)
        return drafter.head(drafter.endpoint_proj(self.feature), self.rows)[0, 0]
