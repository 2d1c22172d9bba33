"""The flow map: coupled prior, straight path, velocity <-> endpoint, one Euler step or the two-step midpoint.

Everything is a pure function of tensors. `z_0` is the prior, `x_1` the representation of the K tokens, `s` the time:
`z_s = (1 - s) z_0 + s x_1`, velocity `x_1 - z_0`.
"""

from collections.abc import Callable

import torch

# Phi^-1(u) is infinite at 0 and 1; greedy decoding is u = 0 exactly and must stay a finite point of the prior.
U_EPS = 1e-4

EndpointFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (z [B, K, D], s [B]) -> endpoint [B, K, D]


def quantile_prior(u: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Prior of the quantile coupling: coordinate Phi^-1(u_k) along a unit vector, free noise zero.

    Args:
        u: `[B, K]` in [0, 1), the uniform that picks each token from the target's sorted law; 0 is greedy.
        direction: `[D]` unit vector.

    Returns:
        `z_0`: `[B, K, D]`.
    """
    precise = torch.promote_types(direction.dtype, torch.float32)  # 1 - U_EPS is 1 in bfloat16
    z = torch.special.ndtri(u.clamp(U_EPS, 1 - U_EPS).to(precise))
    return z.to(direction.dtype).unsqueeze(-1) * direction


def interpolate(z_0: torch.Tensor, x_1: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Point `z_s` of the straight path. z_0, x_1: `[B, K, D]`; s: `[B]` in [0, 1]."""
    s = s.view(-1, 1, 1).to(z_0.dtype)
    return (1 - s) * z_0 + s * x_1


def velocity_from_endpoint(endpoint: torch.Tensor, z: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """`v = (x^ - z) / (1 - s)`. endpoint, z: `[B, K, D]`; s: `[B]` in [0, 1)."""
    return (endpoint - z) / (1 - s.view(-1, 1, 1).to(z.dtype))


def euler(endpoint_fn: EndpointFn, z_0: torch.Tensor) -> torch.Tensor:
    """One Euler step from s = 0. It lands on the endpoint itself: `z_0 + v = x^`. Returns `z_1` `[B, K, D]`."""
    return endpoint_fn(z_0, z_0.new_zeros(z_0.shape[0]))


def midpoint(endpoint_fn: EndpointFn, z_0: torch.Tensor) -> torch.Tensor:
    """Two-step midpoint: `z_mid = z_0 + v(z_0, 0) / 2`, `z_1 = z_0 + v(z_mid, 1/2)`. Returns `z_1` `[B, K, D]`."""
    start = z_0.new_zeros(z_0.shape[0])
    half = start + 0.5
    z_mid = z_0 + 0.5 * velocity_from_endpoint(endpoint_fn(z_0, start), z_0, start)
    return z_0 + velocity_from_endpoint(endpoint_fn(z_mid, half), z_mid, half)
