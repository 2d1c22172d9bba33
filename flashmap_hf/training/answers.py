"""The target's own answers: JSONL (or .jsonl.gz) rows of prompt and response token ids."""

import gzip
import json
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
        ValueError: a row is not an answer; names the file and the line.
    """
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                answer = Answer(str(row["id"]), float(row["temperature"]), row["prompt_ids"], row["response_ids"])
            except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}: not an answer ({error!r}); "
                    "a row needs id, temperature, prompt_ids and response_ids."
                ) from error
            for name in ("prompt_ids", "response_ids"):
                ids = getattr(answer, name)
                if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
                    raise ValueError(f"{path}, line {number}: {name} must be a list of token ids.")
            yield answer
