"""Block losses: endpoint cross-entropy with position weights, and the flow-matching velocity loss."""

from dataclasses import dataclass

import torch
from torch import nn

from flashmap_hf.flow import velocity_from_endpoint


@dataclass(frozen=True)
class BlockLoss:
    """total, cross_entropy, velocity: scalars; correct `[B, K]`: top draft token = label."""

    total: torch.Tensor
    cross_entropy: torch.Tensor
    velocity: torch.Tensor
    correct: torch.Tensor


def block_loss(
    logits: torch.Tensor,  # [B, K, N]
    endpoint: torch.Tensor,  # [B, K, D]
    z: torch.Tensor,  # [B, K, D], the point of the path at s
    s: torch.Tensor,  # [B]
    z_0: torch.Tensor,  # [B, K, D]
    x_1: torch.Tensor,  # [B, K, D]
    labels: torch.Tensor,  # [B, K] in the draft vocabulary, -100 where outside of it or missing
    exists: torch.Tensor,  # [B, K] a token is there
    position_decay: float,
    velocity_weight: float,
) -> BlockLoss:
    """Position k weighs `position_decay ** (k - 1)`. The velocity loss is the mean of |v - (x_1 - z_0)|^2 / D."""
    weights = position_decay ** torch.arange(labels.shape[1], device=labels.device, dtype=logits.dtype)
    usable = weights * (labels >= 0)
    entropies = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    cross_entropy = (entropies * usable).sum() / usable.sum().clamp_min(1)
    there = weights * exists
    errors = (velocity_from_endpoint(endpoint, z, s) - (x_1 - z_0)).square().mean(-1)
    velocity = (errors * there).sum() / there.sum().clamp_min(1)
    correct = (logits.argmax(-1) == labels) & exists
    return BlockLoss(cross_entropy + velocity_weight * velocity, cross_entropy, velocity, correct)
