"""The trainer for the drafters that FlashMap is compared with: the same batches, losses, optimisers and checkpoints."""

from typing import Any

import torch

from flashmap_hf.training.blocks import BlockBatch, Draws
from flashmap_hf.training.losses import LossSums, block_losses
from flashmap_hf.training.objective import BlockObjective
from flashmap_hf.training.rejection import LawObjective
from flashmap_hf.training.trainer import FlashMapTrainer


class BaselineObjective(LawObjective):
    """The losses of a `BaselineDrafter`, by the names that FlashMap's have.

    cross_entropy: at the endpoint. velocity: at s = 0 the velocity's error is that of the endpoint, here against the
    representation of the token or, of `eagle`, against the target's own final hidden state, of unit RMS: the feature.
    kl: against the target's law, at every block, since no noise is read.
    """

    def draft(self, batch: BlockBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Endpoints `[B, K, D]` and logits `[B, K, N]`, each given the true tokens before it."""
        drafter: Any = self.drafter
        endpoint = drafter.endpoints(batch.taps, batch.taps_mask, batch.following, batch.labels, self.embeddings)
        return endpoint, drafter.head(endpoint, self.rows)

    def forward(self, batch: BlockBatch, draws: Draws) -> LossSums:
        """Draft every block of the batch and compare with its labels; nothing is drawn."""
        config: Any = self.drafter.config
        labels, exists = batch.labels.flatten(0, 1), batch.labels_mask.flatten(0, 1)
        endpoint, logits = self.draft(batch)
        x_1 = self.representations[labels]
        if config.kind == "eagle":
            final = batch.final.unfold(1, config.block_size, 1).permute(0, 1, 3, 2).flatten(0, 1)
            x_1 = torch.nn.functional.rms_norm(final, final.shape[-1:], eps=config.rms_norm_eps)
        target_logits = open_noise = None
        if self.kl:
            law = torch.nn.functional.linear(batch.final, self.rows)
            target_logits = law.unfold(1, config.block_size, 1).permute(0, 1, 3, 2).flatten(0, 1)
            open_noise = torch.ones_like(exists[:, 0])
        start = torch.zeros_like(x_1)
        draft_labels = self.to_draft[labels].masked_fill(~exists, -100)
        return block_losses(
            logits, endpoint, start, start[:, 0, 0], start, x_1, draft_labels, exists, self.position_decay,
            target_logits, open_noise,
        )  # fmt: skip


class BaselineTrainer(FlashMapTrainer):
    """`FlashMapTrainer` for a `BaselineDrafter`."""

    def build_objective(self, drafter: Any, embeddings: torch.Tensor, unembedding: torch.Tensor) -> BlockObjective:
        return BaselineObjective(drafter, embeddings, unembedding, self.config.position_decay, self.config.kl > 0)

    @property
    def final_size(self) -> int:
        config: Any = self.drafter.config
        size: int = config.target_hidden_size
        return size if config.kind == "eagle" else super().final_size
