"""Where the demo runs, in which precision and why, and whether two models fit there."""

import functools
import html

import torch

from flashmap_hf import drafters, targets
from flashmap_hf.demo.controls import Controls
from flashmap_hf.demo.memory import estimate, free_bytes, gigabytes
from flashmap_hf.demo.panes import escape
from flashmap_hf.demo.shelf import Shelf
from flashmap_hf.provenance import provenance


@functools.cache
def device_name(device: torch.device) -> str:
    machine = provenance()["machine"]
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        return f"{machine['processor']}, {torch.get_num_threads()} thread(s)"
    return device.type


def why(dtype: torch.dtype, device: torch.device, asked: bool) -> str:
    """The reason for the precision, in a few words."""
    if asked:
        return "as asked for"
    if device.type == "cpu":
        native = dtype is torch.bfloat16
        return "this CPU multiplies it natively" if native else "this CPU has no bfloat16 instructions"
    return "native on this GPU" if dtype is torch.bfloat16 else "this GPU has no native bfloat16"


def fit(controls: Controls, shelf: Shelf) -> tuple[str, bool]:
    """Whether the two models fit, in a sentence, and whether that is good news.

    Raises:
        ValueError, OSError: a name leads nowhere.
    """
    if shelf.holds(controls):
        return f"loaded, {gigabytes(shelf.size)}", True
    drafters.check(controls.drafter_name)
    embedded = targets.EMBEDDED.get(controls.target_name)
    if embedded is not None and not targets.is_complete(targets.home() / "targets" / embedded.name, embedded):
        return f"estimated once the first run has fetched {embedded.name}", True
    need = estimate(controls, shelf.dtype)
    free = free_bytes(shelf.device) + shelf.size
    parts = f"about {gigabytes(need.total)} (target {gigabytes(need.target)}, drafter {gigabytes(need.drafter)})"
    return (f"{parts}: fits", True) if need.total <= free else (f"{parts}: does not fit", False)


def panel(controls: Controls, shelf: Shelf, asked: bool) -> str:
    """The strip with all of it. asked: the precision was chosen by whoever started the demo."""
    kind = "GPU" if shelf.device.type == "cuda" else shelf.device.type.upper()
    dtype = str(shelf.dtype).removeprefix("torch.")
    try:
        words, good = fit(controls, shelf)
    except (ValueError, OSError) as error:
        words, good = " ".join(str(error).split()), False
    items = [
        (kind, device_name(shelf.device), ""),
        ("Free memory", gigabytes(free_bytes(shelf.device)), ""),
        ("Precision", f"{dtype}: {why(shelf.dtype, shelf.device, asked)}", ""),
        ("Target + drafter", words, "" if good else "fm-bad"),
    ]
    cells = "".join(
        f'<div class="{mark}"><dt>{html.escape(name)}</dt><dd>{escape(value)}</dd></div>' for name, value, mark in items
    )
    return f'<dl class="fm-device" aria-label="Device">{cells}</dl>'
