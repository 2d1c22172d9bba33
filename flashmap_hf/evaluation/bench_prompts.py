"""What a benchmark is measured on: our own 32 prompts over the categories of Spec-Bench, or a file of the user's."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from flashmap_hf.prompt_files import PromptRow, read_prompts

OWN = "bench_prompts.jsonl"  # in this package, written for it


@dataclass(frozen=True)
class Item:
    """One turn of a prompt. index: its place among all; turn: from 0."""

    index: int
    row: PromptRow
    turn: int

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def category(self) -> str:
        return self.row.category


@dataclass(frozen=True)
class PromptSet:
    """The rows of a file, and which file it was."""

    rows: list[PromptRow]
    file: str
    sha256: str

    @classmethod
    def read(cls, path: Path | None) -> "PromptSet":
        """`path`, or our own prompts for None; raises as `read_prompts` does."""
        if path is None:
            with as_file(files("flashmap_hf.evaluation") / OWN) as own:
                return cls.read(own)
        return cls(read_prompts(path), path.name, hashlib.sha256(path.read_bytes()).hexdigest())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"file": self.file, "sha256": self.sha256, "in_file": len(self.rows)}


def items_of(rows: Sequence[PromptRow], turns: int) -> list[Item]:
    """The first `turns` turns of each row, in order."""
    pairs = [(row, turn) for row in rows for turn in range(min(turns, 1 + len(row.later_turns)))]
    return [Item(index, row, turn) for index, (row, turn) in enumerate(pairs)]
