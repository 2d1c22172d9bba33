"""Losses against their formulas."""

import pytest
import torch

from flashmap_hf.training.losses import block_loss


def test_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, generator=generator)
    endpoint, z_0, x_1 = torch.randn(3, 2, 3, 4, generator=generator)
    s = torch.tensor([0.0, 0.5])
    z = (1 - s.view(2, 1, 1)) * z_0 + s.view(2, 1, 1) * x_1
    labels = torch.tensor([[1, 2, -100], [0, -100, -100]])
    exists = torch.tensor([[True, True, True], [True, False, False]])
    result = block_loss(logits, endpoint, z, s, z_0, x_1, labels, exists, position_decay=0.5, velocity_weight=0.25)
    weighted, total = 0.0, 0.0
    velocity, there = 0.0, 0.0
    for b in range(2):
        for k in range(3):
            weight = 0.5**k
            if labels[b, k] >= 0:
                weighted -= weight * logits[b, k].log_softmax(-1)[labels[b, k]].item()
                total += weight
            if exists[b, k]:
                error = (endpoint[b, k] - z[b, k]) / (1 - s[b]) - (x_1[b, k] - z_0[b, k])
                velocity += weight * error.square().mean().item()
                there += weight
    assert result.cross_entropy.item() == pytest.approx(weighted / total, rel=1e-5)
    assert result.velocity.item() == pytest.approx(velocity / there, rel=1e-5)
    assert result.total.item() == pytest.approx(weighted / total + 0.25 * velocity / there, rel=1e-5)
    assert result.correct.tolist() == ((logits.argmax(-1) == labels) & exists).tolist()


def test_no_usable_label_is_zero_not_nan() -> None:
    zeros = torch.zeros(1, 2, 3)
    missing = torch.full((1, 2), -100)
    result = block_loss(zeros, zeros, zeros, torch.zeros(1), zeros, zeros, missing, missing > 0, 0.9, 1.0)
    assert result.total.item() == 0.0
