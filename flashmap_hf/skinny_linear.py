"""Linear layers on a handful of rows, the shape of verification, made fast on CPUs without AVX-512.

There the float32 product `x W^T` of 2 to 6 rows runs at a fraction of the memory bandwidth, and costs up to twice one
row; `(W x^T)^T` is the same product at the price of one row (`python -m flashmap_hf.evaluation.step_cost` measures it).
Nothing of the model is touched: a torch function mode redirects `linear` inside a `with` block, in this thread only.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

MIN_ROWS, MAX_ROWS = 2, 6


class SkinnyLinear(TorchFunctionMode):
    """Inside the block `linear` of 2 to 6 float32 rows on the CPU is computed as `(W x^T)^T`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is nn.functional.linear and not kwargs and len(args) in (2, 3):
            x, weight = args[0], args[1]
            rows = x.numel() // x.shape[-1]
            if (
                MIN_ROWS <= rows <= MAX_ROWS
                and x.dtype == weight.dtype == torch.float32
                and weight.device.type == "cpu"
            ):
                product = torch.mm(weight, x.reshape(rows, -1).t()).t()
                if len(args) == 3 and args[2] is not None:
                    product = product + args[2]
                return product.reshape(*x.shape[:-1], -1)
        return func(*args, **(kwargs or {}))


def skinny_linear(model: nn.Module) -> AbstractContextManager[Any]:
    """The mode where it pays for this model, else a block that does nothing.

    The choice is a rule, not a timing: another kernel rounds differently, and a call must repeat its output.
    """
    parameter = next(model.parameters())
    pays = (
        parameter.device.type == "cpu"
        and parameter.dtype == torch.float32
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
        and torch.backends.mkl.is_available()
    )
    return SkinnyLinear() if pays else nullcontext()
