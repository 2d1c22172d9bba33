"""Held-out answers under rejection sampling, for drafters that have one law at each position; and the better rule."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from flashmap_hf.training.blocks import BlockBatch
from flashmap_hf.training.held_out import kept, walk_held_out
from flashmap_hf.training.objective import BlockObjective, shared_context
from flashmap_hf.training.sources import FeatureSource
from flashmap_hf.training.trainer import FlashMapTrainer

DRAFT_TEMPERATURES = (1.0, 0.85, 0.7, 0.55)  # that are tried


class LawObjective(BlockObjective, ABC):
    """A drafter whose blocks read no noise: what it drafts with is a law."""

    @abstractmethod
    def draft(self, batch: BlockBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Endpoints `[B, K, D]` and logits `[B, K, N]`, each given the true tokens before it."""


class HiddenNoiseObjective(LawObjective):
    """A FlashMap drafter as rejection sampling uses it, with its noise hidden: one law for each position.

    draft_temperature: as in `FlashMapGenerationConfig`.
    """

    draft_temperature = 1.0

    def draft(self, batch: BlockBatch) -> tuple[torch.Tensor, torch.Tensor]:
        drafter, config = self.drafter, self.drafter.config
        labels, anchors = batch.labels.flatten(0, 1), batch.anchors.flatten()
        context, mask = shared_context(drafter, batch, config.window)
        hidden = torch.full(labels.shape, torch.nan, device=labels.device)
        runs, run = batch.anchors.shape
        endpoint = drafter.endpoint(
            drafter.prior(hidden, None, *labels.shape), torch.zeros(len(labels), device=labels.device), hidden,
            self.embeddings[anchors], config.window + torch.arange(run, device=labels.device).repeat(runs), context,
            mask,
        )  # fmt: skip
        previous = torch.cat([anchors[:, None], labels[:, :-1]], dim=1)
        logits = drafter.head(endpoint, self.rows)
        logits = drafter.head.biased(logits, endpoint, drafter.head.draft_positions(previous))
        return endpoint, logits / self.draft_temperature


@kept.register
def rejection(objective: LawObjective, batch: BlockBatch, generator: torch.Generator) -> torch.Tensor:  # -> [A, K]
    """Greedy answers: equality. Sampled ones, where y has probability p and q of the drafter: kept with min(1, q / p).

    That is how often rejection sampling keeps its draft where y is what it emits: both happen with mass min(p, q), the
    second alone with p. So a walk over an answer that the target has drawn has the law of a sampled call.
    """
    logits = objective.draft(batch)[1].float()  # [A, K, N]
    labels = objective.to_draft[batch.labels[0]]
    if not bool(batch.sampled.any()):
        return logits.argmax(-1) == labels
    known = labels >= 0
    q = logits.softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    p = (batch.f_right - batch.f_left)[0]
    return known & (torch.rand(q.shape, generator=generator).to(q.device) * p < q)


def choose_rule(trainer: FlashMapTrainer, held_out: FeatureSource) -> dict[str, Any]:
    """Put what keeps most of held-out sampled answers into the drafter's generation config: rule, draft temperature.

    Call it with the averaged weights in place. Where nothing sampled is held out, or the noise is independent, the
    config stays as it is.

    Returns:
        what both rules keep, for `training.json`.
    """
    drafter, own = trainer.drafter, trainer.objective
    if drafter.config.coupling != "quantile":
        return {}
    shared = walk_held_out(own, held_out, trainer.config.seed)[True]
    if not shared.steps:
        return {}
    hidden = HiddenNoiseObjective(drafter, own.embeddings, own.unembedding, 1.0)
    walks = {}
    for heat in DRAFT_TEMPERATURES:
        hidden.draft_temperature = heat
        walks[heat] = walk_held_out(hidden, held_out, trainer.config.seed)[True]
    best = max(walks, key=lambda heat: walks[heat].tokens_per_step)
    config: Any = drafter.generation_config
    rejects = walks[best].tokens_per_step > shared.tokens_per_step
    config.verification = "rejection" if rejects else "auto"
    config.draft_temperature = best if rejects else None
    return {
        "verification": config.verification,
        "draft_temperature": config.draft_temperature,
        "rejection_tokens_per_step_sampled": walks[best].rate(),
        "rejection_joint_sampled": walks[best].shares(),
        "rejection_by_draft_temperature": {str(heat): walk.rate() for heat, walk in walks.items()},
        "shared_noise_tokens_per_step_sampled": shared.rate(),
    }
