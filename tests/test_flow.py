"""The flow map in closed form: paths, velocities, Euler and midpoint against exact solutions."""

import pytest
import torch

from flashmap_hf.flow import U_EPS, euler, interpolate, midpoint, quantile_prior, velocity_from_endpoint


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_path_ends_and_velocity(generator: torch.Generator) -> None:
    z_0, x_1 = torch.randn(2, 4, 3, 5, generator=generator, dtype=torch.float64)
    assert torch.equal(interpolate(z_0, x_1, torch.zeros(4)), z_0)
    assert torch.equal(interpolate(z_0, x_1, torch.ones(4)), x_1)
    s = torch.rand(4, generator=generator, dtype=torch.float64) * 0.9
    z = interpolate(z_0, x_1, s)
    # the true endpoint gives the true velocity anywhere on the path
    torch.testing.assert_close(velocity_from_endpoint(x_1, z, s), x_1 - z_0)


def test_euler_from_zero_lands_on_the_endpoint(generator: torch.Generator) -> None:
    z_0, x_1 = torch.randn(2, 4, 3, 5, generator=generator)
    seen: list[float] = []

    def endpoint(z: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        seen.extend(s.tolist())
        return x_1

    assert torch.equal(euler(endpoint, z_0), x_1)
    assert seen == [0.0] * 4


def test_midpoint_solves_a_linear_field_to_second_order() -> None:
    # endpoint(z, s) = z + (1 - s) * a * z is the field dz/ds = a z, solved by z_0 exp(a)
    a = 0.1
    z_0 = torch.ones(1, 1, 1, dtype=torch.float64)

    def endpoint(z: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return z + (1 - s.view(-1, 1, 1)) * a * z

    exact = torch.tensor(a, dtype=torch.float64).exp()
    assert euler(endpoint, z_0).item() == pytest.approx(1 + a, abs=1e-12)
    assert midpoint(endpoint, z_0).item() == pytest.approx(1 + a + a * a / 2, abs=1e-12)
    assert abs(midpoint(endpoint, z_0) - exact) < abs(euler(endpoint, z_0) - exact) / 20


def test_quantile_prior_is_monotone_finite_and_on_the_line() -> None:
    direction = torch.nn.functional.normalize(torch.randn(8, generator=torch.Generator().manual_seed(1)), dim=0)
    u = torch.tensor([[0.0, 1e-6, 0.25, 0.5, 0.75, 1 - 1e-7]])
    z = quantile_prior(u, direction)
    assert z.shape == (1, 6, 8) and bool(z.isfinite().all())
    along = z @ direction
    torch.testing.assert_close(along.unsqueeze(-1) * direction, z)
    assert bool((along.diff() >= 0).all())
    assert along[0, 3].item() == pytest.approx(0.0, abs=1e-6)
    assert along[0, 0].item() == pytest.approx(torch.special.ndtri(torch.tensor(U_EPS)).item(), abs=1e-4)


def test_quantile_prior_is_gaussian_for_uniform_noise(generator: torch.Generator) -> None:
    u = torch.rand(20_000, 1, generator=generator)
    along = quantile_prior(u, torch.tensor([1.0])).flatten()
    assert abs(along.mean().item()) < 0.03 and abs(along.std().item() - 1) < 0.03
