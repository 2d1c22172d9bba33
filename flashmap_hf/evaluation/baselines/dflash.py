"""A factorised block drafter for transformers' own DFlash decoding: all K tokens in one pass, each for itself.

The network is FlashMap's without the noise: slots [anchor, mask, ..., mask], keys and values from the fused taps.
Source: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (2026).
"""

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.modeling_outputs import BaseModelOutputWithPast

from flashmap_hf.conditioning import ContextEncoder
from flashmap_hf.evaluation.baselines.configuration import BaselineConfig
from flashmap_hf.evaluation.baselines.modeling import BaselineDrafter, endpoint_projection, windows
from flashmap_hf.velocity import SlotLayer

KeyValues = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: keys and values [B, Hkv, W, head_dim]


class FactorisedDrafter(BaselineDrafter):
    """`kind="dflash"`."""

    def __init__(self, config: BaselineConfig):
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        assert config.tap_layers is not None  # filled by the config
        self.context_encoder = ContextEncoder(len(config.tap_layers), config.target_hidden_size, width, eps)
        self.slot_norm = nn.RMSNorm(config.target_hidden_size, eps=eps)
        self.slot_proj = nn.Linear(config.target_hidden_size, width, bias=False)
        self.slot_embedding = nn.Parameter(torch.zeros(config.block_size + 1, width))
        self.layers = nn.ModuleList([SlotLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(width, eps=eps)
        self.endpoint_proj = endpoint_projection(config)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, FactorisedDrafter):
            nn.init.normal_(module.slot_embedding, std=self.config.initializer_range)

    def context_keys_values(self, taps: torch.Tensor, positions: torch.Tensor) -> KeyValues:
        """Keys and values of committed positions, for every layer. taps: `[B, T, N * D]`; positions: `[B, T]`."""
        context = self.context_encoder(taps.to(self.dtype))
        layers: Any = self.layers
        by = self.rotation(positions)
        return [layer.attention.keys_values(context, by) for layer in layers]

    def slots(
        self, embeds: torch.Tensor, positions: torch.Tensor, context: KeyValues, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Endpoints of all slots. embeds `[B, K + 1, D]`, positions `[B, K + 1]`, mask `[B, W]` -> `[B, K + 1, D]`."""
        x = self.slot_proj(self.slot_norm(embeds.to(self.dtype))) + self.slot_embedding
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(x.shape[:2])], dim=1)[:, None, None, :]
        by = self.rotation(positions)
        for layer, keys_values in zip(self.layers, context, strict=True):
            x = layer(x, by, keys_values, mask)
        return self.endpoint_proj(self.norm(x))

    def endpoints(
        self,
        taps: torch.Tensor,
        taps_mask: torch.Tensor,
        following: torch.Tensor,
        labels: torch.Tensor,
        embeddings: torch.Tensor,
    ) -> torch.Tensor:
        config, window = self.config, self.config.window
        whole = self.context_keys_values(taps, torch.arange(taps.shape[1], device=taps.device)[None])
        context = [(windows(k, window), windows(v, window)) for k, v in whole]
        mask = taps_mask.unfold(1, window, 1).flatten(0, 1)
        anchors = following[:, window - 1 :].flatten()
        tokens = torch.full((len(anchors), config.block_size + 1), config.mask_token_id, device=anchors.device)
        tokens[:, 0] = anchors
        runs, run = labels.shape[:2]
        anchor_positions = window + torch.arange(run, device=taps.device).repeat(runs)
        positions = anchor_positions[:, None] + torch.arange(config.block_size + 1, device=taps.device)
        return self.slots(embeddings[tokens], positions, context, mask)[:, 1:]

    def candidates(
        self, target: PreTrainedModel, generation_config: GenerationConfig, logits_processor: LogitsProcessorList
    ) -> DFlashTokenCandidateGenerator:
        """Transformers' own generator, its readout restricted to the draft vocabulary."""
        inputs: Any = target.get_input_embeddings()
        readout: Any = Readout(self.rows(target), self.head.ids, self.config.vocab_size)
        processors = logits_processor if len(logits_processor) > 0 else None  # then it drafts all tokens at once
        return DFlashTokenCandidateGenerator(DFlashAssistant(self), inputs, readout, generation_config, processors)

    def state_values(self, context: int) -> int:
        config = self.config
        # of the cache's sliding layers: the window before a block, the block, and the slots until they are dropped
        kept = min(context, config.window + config.block_size) + config.block_size + 1
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * kept


class AssistantConfig(PreTrainedConfig):
    """What transformers' DFlash asks of an assistant: its `block_size` counts the anchor, its layers start at 0."""

    model_type = "flashmap-dflash-assistant"

    target_layer_ids: list[int] | None = None
    block_size: int = 6
    mask_token_id: int = 0
    vocab_size: int = 0
    num_hidden_layers: int = 1
    sliding_window: int | None = None
    layer_types: list[str] | None = None

    @classmethod
    def of(cls, config: BaselineConfig) -> "AssistantConfig":
        assert config.tap_layers is not None  # filled by the config
        return cls(
            target_layer_ids=[i - 1 for i in config.tap_layers],
            block_size=config.block_size + 1,
            mask_token_id=config.mask_token_id,
            vocab_size=config.vocab_size,
            num_hidden_layers=config.num_hidden_layers,
            sliding_window=config.window,
            layer_types=["sliding_attention"] * config.num_hidden_layers,
        )


class DFlashAssistant(PreTrainedModel):
    """A `FactorisedDrafter` behind the contract of `generate(..., assistant_model=, speculation_type="dflash")`.

    Where the drafter has no draft vocabulary, that call works as it stands.
    """

    config_class = AssistantConfig
    _supports_sdpa = True

    def __init__(self, drafter: FactorisedDrafter):
        super().__init__(AssistantConfig.of(drafter.config))
        self.drafter = drafter

    @torch.no_grad()
    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
    ) -> BaseModelOutputWithPast:
        """Draft one block.

        Args:
            noise_embeds: `[1, K + 1, D]`, the target's embeddings of the anchor and of K masks.
            context_hidden_states: `[1, n, N * D]`, taps of the positions committed since the last call.
            position_ids: `[1, n + K + 1]`.
            attention_mask: `[1, T + K + 1]`, 0 where the prompt is padding.
            cache: `DFlashCache` of the committed positions.

        Returns:
            `last_hidden_state` `[1, K + 1, D]`, to be multiplied by the target's unembedding.
        """
        drafter, slots = self.drafter, noise_embeds.shape[1]
        window = drafter.config.window
        new = drafter.context_keys_values(context_hidden_states, position_ids[:, :-slots])
        context: KeyValues = []
        for index, pair in enumerate(new):
            # the cache counts the slots, too, until the generator drops them: only their number matters
            padded = [nn.functional.pad(states, (0, 0, 0, slots)) for states in pair]
            keys, values = cache.update(*padded, index)
            context.append((keys[:, :, :-slots][:, :, -window:], values[:, :, :-slots][:, :, -window:]))
        mask = None
        if attention_mask is not None:
            mask = attention_mask[:, :-slots].bool()[:, -context[0][0].shape[2] :]
        endpoints = drafter.slots(noise_embeds, position_ids[:, -slots:], context, mask)
        return BaseModelOutputWithPast(last_hidden_state=endpoints * drafter.head.readout_scale, cache=cache)


class Readout(nn.Module):
    """The target's unembedding, minus infinity outside of the draft vocabulary."""

    def __init__(self, rows: torch.Tensor, ids: torch.Tensor, vocab_size: int):  # [N, D], [N]
        super().__init__()
        self.weight, self.ids, self.vocab_size = rows, ids, vocab_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [1, K, D] -> [1, K, V] float32
        logits = nn.functional.linear(x, self.weight).float()
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return whole.index_copy_(-1, self.ids, logits)
