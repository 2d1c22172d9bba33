"""JSONL that only grows: a killed run loses no whole line, and the next one goes on behind them."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout


class RowWriter:
    """Appends lines to a file, each handed to the system as soon as it is written.

    Raises:
        OSError: a row cannot be written (no space is left, for instance); names the file. What was written stays.
    """

    def __init__(self, path: Path):
        self.path = path
        with writing(path):
            cut_torn_line(path)
            self.file = path.open("ab", buffering=0)

    def write(self, row: dict[str, Any]) -> None:
        line = memoryview(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        with writing(self.path):
            while line:  # on a full disk the system takes a part
                line = line[self.file.write(line) :]

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.file.close()


def cut_torn_line(path: Path) -> None:
    """Cut off what follows the last line end: a run was killed while it wrote that."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65_536)
            file.seek(start)
            if (place := file.read(end - start).rfind(b"\n")) >= 0:
                end = start + place + 1
                break
            end = start
        if end < size:
            file.truncate(end)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError inside names the file and says that nothing is lost."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror or error}): the rows already there stay; mend that and run the "
            "same command again."
        ) from error


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Hold the lock beside `path`.

    Raises:
        OSError: another run holds it, or it cannot be created.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            held = FileLock(path.with_name(f".{path.name}.lock"), timeout=0).acquire()
        except Timeout:
            held = None
    if held is None:
        raise OSError(f"{path} is being written by another run: wait for it, or choose another --out.")
    with held:
        yield
