"""Measured numbers as Markdown: tables, shares, spreads, and the machine that they were measured on."""

from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [list(map(cell, head)), ["---"] * len(head), *(list(map(cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """Names come from files of the user: nothing in them may end the cell or begin a tag."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def number(value: float | None, places: int = 2) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.0f} %"


def spread(value: Record) -> str:
    return f"{value['median']:.2f} ({value['lowest']:.2f} to {value['highest']:.2f})"


def how(temperature: float) -> str:
    return "greedy" if temperature == 0.0 else f"temperature {temperature:g}"


def where(record: Record) -> str:
    """The machine."""
    machine = record["provenance"]["machine"]
    accelerator = machine["accelerator"] or f"no accelerator, {machine['cpu_capability']}"
    torch = record["provenance"]["versions"]["torch"]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] != 1 else ''}"
    return cell(f"on {machine['processor']}, {threads}, {accelerator}, torch {torch}")
