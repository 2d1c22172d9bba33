"""A growing file of prompts beside the record of what became of each candidate."""

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmap_hf.prompt_files import read_prompts
from flashmap_hf.provenance import write_record
from flashmap_hf.training.append_rows import RowWriter, cut_torn_line, writing
from flashmap_hf.training.prompt_filter import PromptFilter


@dataclass(frozen=True)
class Candidate:
    """A text that may become a prompt; None where its writer did not finish it."""

    id: str
    text: str | None
    category: str = ""
    tokens: int = 0  # that a target wrote


class PromptCollection:
    """Prompts in `path`, a run in which is resumed, and its record in .json beside it; written inside `with`.

    The record: source, attempts, prompts, refused (a count for each reason), tokens, seconds.

    Raises:
        ValueError: the file holds prompts of another source, or is none of ours.
        OSError: a file cannot be read or written.
    """

    def __init__(self, path: Path, source: dict[str, Any], min_length: int, max_length: int):
        self.path, self.record_path, self.source = path, path.with_suffix(".json"), source
        self.filter = PromptFilter(min_length, max_length)
        self.ids: set[str] = set()
        self.attempts = self.tokens = 0
        self.seconds = 0.0
        self._resume()

    def __enter__(self) -> "PromptCollection":
        self.started = time.monotonic()
        self.save()  # first: rows without it would be taken for another file
        self.writer = RowWriter(self.path)
        return self

    def __exit__(self, *error: object) -> None:
        self.writer.file.close()

    def _resume(self) -> None:
        if self.record_path.exists():
            self._read_record()
        elif self.path.exists():
            raise ValueError(f"{self.path} exists without {self.record_path.name} beside it: choose another --out.")
        cut_torn_line(self.path)
        if not self.path.exists() or not self.path.stat().st_size:
            return
        for row in read_prompts(self.path):
            self.ids.add(row.id)
            self.filter.remember(row.prompt)
            if self.own:  # rows may be newer than the record
                self.attempts = max(self.attempts, int(row.id.rpartition("-")[2]) + 1)

    def _read_record(self) -> None:
        try:
            record = json.loads(self.record_path.read_text())
            source = record["source"]
            if self.own:  # files are read from the start again
                self.attempts, self.filter.refused = int(record["attempts"]), Counter(record["refused"])
            self.tokens, self.seconds = int(record["tokens"]), float(record["seconds"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.record_path} is no record of prompts: choose another --out.") from error
        if source != self.source:
            begun, now = (", ".join(f"{k}={v}" for k, v in each.items()) for each in (source, self.source))
            raise ValueError(f"{self.path} was begun with {begun}, not with {now}: choose another --out.")

    @property
    def own(self) -> bool:
        """Whether a target writes the candidates: it goes on where it was."""
        return "target" in self.source

    def add(self, candidate: Candidate) -> bool:
        """Count a candidate, and write it if it is a prompt. Whether it is one."""
        self.attempts += 1
        self.tokens += candidate.tokens
        if candidate.id in self.ids:
            return True
        if not self.filter.accept(candidate.text):
            return False
        row = {"id": candidate.id, "prompt": candidate.text}
        self.writer.write(row | ({"category": candidate.category} if candidate.category else {}))
        self.ids.add(candidate.id)
        return True

    def save(self) -> None:
        """Write the record."""
        record = {"source": self.source, "attempts": self.attempts, "prompts": len(self.ids)}
        seconds = self.seconds + time.monotonic() - self.started
        record |= {"refused": dict(self.filter.refused), "tokens": self.tokens, "seconds": seconds}
        with writing(self.record_path):
            write_record(self.record_path, record)

    def refusals(self) -> str:
        """The reasons with their counts."""
        return ", ".join(f"{count} {reason}" for reason, count in self.filter.refused.most_common()) or "none"
