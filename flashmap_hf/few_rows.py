"""Products of few rows with a weight: on some CPUs `(W x^T)^T` is several times faster than torch's own `x W^T`.

A target step verifies a handful of rows, a drafter pass computes as many. There a product should cost what reading W
costs, and with some libraries on some processors only the transposed form does. Which form is faster is measured, once
per shape of a weight. Both are the same sums in another order, as the products of one row and of five already are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch
from torch import nn

SIZES = (1, 2, 4, 8, 16)  # rows at which the two forms are compared
MARGIN = 0.9  # the transposed form is used where it takes at most so much of the other's time
COLD = 10 * 2**20  # elements that a measurement reads: more than a cache holds
PIECE = 2**20  # elements of a larger weight that it multiplies at once
ROUNDS = 2
SMALL = 2**16  # elements of a weight that is left alone: its product costs next to nothing

# No state of a call: only what was measured, by shape, dtype and threads.
_KNOWN: dict[tuple[torch.Size, torch.dtype, int], frozenset[int]] = {}
_MEASURING = threading.Lock()


def transposed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b` as `(W x^T)^T + b`, contiguous. x: `[..., D]`; weight: `[N, D]`; bias: `[N]` -> `[..., N]`."""
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count == 1:
        rows = rows.repeat(2, 1)  # two equal rows take another, faster path than one
    # a strided result would slow down all that follows
    product = (weight @ rows.t())[:, :count].t().contiguous().view(*x.shape[:-1], len(weight))
    return product if bias is None else product + bias


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`, in the form that `faster_counts` found, where it has measured this shape."""
    if torch.compiler.is_compiling():  # inductor has products of its own
        return nn.functional.linear(x, weight, bias)
    count = x.numel() // x.shape[-1]
    if count <= SIZES[-1] and count in _KNOWN.get(_key(weight), ()):
        return transposed_product(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def faster_counts(weight: torch.Tensor) -> frozenset[int]:  # [N, D]
    """The numbers of rows for which the transposed form is faster; none off the CPU, in half precision, for a small
    weight or one that is no plain tensor. Measured at the first call for a shape, in a fraction of a second, and kept.
    """
    if not _is_plain(weight):
        return frozenset()
    key = _key(weight)
    if key not in _KNOWN:
        with _MEASURING:  # another thread's products would spoil the times
            if key not in _KNOWN:
                _KNOWN[key] = _measure(*weight.shape)
    return _KNOWN[key]


class FewRows:
    """The linear layers of one model in their faster form, for the forwards of a call.

    `applied()` gives layers a `forward` of their own for the time of one forward and takes it away again, also when
    that raises. Hooks, parameters and modules stay what they are. Another thread that uses the model meanwhile gets the
    same products. A model with compiled parts, or with forwards of its own (accelerate's), is left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.forwards: list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]] = []
        modules = list(model.modules())
        if any("forward" in vars(module) or module._compiled_call_impl is not None for module in modules):
            return
        for module in modules:
            if type(module) is nn.Linear and (counts := faster_counts(module.weight)):
                self.forwards.append((module, partial(_forward, module, counts)))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the layers are fast."""
        try:
            for layer, forward in self.forwards:
                vars(layer)["forward"] = forward
            yield
        finally:
            for layer, _ in self.forwards:
                vars(layer).pop("forward", None)  # another thread may have been here


def _forward(layer: nn.Linear, counts: frozenset[int], x: torch.Tensor) -> torch.Tensor:
    product = transposed_product if x.numel() // x.shape[-1] in counts else nn.functional.linear
    return product(x, layer.weight, layer.bias)


def _is_plain(weight: torch.Tensor) -> bool:
    # in bfloat16 without hardware for it torch multiplies row by row; with it, and on a GPU, the stock form is right
    return (
        type(weight) in (torch.Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and weight.numel() >= SMALL
    )


def _key(weight: torch.Tensor) -> tuple[torch.Size, torch.dtype, int]:
    return weight.shape, weight.dtype, torch.get_num_threads()


@torch.no_grad()
def _measure(size: int, width: int) -> frozenset[int]:
    """On weights that no cache holds, as those of a model: the other layers came in between."""
    rows = min(size, max(PIECE // width, 1))
    pieces = [torch.full((rows, width), 0.5) for _ in range(max(COLD // (rows * width), 1))]
    counts = {1} if _is_faster(pieces, 1) else set()
    for low, high in pairwise(SIZES[1:]):
        if not (_is_faster(pieces, high) and (low in counts or _is_faster(pieces, low))):
            break
        counts |= set(range(low, high + 1))
    return frozenset(counts)


def _is_faster(pieces: Sequence[torch.Tensor], count: int) -> bool:
    """By times of both forms, interleaved; the shorter of each counts, since other programs only ever add to it."""
    x = torch.linspace(-1, 1, count * pieces[0].shape[1]).reshape(count, -1)

    def seconds(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        start = time.perf_counter()
        for piece in pieces:
            product(x, piece)
        return time.perf_counter() - start

    times = [(seconds(nn.functional.linear), seconds(transposed_product)) for _ in range(ROUNDS)]
    stock, transposed = (min(column) for column in zip(*times, strict=True))
    return transposed <= MARGIN * stock
