"""The target's own answers: JSONL (or .jsonl.gz) rows of prompt and response token ids."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
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
        ValueError: a row is not an answer or repeats an id, names the file and the line; or the file is empty, cut off
            or not UTF-8 text.
    """
    empty = True
    for answer in without_repeats(numbered_rows(Path(path))):
        empty = False
        yield answer
    if empty:
        raise ValueError(f"{path} holds no answer: give a file with one row or more (flashmap respond makes them).")


def without_repeats(rows: Iterable[tuple[Answer, str]]) -> Iterator[Answer]:
    """The answers of `rows`, whose second part says where each stands; raises ValueError where an id comes again."""
    places: dict[str, str] = {}
    for answer, place in rows:
        if answer.id in places:
            raise ValueError(
                f"{place}: the id {answer.id!r} was in {places[answer.id]} already: remove one of the two."
            )
        places[answer.id] = place
        yield answer


def numbered_rows(path: Path, *, unfinished: bool = False) -> Iterator[tuple[Answer, str]]:
    """Each answer of a file with its place; of an unfinished file the last line counts only with its line end."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and not (unfinished and not line.endswith(b"\n")):
                    place = f"{path}, line {number}"
                    yield read_row(line.decode(), place), place
    except gzip.BadGzipFile as error:
        raise ValueError(f"{path} is named .gz, and is damaged or not compressed ({error}): rename it.") from error
    except (EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path} is damaged, or not UTF-8 text ({error}): make or copy it again.") from error


def read_row(line: str, place: str) -> Answer:
    """One row; raises ValueError that begins with `place`."""
    if line.startswith("\ufeff"):
        raise ValueError(f"{place}: begins with a byte order mark: save the file as UTF-8 without one.")
    try:
        row = json.loads(line)
        answer = Answer(str(row["id"]), float(row["temperature"]), row["prompt_ids"], row["response_ids"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{place}: not an answer ({error!r}); a row needs id, temperature, prompt_ids and response_ids."
        ) from error
    if type(row["id"]) not in (str, int):  # a bool is an int
        raise ValueError(f"{place}: id={row['id']!r} must be a string or an integer.")
    if isinstance(row["temperature"], bool) or not 0.0 <= answer.temperature < float("inf"):
        raise ValueError(f"{place}: temperature={row['temperature']} must be 0 (greedy) or a positive number.")
    for name in ("prompt_ids", "response_ids"):
        ids = getattr(answer, name)
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"{place}: {name} must be a list of token ids.")
    if not answer.prompt_ids:
        raise ValueError(f"{place}: prompt_ids is empty: an answer begins behind a prompt of one token or more.")
    return answer
