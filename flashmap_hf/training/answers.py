"""The target's own answers: JSONL (or .jsonl.gz) rows of prompt and response token ids."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """One on-policy answer. `temperature` is the one that it was sampled at; 0 means greedy."""

    id: str
    temperature: float
    prompt_ids: list[int]
    response_ids: list[int]


def read_answers(path: str | Path) -> Iterator[Answer]:
    """Yield the answers of a file, in order.

    Raises:
        OSError: the file cannot be read.
        ValueError: a row is not an answer, names the file and the line; or the file is cut off or not UTF-8 text.
    """
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield read_row(line, f"{path}, line {number}")
    except (EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path} is damaged, or not UTF-8 text ({error}): make or copy it again.") from error


def read_row(line: str, place: str) -> Answer:
    """One row; raises ValueError that begins with `place`."""
    try:
        row = json.loads(line)
        answer = Answer(str(row["id"]), float(row["temperature"]), row["prompt_ids"], row["response_ids"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{place}: not an answer ({error!r}); a row needs id, temperature, prompt_ids and response_ids."
        ) from error
    if not 0.0 <= answer.temperature < float("inf"):
        raise ValueError(f"{place}: temperature={answer.temperature} must be 0 (greedy) or a positive number.")
    for name in ("prompt_ids", "response_ids"):
        ids = getattr(answer, name)
        if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ValueError(f"{place}: {name} must be a list of token ids.")
    return answer
