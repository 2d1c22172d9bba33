"""A folder of answers: `answers-00000.jsonl`, ... and `answers.json`, which says whose answers they are.

A shard is complete when the next one exists; the last line of the last one may be torn, by a run that was killed or
still goes on, and does not count.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from flashmap_hf.provenance import write_record
from flashmap_hf.training.answers import Answer, numbered_rows, read_answers, without_repeats
from flashmap_hf.training.append_rows import RowWriter, cut_torn_line, writing

MANIFEST = "answers.json"
PATTERN = "answers-[0-9][0-9][0-9][0-9][0-9].jsonl"


def answer_files(path: Path) -> list[Path]:
    """The JSONL files of a folder, in order; a file stands for itself.

    Raises:
        OSError: there is no such file or folder, or the folder holds no answers.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise OSError(f"{path} does not exist: give a file or folder of answers (flashmap respond makes one).")
    files = sorted(path.glob(PATTERN))
    if not files:
        raise OSError(f"{path} holds no answers-00000.jsonl: let a target answer into it first (flashmap respond).")
    return files


def answer_manifest(path: Path) -> dict[str, Any] | None:
    """What the answers of a folder depend on; None for a file, which does not say.

    Keys: target, target_shape, vocabulary_hash, chat_template_hash, seed, temperature, greedy_share, max_new_tokens.

    Raises:
        OSError: the folder has no manifest.
        ValueError: the manifest is damaged.
    """
    if path.is_file():
        return None
    manifest = path / MANIFEST
    try:
        answers = json.loads(manifest.read_text(encoding="utf-8"))["answers"]
    except FileNotFoundError as error:
        raise OSError(f"{path} holds no {MANIFEST}: let a target answer into it first (flashmap respond).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{manifest} is damaged ({error}): answer into another folder.") from error
    if not isinstance(answers, dict):
        raise ValueError(f"{manifest} is damaged (no object under answers): answer into another folder.")
    return answers


def read_answer_folder(path: Path) -> Iterator[Answer]:
    """Yield the answers of a folder or file, in order.

    Raises:
        OSError, ValueError: as `answer_files` and `read_answers`, a folder of empty files excepted.
    """
    files = answer_files(path)
    if path.is_file():
        yield from read_answers(path)
        return
    rows = (row for file in files for row in numbered_rows(file, unfinished=file == files[-1]))
    yield from without_repeats(rows)


def same_target(one: str | None, other: str | None) -> bool:
    """Whether two names, as they were typed, can mean one target: a folder may have been moved or typed otherwise.

    Hub ids are compared whole and folders that both exist as such; else the last part decides.
    """
    if one == other or not one or not other:
        return one == other
    first, second = Path(one), Path(other)
    if first.is_dir() and second.is_dir():
        return first.samefile(second)
    if not any(path.is_dir() or path.is_absolute() or len(path.parts) != 2 for path in (first, second)):
        return False  # two Hub ids: another owner is another model
    return first.absolute().name == second.absolute().name


def target_shape(target: PreTrainedModel) -> dict[str, int]:
    """What two targets of one name may differ in."""
    config = target.config.get_text_config()
    return {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}


def check_out(folder: Path) -> None:
    """Raise OSError where --out cannot become a folder, before any work."""
    for place in (folder, *folder.parents):
        if place.exists():
            if not place.is_dir():
                raise OSError(f"--out {folder}: {place} is a file; name a folder.")
            return


class AnswerWriter:
    """Adds answers to a folder, `shard_rows` a file.

    Raises:
        OSError: the folder cannot be written; names the file.
        ValueError: the folder was begun with another manifest.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], shard_rows: int):
        self.folder, self.shard_rows = folder, shard_rows
        if (folder / MANIFEST).exists():
            self._compare(answer_manifest(folder) or {}, manifest)
        else:
            if any(folder.glob(PATTERN)):
                raise ValueError(f"{folder} holds answers without {MANIFEST}: answer into another folder.")
            with writing(folder / MANIFEST):
                write_record(folder / MANIFEST, {"answers": manifest})
        files = sorted(folder.glob(PATTERN))
        self.shard = int(files[-1].stem.rpartition("-")[2]) if files else 0
        self.begun = bool(files)
        self.rows = 0
        if files:
            cut_torn_line(files[-1])
            self.rows = files[-1].read_bytes().count(b"\n")
        self.writer: RowWriter | None = None

    def _compare(self, begun: dict[str, Any], now: dict[str, Any]) -> None:
        for name, value in now.items():
            found = begun.get(name)
            if name == "target_shape" and found is None:
                continue  # the folder is older than this part of the manifest
            if not (same_target(found, value) if name == "target" else found == value):
                raise ValueError(
                    f"{self.folder} was begun with {name}={found}, not {value}: answer into another folder."
                )

    def write(self, answer: Answer) -> None:
        if self.rows >= self.shard_rows:
            self.close()
            self.shard, self.rows = self.shard + 1, 0
        if self.writer is None:
            self.writer = RowWriter(self.folder / f"answers-{self.shard:05d}.jsonl")
        self.writer.write(asdict(answer))
        self.rows += 1

    def close(self) -> None:
        if self.writer is not None:
            self.writer.file.close()
            self.writer = None
