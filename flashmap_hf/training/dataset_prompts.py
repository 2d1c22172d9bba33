"""Prompts out of a data set on the Hub, through the optional `datasets` library; rows are streamed, none is stored."""

from collections.abc import Iterable, Iterator
from typing import Any

from flashmap_hf.prompt_files import PromptRow


def dataset_prompts(name: str, column: str, split: str = "train", subset: str | None = None) -> Iterator[PromptRow]:
    """The user turns in a column: texts, or conversations, of which the first user turn counts.

    Args:
        name: a Hub id, or what else `datasets.load_dataset` takes.
        column: holds a text; a list of texts; or a list of messages, `{"role": ..., "content": ...}`.
        subset: a configuration of the data set.

    Raises:
        ValueError: the library is missing, or there is no such column, or it holds something else.
        OSError: no such data set, or it cannot be fetched.
    """
    try:
        import datasets  # optional, and slow to import
    except ImportError as error:
        raise ValueError(
            "--dataset needs the library `datasets`: install it (pip install datasets), or give --prompts FILE."
        ) from error
    rows = datasets.load_dataset(name, subset, split=split, streaming=True)
    return _read(rows, f"{name}/{subset + '/' if subset else ''}{split}", column)


def _read(rows: Iterable[dict[str, Any]], place: str, column: str) -> Iterator[PromptRow]:
    for index, row in enumerate(rows):
        if column not in row:
            raise ValueError(
                f"{place} has no column {column!r}, but {', '.join(map(repr, row))}: choose with --column."
            )
        text = first_turn(row[column])
        if text is None:
            raise ValueError(f"{place}, row {index}: {column} holds {row[column]!r:.80}, no text and no conversation.")
        yield PromptRow(f"{place}/{index}", text)


def first_turn(value: Any) -> str | None:
    """The text, or the first user turn of a conversation; "" where there is none; None for anything else."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    for turn in value:
        if isinstance(turn, str):
            return turn
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
            return None
        if turn.get("role") == "user":
            return str(turn["content"])
    return ""
