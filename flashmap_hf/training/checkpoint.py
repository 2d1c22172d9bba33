"""Checkpoints that a kill cannot spoil: written aside, renamed, the marker last; a half-written one is never seen."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flashmap_hf.configuration_flashmap import FlashMapConfig

MARKER = "state.json"
SUFFIX = "state.safetensors"
SHAPE = (
    "block_size", "window", "num_hidden_layers", "hidden_size", "coupling", "draft_vocab_size", "head_rank",
    "transition_rank", "tap_layers", "anchored_slots",
)  # fmt: skip


def shape(config: FlashMapConfig) -> dict[str, Any]:
    """What a resumed run must not change about its drafter."""
    return {name: getattr(config, name) for name in SHAPE}


def check_shape(folder: Path, trained: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raise ValueError where the run in `folder` trains another drafter than the one asked for."""
    for name, value in trained.items():
        if asked[name] != value:
            raise ValueError(
                f"{folder} holds a run with {name}={value}, not {asked[name]}: keep {value}, or use another folder."
            )


def save(folder: Path, step: int, tensors: dict[str, torch.Tensor], counters: dict[str, Any]) -> None:
    """Write the state of `step` and drop older ones once the marker points to it."""
    name = f"{step}-{SUFFIX}"
    aside = folder / (name + ".tmp")
    for torn in folder.glob(f"*-{SUFFIX}.tmp"):  # of a run that was killed while it wrote
        torn.unlink()
    try:
        save_file({n: t.contiguous().clone() for n, t in tensors.items()}, aside)
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise OSError(f"{aside} could not be written ({error}); the checkpoint before it stays: make room.") from error
    aside.replace(folder / name)
    marker = folder / (MARKER + ".tmp")
    marker.write_text(json.dumps({"file": name} | counters))
    marker.replace(folder / MARKER)
    for old in folder.glob(f"*-{SUFFIX}"):
        if old.name != name:
            old.unlink()


def load(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Tensors and counters of the last complete checkpoint; None when there is none.

    Raises:
        OSError: the marker points to a file that is gone, or either is damaged.
    """
    if not (folder / MARKER).is_file():
        return None
    try:
        marker: dict[str, Any] = json.loads((folder / MARKER).read_text())
        path = folder / marker["file"]
        if not path.is_file():
            raise OSError(f"{folder / MARKER} points to {path.name}, which is gone: delete {MARKER} to start over.")
        return load_file(path), marker
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise OSError(f"{folder} holds a damaged checkpoint ({error!r}): delete {MARKER} to start over.") from error


def optimiser_tensors(label: str, optimiser: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's state as flat tensors `label.index.name`."""
    states = optimiser.state_dict()["state"]
    return {f"{label}.{i}.{key}": value for i, state in states.items() for key, value in state.items()}


def restore_optimiser(label: str, optimiser: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Undo `optimiser_tensors`."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(label + "."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = tensor
    optimiser.load_state_dict(optimiser.state_dict() | {"state": state})
