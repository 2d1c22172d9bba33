"""GPUs by name: how fast they multiply bfloat16, and how much they hold."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """tflops: dense bfloat16 products with float32 accumulation, in 10^12 FLOP/s, at its peak; gib: memory."""

    name: str
    tflops: float
    gib: float


# The makers' data sheets. They often give the doubled rate "with sparsity": here it is halved.
GPUS = (
    Gpu("RTX 3090", 71.0, 24),  # NVIDIA, Ampere GA102 architecture whitepaper, appendix A
    Gpu("RTX 4090", 165.2, 24),  # NVIDIA, Ada GPU architecture whitepaper, appendix A
    Gpu("RTX 5090", 209.5, 32),  # NVIDIA, RTX Blackwell GPU architecture whitepaper, appendix A
    Gpu("L4", 121.0, 24),  # NVIDIA L4 data sheet
    Gpu("L40S", 362.0, 48),  # NVIDIA L40S data sheet
    Gpu("A100 40GB", 312.0, 40),  # NVIDIA A100 data sheet
    Gpu("A100 80GB", 312.0, 80),  # the same
    Gpu("H100 PCIe", 756.0, 80),  # NVIDIA H100 data sheet
    Gpu("H100 SXM", 989.0, 80),  # the same
    Gpu("H200", 989.0, 141),  # NVIDIA H200 data sheet
    Gpu("MI300X", 1307.4, 192),  # AMD Instinct MI300X data sheet
)


def find(name: str) -> Gpu:
    """By its name, in any case, with or without spaces; raises ValueError that lists the names."""
    wanted = "".join(name.lower().split())
    for gpu in GPUS:
        if "".join(gpu.name.lower().split()) == wanted:
            return gpu
    known = ", ".join(gpu.name for gpu in GPUS)
    raise ValueError(f"--gpu {name!r}: choose one of {known}, or describe yours with --gpu-tflops and --gpu-gib.")
