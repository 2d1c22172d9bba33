"""The redirected product is the same product, inside the block and nowhere else."""

import threading

import pytest
import torch
from torch import nn

from flashmap_hf.skinny_linear import MAX_ROWS, SkinnyLinear, skinny_linear


@pytest.mark.parametrize("shape", [(1, 8), (2, 8), (1, 5, 8), (2, 3, 8), (7, 8), (0, 8)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 6, bias=bias).double()
    x = torch.randn(shape, dtype=torch.float64)
    expected = layer(x)
    with SkinnyLinear():
        torch.testing.assert_close(layer.float()(x.float()).double(), expected, rtol=1e-5, atol=1e-6)
        assert layer(x.float()).shape == expected.shape
        assert layer.double()(x).equal(expected)  # other dtypes are left alone


def products(layer: nn.Linear, x: torch.Tensor) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x)
    return [event.name for event in profile.events()]


def test_only_a_handful_of_rows_inside_the_block() -> None:
    layer = nn.Linear(8, 6, bias=False)
    with SkinnyLinear():
        assert "aten::linear" not in products(layer, torch.randn(1, MAX_ROWS, 8))
        assert "aten::linear" in products(layer, torch.randn(1, 1, 8))
        assert "aten::linear" in products(layer, torch.randn(1, MAX_ROWS + 1, 8))
        names: list[str] = []
        thread = threading.Thread(target=lambda: names.extend(products(layer, torch.randn(2, 8))))
        thread.start()
        thread.join()
        assert "aten::linear" in names  # another thread is not in the block
    assert "aten::linear" in products(layer, torch.randn(2, 8))


def test_the_rule_depends_on_dtype_and_processor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(8, 6)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert isinstance(skinny_linear(layer), SkinnyLinear)
    assert not isinstance(skinny_linear(nn.Linear(8, 6).bfloat16()), SkinnyLinear)
    assert not isinstance(skinny_linear(nn.Linear(8, 6, device="meta")), SkinnyLinear)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not isinstance(skinny_linear(layer), SkinnyLinear)
