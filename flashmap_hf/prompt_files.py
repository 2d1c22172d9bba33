"""JSONL files of prompts: rows with `prompt` as in HumanEval, or with `turns` as in Spec-Bench."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PromptRow:
    """A user's turn. id is unique in its file; category groups the measurements, "" where the file has none.

    later_turns: what the same user says next, once each answer has been given.
    """

    id: str
    prompt: str
    category: str = ""
    later_turns: tuple[str, ...] = ()


def read_prompts(path: str | Path) -> list[PromptRow]:
    """The prompts of a JSONL file, in order.

    A row needs `prompt`, or `turns`, a list. `id`, or the `question_id` of Spec-Bench or the `task_id` of HumanEval,
    names it, else its line number; `category` is optional, and `coding` for a row of HumanEval.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no prompt, or a row is not one; names the file and the line.
    """
    path = Path(path)
    rows: list[PromptRow] = []
    lines: dict[str, int] = {}
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
            if line.strip():
                row = read_row(line, number, f"{path}, line {number}")
                if row.id in lines:
                    raise ValueError(f"{path}, line {number}: id {row.id!r} is already on line {lines[row.id]}.")
                lines[row.id] = number
                rows.append(row)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}): save it as UTF-8.") from error
    if not rows:
        raise ValueError(f"{path} holds no prompt: give it a JSON object with a prompt on each line.")
    return rows


def read_row(line: str, number: int, place: str) -> PromptRow:
    """One row; raises ValueError that begins with `place`."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON ({error}).") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: not a JSON object, but {type(row).__name__}.")
    turns = [row["prompt"]] if "prompt" in row else row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{place}: needs a text under `prompt`, or a list of texts under `turns`.")
    if any("\ud800" <= character <= "\udfff" for turn in turns for character in turn):
        raise ValueError(f"{place}: the prompt holds half of a surrogate pair, which is not text.")
    name = next((row[key] for key in ("id", "question_id", "task_id") if key in row), number)
    category = row.get("category") or ("coding" if "entry_point" in row else "")
    return PromptRow(str(name), turns[0], str(category), tuple(turns[1:]))
