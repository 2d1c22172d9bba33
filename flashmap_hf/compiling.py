"""A drafter whose forward is compiled, in shapes that never change; the drafter behind what `torch.compile` wraps."""

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from flashmap_hf.modeling_flashmap import FlashMapDrafter, FlashMapOutput

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # of torch.compile
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # they record CUDA graphs, where there is CUDA


def compile(
    drafter: Any, *, batch_size: int = 1, mode: str = "default", backend: str | Callable[..., Any] = "inductor"
) -> FlashMapDrafter:
    """The same drafter with a compiled forward, for `assistant_model=` and `decoder(...)`; for generation only.

    It shares weights, config and generation config with `drafter`, which stays as it is. Contexts shorter than the
    window are padded to it, and batches to the next power of two, so that nothing is compiled again as they grow. What
    is needed for `batch_size` rows or fewer is compiled now, which takes a minute; more when it is first needed (at
    most 8 variants in all: torch runs the others as they are, and says so). The readout stays outside: it is one matrix
    product, and its matrix belongs to the target.

    Args:
        drafter: a `FlashMapDrafter`, or one that peft has wrapped, where it is to run and in its final dtype.
        batch_size: rows of the calls to come.
        mode: of `torch.compile`. "reduce-overhead" records CUDA graphs; they belong to the thread that calls this,
            and a call from another one drafts without them, with a warning.
        backend: of `torch.compile`.

    Raises:
        ValueError: no drafter, one that is compiled already or has no weights, or an argument that is not possible.
        OSError: nothing can be compiled here (no C++ compiler, no Triton); says what is missing.
    """
    found = as_drafter(drafter)
    if found is None:
        raise ValueError(
            f"compile needs a FlashMapDrafter, got {type(drafter).__name__}: FlashMapDrafter.from_pretrained."
        )
    if isinstance(vars(found).get("forward"), StaticForward):
        raise ValueError("This drafter is compiled already: give it to generate as it is.")
    if found.device.type == "meta":
        raise ValueError("The drafter's weights are on the meta device (not loaded, or offloaded): load it whole.")
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: must be a positive integer.")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: choose one of {', '.join(MODES)}.")
    if mode == "reduce-overhead" and found.device.type != "cuda":
        raise ValueError(f"mode={mode!r} records CUDA graphs, and the drafter is on {found.device}: leave mode out.")
    graphs = mode in GRAPH_MODES and found.device.type == "cuda"
    run = torch.compile(before_readout(found), dynamic=False, mode=mode, backend=backend)
    forward = StaticForward(found, run, threading.get_ident() if graphs else None)
    for bits in range((batch_size - 1).bit_length() + 1):
        for _ in range(3 if graphs else 1):  # CUDA graphs: warm up, record, replay
            forward.rehearse(2**bits)
    return _with_forward(found, forward)


def as_drafter(assistant_model: Any) -> FlashMapDrafter | None:
    """The drafter behind `assistant_model`, which peft or torch may have wrapped; None for any other assistant.

    `torch.compile(drafter)` keeps its backend and options, and gets the static shapes of `compile`.
    """
    if isinstance(assistant_model, FlashMapDrafter):
        return assistant_model
    inner = getattr(assistant_model, "_orig_mod", None)  # of torch's OptimizedModule; its class is slow to import
    if inner is not None:
        return _of_optimized(assistant_model, inner)
    base = getattr(assistant_model, "get_base_model", None)
    inner = base() if callable(base) else None
    return inner if isinstance(inner, FlashMapDrafter) else None


# One drafter for each module that torch.compile made: what is measured and compiled for it is found again.
_OPTIMIZED: WeakKeyDictionary[nn.Module, FlashMapDrafter] = WeakKeyDictionary()


def _of_optimized(module: Any, inner: nn.Module) -> FlashMapDrafter | None:
    drafter = as_drafter(inner)
    if drafter is None or isinstance(vars(drafter).get("forward"), StaticForward):
        return drafter
    if module not in _OPTIMIZED:
        _OPTIMIZED[module] = _with_forward(drafter, StaticForward(drafter, module.dynamo_ctx(before_readout(drafter))))
    return _OPTIMIZED[module]


Partial = Callable[..., tuple[torch.Tensor | None, torch.Tensor | None]]  # -> z_1 [B, K, D]; logits [B, K, N] or None


