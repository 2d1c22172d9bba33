"""Where to run and in which precision, where the user leaves it open."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_device() -> torch.device:
    """The accelerator, where there is one that works; else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has matrix instructions for bfloat16 (x86: AVX512-BF16 or AMX; Arm: BF16); else it emulates.

    An emulated product reads half the bytes but computes slowly: one token at a time may still gain, a block loses.
    """
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch cannot say
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type behind `name`; "auto": the fastest that `device` computes natively.

    Raises:
        ValueError: `name` is neither "auto" nor one of `DTYPES`.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {name!r}")
    if device.type == "cpu":
        return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16
