"""Reading answers: plain and compressed, bad rows named by file and line."""

import gzip
import json
from pathlib import Path

import pytest

from flashmap_hf.training.answers import Answer, read_answers

ROW = {"id": 7, "temperature": 0, "prompt_ids": [1, 2], "response_ids": [3]}


def test_plain_and_gzip(tmp_path: Path) -> None:
    text = json.dumps(ROW) + "\n\n" + json.dumps(ROW | {"id": "b", "temperature": 0.7})
    (tmp_path / "a.jsonl").write_text(text)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as out:
        out.write(text)
    expected = [Answer("7", 0.0, [1, 2], [3]), Answer("b", 0.7, [1, 2], [3])]
    assert list(read_answers(tmp_path / "a.jsonl")) == list(read_answers(tmp_path / "a.jsonl.gz")) == expected


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"id": 1}', json.dumps(ROW | {"prompt_ids": "hello"}), json.dumps(ROW | {"response_ids": [1.5]}),
     json.dumps(ROW | {"response_ids": [-1]}), json.dumps(ROW | {"temperature": float("nan")}),
     json.dumps(ROW | {"temperature": -1}), "[" * 100_000, json.dumps(ROW | {"prompt_ids": []}),
     json.dumps(ROW | {"response_ids": [True]}), json.dumps(ROW | {"id": None}),
     json.dumps(ROW | {"temperature": True})],
)  # fmt: skip
def test_bad_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2"):
        list(read_answers(path))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        list(read_answers(tmp_path / "nothing.jsonl"))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(json.dumps(ROW | {"id": i}).encode() + b"\n" for i in range(500)))
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-40])
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe\n")
    for name in ("cut.jsonl.gz", "latin.jsonl"):
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            list(read_answers(tmp_path / name))


def test_what_is_no_text_of_answers_is_named(tmp_path: Path) -> None:
    row = json.dumps(ROW) + "\n"
    for name, content, message in (
        ("plain.jsonl.gz", row.encode(), "plain.jsonl.gz is named .gz"),
        ("marked.jsonl", ("\ufeff" + row).encode(), "marked.jsonl, line 1: begins with a byte order mark"),
        ("empty.jsonl", b"\n", "empty.jsonl holds no answer"),
        ("twice.jsonl", (row + "\n" + row).encode(), "twice.jsonl, line 3: the id '7' was in .*twice.jsonl, line 1"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            list(read_answers(tmp_path / name))
