"""Which parameter is moved by what."""

from collections.abc import Sequence

import torch
from torch import nn

from flashmap_hf.devices import cpu_multiplies_bfloat16
from flashmap_hf.training.config import TrainConfig
from flashmap_hf.training.muon import Muon

LEAST_SIDE = 16  # narrower matrices have nothing to orthogonalise


def build_optimisers(
    parameters: Sequence[nn.Parameter], config: TrainConfig, device: torch.device
) -> dict[str, torch.optim.Optimizer]:
    """`muon` for the matrices, where the config asks for it, and `adam` for the rest (matrices decay there, too).

    `torch.optim.Muon` orthogonalises in bfloat16; where that is emulated, our own does the same in the weights' dtype.
    """
    matrices = [p for p in parameters if p.ndim == 2]
    others = [p for p in parameters if p.ndim != 2]
    optimisers: dict[str, torch.optim.Optimizer] = {}
    wide = [p for p in matrices if min(p.shape) >= LEAST_SIDE]
    if config.optimiser == "muon" and config.lora is None and wide:  # the factors of an adapter are too narrow
        matrices = [p for p in matrices if min(p.shape) < LEAST_SIDE]
        emulated = device.type == "cpu" and not cpu_multiplies_bfloat16()
        optimisers["muon"] = (Muon if emulated else torch.optim.Muon)(
            wide, lr=config.muon_lr, weight_decay=config.weight_decay, momentum=0.95, ns_steps=config.ns_steps
        )
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    optimisers["adam"] = torch.optim.AdamW(groups, lr=config.adam_lr, betas=(0.9, 0.95), fused=True)
    return optimisers
