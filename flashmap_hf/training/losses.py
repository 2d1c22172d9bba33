"""Block losses as sums and weights, so that the parts of a batch on several processes add up to the whole's."""

from dataclasses import dataclass

import torch

from flashmap_hf.flow import velocity_from_endpoint

NAMES = ("cross_entropy", "velocity", "kl")


@dataclass(frozen=True)
class LossSums:
    """sums, weights `[3]` in the order of `NAMES`: a loss is its sum / its weight. correct `[B, K]`: top = label."""

    sums: torch.Tensor
    weights: torch.Tensor
    correct: torch.Tensor


def block_losses(
    logits: torch.Tensor,  # [B, K, N]
    endpoint: torch.Tensor,  # [B, K, D]
    z: torch.Tensor,  # [B, K, D], the point of the path at s
    s: torch.Tensor,  # [B]
    z_0: torch.Tensor,  # [B, K, D]
    x_1: torch.Tensor,  # [B, K, D]
    labels: torch.Tensor,  # [B, K] in the draft vocabulary, -100 where outside of it or missing
    exists: torch.Tensor,  # [B, K] a token is there
    position_decay: float,
    target_logits: torch.Tensor | None = None,  # [B, K, N], the target's own over the draft vocabulary
    open_noise: torch.Tensor | None = None,  # [B] the block is greedy or its noise is hidden
) -> LossSums:
    """Position k weighs `position_decay ** (k - 1)`.

    cross_entropy: at the endpoint. velocity: the mean over D of |v - (x_1 - z_0)|^2 (flow matching). kl: KL(p || q),
    both over the draft vocabulary, on the blocks of `open_noise`: with its noise known, a token is no longer random.
    """
    positions = position_decay ** torch.arange(labels.shape[1], device=labels.device, dtype=torch.float32)
    usable, there = positions * (labels >= 0), positions * exists
    log_q = logits.float().log_softmax(-1)  # once, for two losses
    entropies = -log_q.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    errors = (velocity_from_endpoint(endpoint.float(), z, s) - (x_1 - z_0)).square().mean(-1)
    zero = entropies.new_zeros(())
    kl, kl_weight = zero, zero
    if target_logits is not None and open_noise is not None:
        compared = there * open_noise[:, None]
        log_p = target_logits.float().log_softmax(-1)
        divergence = torch.linalg.vecdot(log_p.exp(), log_p - log_q)
        kl, kl_weight = (divergence * compared).sum(), compared.sum()
    sums = torch.stack([(entropies * usable).sum(), (errors * there).sum(), kl])
    weights = torch.stack([usable.sum(), there.sum(), kl_weight])
    return LossSums(sums, weights, (logits.argmax(-1) == labels) & exists)
