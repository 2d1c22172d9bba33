"""Where to run and in which precision."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flashmap_hf.devices import choose_dtype, cpu_multiplies_bfloat16, default_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CPUINFO = Path("/proc/cpuinfo")


@pytest.fixture(autouse=True)
def auto_is_float32() -> None:
    """Not here."""


@pytest.mark.parametrize(
    ("capabilities", "native"),
    [
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False, "amx_tile": True}, False),
        ({"avx2": True, "avx512_bf16": True}, True),
        ({"avx2": True, "amx_bf16": True, "avx512_bf16": False}, True),
        ({"neon": True, "bf16": True}, True),
        ({"neon": True, "bf16": False}, False),
        ({}, False),
    ],
)
def test_auto_takes_bfloat16_on_a_cpu_that_has_the_instructions(monkeypatch, capabilities, native):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert cpu_multiplies_bfloat16() is native
    assert choose_dtype("auto", CPU) is (torch.bfloat16 if native else torch.float32)


def test_a_torch_that_cannot_say_means_float32(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert choose_dtype("auto", CPU) is torch.float32


@pytest.mark.parametrize("cpuinfo", [path for path in [CPUINFO] if path.exists()])
def test_this_cpu_is_read_as_the_kernel_reads_it(cpuinfo):
    flags = set(cpuinfo.read_text().split())
    assert cpu_multiplies_bfloat16() == bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_takes_bfloat16_where_it_does_not_emulate_it(monkeypatch, native):
    asked: dict[str, Any] = {}

    def is_bf16_supported(**kwargs: Any) -> bool:
        asked.update(kwargs)
        return native

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert choose_dtype("auto", CUDA) is (torch.bfloat16 if native else torch.float16)
    assert asked == {"including_emulation": False}


def test_another_accelerator_takes_float16():
    assert choose_dtype("auto", torch.device("mps")) is torch.float16


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_named_type_is_taken_as_it_is(name):
    assert choose_dtype(name, CPU) is choose_dtype(name, CUDA) is getattr(torch, name)


@pytest.mark.parametrize("name", ["int8", "fp32", "", "load", "float64"])
def test_an_unknown_type_is_refused(name):
    with pytest.raises(ValueError, match=r"dtype must be one of auto, float32, bfloat16, float16, not '"):
        choose_dtype(name, CPU)


def test_the_accelerator_comes_first(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: CUDA)
    assert default_device() == CUDA
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert default_device() == CPU
