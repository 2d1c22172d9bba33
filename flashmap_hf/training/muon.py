"""Muon in the weights' own precision: `torch.optim.Muon` orthogonalises in bfloat16, which some CPUs only emulate."""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

# Quintic Newton-Schulz coefficients of Muon (Jordan et al., 2024).
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Nearest semi-orthogonal matrices, approximately, by Newton-Schulz. `[N, rows, columns]`, any float dtype."""
    a, b, c = NS_COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix; an update is scaled by the root of rows / columns, at least by 1."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "ns_steps": ns_steps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update. Matrices of one shape are orthogonalised together."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for (rows, columns), params in by_shape.items():
                updates = []
                for p in params:
                    assert p.grad is not None  # chosen above
                    buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buffer, group["momentum"]))
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                for p, update in zip(params, orthogonalise(torch.stack(updates), group["ns_steps"]), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)
