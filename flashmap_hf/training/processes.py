"""One process or several: accelerate's part of a run, and what the processes must agree on."""

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import broadcast, reduce

from flashmap_hf.devices import choose_dtype, default_device
from flashmap_hf.training.config import TrainConfig


def build_accelerator(config: TrainConfig, tracker: str | None) -> Accelerator:
    """As `accelerate launch` started the process; by itself it is the only one."""
    return Accelerator(
        cpu=default_device().type == "cpu",  # else several processes without a GPU would not find each other
        mixed_precision=precision(config),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True)],
        log_with=tracker,
        project_dir=str(config.out),
    )


def precision(config: TrainConfig) -> str:
    """The autocast of the run, as accelerate calls it; float16 would need its gradients scaled, Muon's too."""
    if config.precision != "auto":
        return config.precision
    return "bf16" if choose_dtype("auto", default_device()) == torch.bfloat16 else "no"


def agreed(accelerator: Accelerator, value: float) -> float:
    """The main process's value: clocks differ, and all must stop at the same step."""
    if accelerator.num_processes == 1:
        return value
    return float(broadcast(torch.tensor(value, dtype=torch.float64, device=accelerator.device)))


def whole(values: torch.Tensor) -> torch.Tensor:
    """The sum over all processes."""
    summed: torch.Tensor = reduce(values, reduction="sum")
    return summed
