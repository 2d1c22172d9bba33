"""Which drafter goes with an embedded target, and how a drafter is loaded by folder or Hub id."""

import os
from pathlib import Path

import torch

from flashmap_hf.configuration_flashmap import FlashMapConfig
from flashmap_hf.loading import explained
from flashmap_hf.modeling_flashmap import FlashMapDrafter
from flashmap_hf.targets import SMOLLM2

# The folders of a source checkout whose content the Hub repositories of the same names hold; no part of a wheel.
CARDS = Path(__file__).resolve().parents[1] / "hub_cards"
DEFAULTS = {SMOLLM2.name: "flashmap-smollm2-135m"}
WAY_OUT = "name a folder or a Hub id with --drafter"


def default_drafter(target: str) -> Path:
    """The folder of the drafter that was trained for an embedded target.

    Raises:
        ValueError: none is known for `target`, or its weights are not here (an installed wheel carries none).
    """
    if target not in DEFAULTS:
        raise ValueError(f"no drafter is known for target {target!r} (but for {', '.join(DEFAULTS)}): {WAY_OUT}")
    folder = CARDS / DEFAULTS[target]
    if not ((folder / "config.json").is_file() and (folder / "model.safetensors").is_file()):
        raise ValueError(f"the drafter {folder.name} for {target} is not in {CARDS}: {WAY_OUT}")
    return folder


def check(drafter: str | os.PathLike[str]) -> None:
    """Read the drafter's configuration, not its weights; raises as `FlashMapDrafter.from_pretrained` does."""
    with explained(drafter, {}):
        FlashMapConfig.from_pretrained(drafter)


def load(drafter: str | os.PathLike[str], *, dtype: torch.dtype, device: torch.device) -> FlashMapDrafter:
    """Load a drafter from a folder or the Hub; raises as `FlashMapDrafter.from_pretrained` does."""
    return FlashMapDrafter.from_pretrained(drafter, dtype=dtype).to(device)
