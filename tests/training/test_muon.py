"""Newton-Schulz against the singular value decomposition, the update against a plain loop."""

import pytest
import torch

from flashmap_hf.training.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(2, 16, 16), (1, 40, 16), (3, 16, 40)])
def test_singular_values_come_near_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    result = orthogonalise(matrices, 8)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6 and values.max() < 1.3
    # same singular vectors: the nearest semi-orthogonal matrix is U V^T
    assert torch.nn.functional.cosine_similarity(result.flatten(1), (u @ vh).flatten(1)).min() > 0.97


def test_step_equals_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(6, 4, generator=generator)) for _ in range(2)]
    plain = [p.detach().clone() for p in parameters]
    buffers = [torch.zeros(6, 4) for _ in parameters]
    optimiser = Muon(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, ns_steps=5)
    for _ in range(3):
        for i, p in enumerate(parameters):
            p.grad = torch.randn(6, 4, generator=generator)
            buffers[i] = 0.9 * buffers[i] + 0.1 * p.grad
            update = orthogonalise((0.1 * p.grad + 0.9 * buffers[i])[None], 5)[0]
            plain[i] = plain[i] * (1 - 0.1 * 0.01) - 0.1 * (6 / 4) ** 0.5 * update
        optimiser.step()
    for p, expected in zip(parameters, plain, strict=True):
        torch.testing.assert_close(p.detach(), expected)
