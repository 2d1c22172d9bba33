"""What an interrupted evaluation has measured so far: a head that says of what, then one result a line."""

import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")  # a dataclass of what JSON holds


def resume(path: Path, head: dict[str, Any], kind: type[Result]) -> list[Result]:
    """The results, of class `kind`, that an earlier run with the same `head` left in `path`; else a new file.

    Raises:
        ValueError: a whole line of the file is not a result; names it.
    """
    names: Any = kind  # `fields` takes a dataclass, which a type variable cannot say
    head = json.loads(json.dumps(head | {"fields": [field.name for field in fields(names)]}))
    if path.exists():
        whole, _, _ = path.read_bytes().rpartition(b"\n")  # a line without its end was being written
        rows: list[Any] = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                rows.append(dict(json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a result ({error}); delete the file to start over."
                ) from error
        if rows and rows[0] == head:
            os.truncate(path, len(whole) + 1)
            return [kind(**row) for row in rows[1:]]
        if rows:
            differ = [name for name, value in head.items() if rows[0].get(name) != value]
            print(f"flashmap: {path} is of a run with other {', '.join(differ)}: starting over", file=sys.stderr)
        path.unlink()
    append(path, head)
    return []


def append(path: Path, row: dict[str, Any]) -> None:
    """One more line.

    Raises:
        OSError: it cannot be written; names the file.
    """
    try:
        with path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row, allow_nan=False) + "\n")
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): make room and run the command again") from error
