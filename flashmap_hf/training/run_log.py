"""A run's log: JSON lines in its folder, and a tracker where one is installed."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from flashmap_hf.training.append_rows import writing

LOG = "log.jsonl"


def tracker(report_to: str) -> str | None:
    """The accelerate tracker behind the option.

    Raises:
        ValueError: it is asked for by name and not installed.
    """
    installed = [name for name in ("trackio", "tensorboard") if importlib.util.find_spec(name) is not None]
    if report_to == "auto":
        return installed[0] if installed else None
    if report_to == "none":
        return None
    if report_to not in installed:
        raise ValueError(f"report_to={report_to!r} is not installed: pip install {report_to}, or --report-to none.")
    return report_to


def write_row(folder: Path, row: dict[str, Any]) -> None:
    path = folder / LOG
    torn = path.is_file() and not path.read_bytes().endswith(b"\n")  # by a kill: the next row starts a line of its own
    with writing(path), path.open("a", encoding="utf-8") as lines:
        lines.write("\n" * torn + json.dumps(row, allow_nan=False) + "\n")


def set_aside(folder: Path) -> None:
    """Move the log of a run that left no checkpoint out of the way: its steps are taken again."""
    if (folder / LOG).is_file():
        (folder / LOG).replace(folder / f"{LOG}.old")


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All complete rows; a line that a kill tore is left out."""
    path = folder / LOG
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def held_out_history(folder: Path) -> list[dict[str, Any]]:
    """The measurements, oldest first; one per step, since a resumed run may measure a step again."""
    return list({row["step"]: row for row in read_rows(folder) if "held_out_tokens_per_step" in row}.values())
