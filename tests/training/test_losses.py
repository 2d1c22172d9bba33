"""Losses against their formulas."""

import pytest
import torch

from flashmap_hf.training.losses import NAMES, block_losses


def test_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, target_logits = torch.randn(2, 2, 3, 7, generator=generator)
    endpoint, z_0, x_1 = torch.randn(3, 2, 3, 4, generator=generator)
    s = torch.tensor([0.0, 0.5])
    z = (1 - s.view(2, 1, 1)) * z_0 + s.view(2, 1, 1) * x_1
    labels = torch.tensor([[1, 2, -100], [0, -100, -100]])
    exists = torch.tensor([[True, True, True], [True, False, False]])
    open_noise = torch.tensor([True, False])
    result = block_losses(logits, endpoint, z, s, z_0, x_1, labels, exists, 0.5, target_logits, open_noise)
    sums, weights = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0.0)
    for b in range(2):
        for k in range(3):
            weight = 0.5**k
            log_q = logits[b, k].log_softmax(-1)
            if labels[b, k] >= 0:
                sums["cross_entropy"] -= weight * log_q[labels[b, k]].item()
                weights["cross_entropy"] += weight
            if exists[b, k]:
                error = (endpoint[b, k] - z[b, k]) / (1 - s[b]) - (x_1[b, k] - z_0[b, k])
                sums["velocity"] += weight * error.square().mean().item()
                weights["velocity"] += weight
                if open_noise[b]:
                    p = torch.distributions.Categorical(logits=target_logits[b, k])
                    q = torch.distributions.Categorical(logits=logits[b, k])
                    sums["kl"] += weight * torch.distributions.kl_divergence(p, q).item()
                    weights["kl"] += weight
    assert result.sums.tolist() == pytest.approx([sums[name] for name in NAMES], rel=1e-5)
    assert result.weights.tolist() == pytest.approx([weights[name] for name in NAMES], rel=1e-6)
    assert result.correct.tolist() == ((logits.argmax(-1) == labels) & exists).tolist()


def test_no_usable_label_is_zero_not_nan() -> None:
    zeros = torch.zeros(1, 2, 3)
    missing = torch.full((1, 2), -100)
    result = block_losses(zeros, zeros, zeros, torch.zeros(1), zeros, zeros, missing, missing > 0, 0.9)
    assert result.sums.tolist() == [0.0] * 3 and result.weights.tolist() == [0.0] * 3