def before_readout(drafter: FlashMapDrafter) -> Partial:
    """What is compiled: the forward up to the readout, and over it where the head is the drafter's own."""

    def partial(**inputs: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        head = drafter.head
        if head.low_rank:
            output = drafter.forward(**inputs)
            return output.z_1, output.logits
        no_rows = head.readout_scale.new_empty(0, len(head.readout_scale))
        return drafter.forward(**inputs, rows=no_rows).z_1, None

    partial.__code__ = partial.__code__.replace()  # torch counts variants per code object: each drafter has its own
    return partial


def _with_forward(drafter: FlashMapDrafter, forward: "StaticForward") -> FlashMapDrafter:
    """A copy that shares everything with `drafter` but the forward."""
    other = copy.copy(drafter)
    other.forward = forward  # type: ignore[method-assign]
    other._compiled_call_impl = None  # `drafter.compile()` left one that is bound to `drafter`
    return other


class StaticForward:
    """`FlashMapDrafter.forward` in front of a compiled one, which sees one shape per power of two of the batch.

    Args:
        drafter: whose forward it is.
        run: what `before_readout` makes, compiled.
        thread: the only one in which `run` may be called; None: any.
    """

    def __init__(self, drafter: FlashMapDrafter, run: Partial, thread: int | None = None):
        self.drafter, self.run, self.thread = drafter, run, thread

    def __deepcopy__(self, memo: dict[int, Any]) -> "StaticForward":
        raise TypeError("A compiled drafter cannot be copied: copy the drafter that it was made of, and compile that.")

    def rehearse(self, batch: int) -> None:
        """One pass over nothing, which compiles what a batch of that size needs.

        Raises:
            OSError: it cannot be compiled.
        """
        config, device, dtype = self.drafter.config, self.drafter.device, self.drafter.dtype
        width = config.target_hidden_size
        taps = torch.zeros(batch, config.window, len(config.tap_layers or []) * width, device=device, dtype=dtype)
        noise = None
        if config.coupling == "independent":
            noise = torch.zeros(batch, config.block_size, width, device=device)
        steps: int | None = getattr(self.drafter.generation_config, "num_steps", None)
        self._padded_pass(taps, torch.zeros(batch, width, device=device, dtype=dtype), None, noise, None, steps)

    @torch.no_grad()
    def __call__(
        self,
        taps: torch.Tensor,  # [B, W, N * D]
        anchor_embeds: torch.Tensor,  # [B, D]
        rows: torch.Tensor | None = None,  # [N, D]
        u: torch.Tensor | None = None,  # [B, K]
        noise: torch.Tensor | None = None,  # [B, K, D]
        mask: torch.Tensor | None = None,  # [B, W]
        num_steps: int | None = None,
    ) -> FlashMapOutput:
        """As `FlashMapDrafter.forward`.

        Raises:
            OSError: a variant that is needed for the first time cannot be compiled.
        """
        # copies: the next replay of a CUDA graph overwrites what this one returned
        z_1, logits = (
            None if x is None else x[: len(taps)].clone()
            for x in self._padded_pass(taps, anchor_embeds, u, noise, mask, num_steps)
        )
        return FlashMapOutput(z_1=z_1, logits=self.drafter.head(z_1, rows) if logits is None else logits)

    @torch.no_grad()
    def _padded_pass(
        self,
        taps: torch.Tensor,
        anchor_embeds: torch.Tensor,
        u: torch.Tensor | None,
        noise: torch.Tensor | None,
        mask: torch.Tensor | None,
        num_steps: int | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The pass over padded inputs, up to the readout."""
        drafter, config, dtype = self.drafter, self.drafter.config, self.drafter.dtype
        batch, window = taps.shape[:2]
        more, older = (1 << (batch - 1).bit_length()) - batch, max(config.window - window, 0)

        def padded(x: torch.Tensor, left: int = 0) -> torch.Tensor:  # [B, T, ...] -> [B + more, left + T, ...]
            if not (more or left):
                return x.contiguous()
            return nn.functional.pad(x, (*(0, 0) * (x.dim() - 2), left, 0, 0, more))

        if mask is None:
            mask = torch.ones(batch, window, dtype=torch.bool, device=taps.device)
        if config.coupling == "independent":
            u = None
        elif u is None:  # NaN hides the noise, entry by entry
            u = torch.full((batch, config.block_size), torch.nan, device=taps.device)
        run = self.run
        if self.thread not in (None, threading.get_ident()):
            warnings.warn(
                "The drafter's CUDA graphs belong to the thread that compiled it: this one drafts without them "
                "(compile it in this thread, or leave mode out).",
                stacklevel=2,
            )
            run = before_readout(drafter)
        try:
            return run(
                taps=padded(taps.to(dtype), older), anchor_embeds=padded(anchor_embeds.to(dtype)),
                u=None if u is None else padded(u.float()), noise=None if noise is None else padded(noise.to(dtype)),
                mask=padded(mask, older), num_steps=num_steps or config.num_steps,
            )  # fmt: skip
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = str(getattr(error, "inner_exception", error)).strip().partition("\n")[0]
            raise OSError(
                f"The drafter cannot be compiled here ({cause or type(error).__name__}): install what is missing (a "
                "C++ compiler on a CPU, Triton on a GPU), or use the drafter as it is."
            ) from error
