"""What the baselines have in common: they turn taps and tokens into the endpoints of K positions, and read them off.

The parts are FlashMap's own (context encoder, layers, head), so that only the way of drafting differs.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator

from flashmap_hf.evaluation.baselines.configuration import BaselineConfig
from flashmap_hf.head import DraftHead, unembedding_rows
from flashmap_hf.velocity import Rotation, rotation


class BaselineDrafter(PreTrainedModel, ABC):
    """A drafter bound to one target; subclasses hold the network."""

    config: BaselineConfig
    config_class = BaselineConfig
    base_model_prefix = "drafter"
    main_input_name = "taps"
    _supports_sdpa = True
    _no_split_modules = ["SlotLayer"]

    def __init__(self, config: BaselineConfig):
        super().__init__(config)
        self.head = DraftHead(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DraftHead):
            nn.init.ones_(module.readout_scale)

    @abstractmethod
    def endpoints(
        self,
        taps: torch.Tensor,
        taps_mask: torch.Tensor,
        following: torch.Tensor,
        labels: torch.Tensor,
        embeddings: torch.Tensor,
    ) -> torch.Tensor:
        """What the head reads at each position of the blocks of S runs of A anchors, earlier positions given.

        Args:
            taps: `[S, W + A - 1, N * D]`; the block of anchor j sees positions j..j+W-1.
            taps_mask: `[S, W + A - 1]`, False where a position does not exist.
            following: `[S, W + A - 1]`, the token after each of these positions; the last A are the anchors.
            labels: `[S, A, K]`, the tokens after each anchor; a drafter that does not draft in turn ignores them.
            embeddings: `[V, D]`, the target's input embeddings.

        Returns:
            `[S * A, K, D]`.
        """

    @abstractmethod
    def candidates(
        self, target: PreTrainedModel, generation_config: GenerationConfig, logits_processor: LogitsProcessorList
    ) -> CandidateGenerator:
        """The candidate generator of one `generate` call."""

    @abstractmethod
    def state_values(self, context: int) -> int:
        """How many numbers are kept per request after `context` tokens, from one pass to the next."""

    def rotation(self, positions: torch.Tensor) -> Rotation:  # [B, T]
        """What the attention of all layers turns by at these positions."""
        return rotation(positions, self.config.head_dim, self.config.rope_theta, self.dtype)

    def rows(self, target: PreTrainedModel) -> torch.Tensor:  # [N, D]
        """The target's unembedding rows of the draft vocabulary, on this drafter's device and in its dtype."""
        ids = self.head.ids if self.head.restricted else self.head.size
        output_embeddings: Any = target.get_output_embeddings()
        rows = unembedding_rows(output_embeddings, ids, self.config.target_hidden_size)
        return rows.to(device=self.device, dtype=self.dtype)


def endpoint_projection(config: BaselineConfig) -> nn.Module:
    """Width of the layers -> D, where they differ."""
    if config.hidden_size == config.target_hidden_size:
        return nn.Identity()
    return nn.Linear(config.hidden_size, config.target_hidden_size, bias=False)


def windows(x: torch.Tensor, window: int) -> torch.Tensor:  # [S, Hkv, W + A - 1, h] -> [S * A, Hkv, W, h]
    """What each anchor of a run sees."""
    return x.unfold(2, window, 1).permute(0, 2, 1, 4, 3).flatten(0, 1)
