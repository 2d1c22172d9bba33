"""Parallel independent heads: K residual blocks on the target's final hidden state, each with the shared unembedding.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024).
"""

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from flashmap_hf.evaluation.baselines.candidates import StepCandidates
from flashmap_hf.evaluation.baselines.configuration import BaselineConfig
from flashmap_hf.evaluation.baselines.modeling import BaselineDrafter


class ResidualHead(nn.Module):
    """`x + W_2 silu(W_1 x)`; W_2 starts at zero, so that a head starts as the target's own readout."""

    def __init__(self, size: int, inner: int):
        super().__init__()
        self.up = nn.Linear(size, inner)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., D] -> [..., D]
        return x + self.down(nn.functional.silu(self.up(x)))


class ParallelHeads(BaselineDrafter):
    """`kind="medusa"`. As published, the heads see the newest known hidden state, not the anchor that came of it."""

    def __init__(self, config: BaselineConfig):
        super().__init__(config)
        assert config.tap_layers is not None  # filled by the config
        if config.tap_layers[-1] != config.target_num_layers:
            raise ValueError(f"tap_layers={config.tap_layers}: the heads read the final hidden state, so tap it.")
        size = config.target_hidden_size
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.heads = nn.ModuleList([ResidualHead(size, config.intermediate_size) for _ in range(config.block_size)])
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ParallelHeads):
            heads: Any = module.heads
            for head in heads:
                nn.init.zeros_(head.down.weight)

    def positions(self, final: torch.Tensor) -> torch.Tensor:  # [B, D] -> [B, K, D]
        x = self.norm(final.to(self.dtype))
        return torch.stack([head(x) for head in self.heads], dim=1)

    def endpoints(
        self,
        taps: torch.Tensor,
        taps_mask: torch.Tensor,
        following: torch.Tensor,
        labels: torch.Tensor,
        embeddings: torch.Tensor,
    ) -> torch.Tensor:
        newest = taps[:, self.config.window - 1 :, -self.config.target_hidden_size :]
        return self.positions(newest.flatten(0, 1))

    def candidates(
        self, target: PreTrainedModel, generation_config: GenerationConfig, logits_processor: LogitsProcessorList
    ) -> "HeadCandidates":
        return HeadCandidates(self, target, generation_config, logits_processor)

    def state_values(self, context: int) -> int:
        return self.config.target_hidden_size if context else 0


class HeadCandidates(StepCandidates):
    """All heads speak at once; what is kept is the newest hidden state."""

    drafter: ParallelHeads

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.final = torch.empty(0)  # [1, D]

    def observed_layers(self) -> list[int]:
        return [self.drafter.config.target_num_layers]

    def observe(self, taps: torch.Tensor, following: torch.Tensor) -> None:
        self.final = taps[:, -1].clone()

    def step(self, k: int, token: torch.Tensor) -> torch.Tensor:
        if k == 0:
            self.logits = self.drafter.head(self.drafter.positions(self.final), self.rows)[0]
        return self.logits[k]
