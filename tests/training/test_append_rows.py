"""Rows that are appended: nothing whole is lost, nothing torn is kept, and one writer at a time."""

import json
from pathlib import Path

import pytest

from flashmap_hf.training.append_rows import RowWriter, cut_torn_line, only_writer


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b"{}\n", b"{}\n"),
        (b'{}\n{"a', b"{}\n"),
        (b'{"a', b""),
        (b"{}\n" + b"x" * 200_000, b"{}\n"),
        (b"x" * 200_000 + b"\n{", b"x" * 200_000 + b"\n"),
    ],
)
def test_a_torn_line_is_cut_off(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(before)
    cut_torn_line(path)
    assert path.read_bytes() == after
    with RowWriter(path) as writer:
        writer.write({"text": "é\u2028\n"})
        written = path.read_bytes()  # before the file is closed
    assert written.startswith(after) and json.loads(written[len(after) :]) == {"text": "é\u2028\n"}
    assert written.count(b"\n") == after.count(b"\n") + 1


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    with RowWriter(tmp_path / "full.jsonl") as writer, pytest.raises(OSError, match=r"full\.jsonl .*No space left"):
        writer.write({"text": "x"})
    with pytest.raises(OSError, match=r"nowhere.*rows\.jsonl cannot be written \(No such file"):
        RowWriter(tmp_path / "nowhere" / "rows.jsonl")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    with only_writer(path):
        with pytest.raises(OSError, match=r"rows\.jsonl is being written by another run"), only_writer(path):
            pass
        with only_writer(tmp_path / "new" / "others.jsonl"):
            pass
    with only_writer(path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"rows\.jsonl cannot be written"), only_writer(tmp_path / "file" / "rows.jsonl"):
        pass
