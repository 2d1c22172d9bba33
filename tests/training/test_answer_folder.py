"""Folders of answers: shards in order, whose answers they are, and what a killed run leaves."""

import json
from pathlib import Path

import pytest

from flashmap_hf.training.answer_folder import (
    AnswerWriter,
    answer_files,
    answer_manifest,
    read_answer_folder,
    same_target,
)
from flashmap_hf.training.answers import Answer

MANIFEST = {"target": "tiny", "seed": 0}


def answers(count: int, start: int = 0) -> list[Answer]:
    return [Answer(f"a{i}", float(i % 2), [1, i], [i] * 3) for i in range(start, start + count)]


def write(folder: Path, rows: list[Answer], shard_rows: int = 3) -> None:
    writer = AnswerWriter(folder, MANIFEST, shard_rows)
    for row in rows:
        writer.write(row)
    writer.close()


def test_shards_are_filled_and_gone_on_with(tmp_path: Path) -> None:
    write(tmp_path, answers(4))
    write(tmp_path, [])
    write(tmp_path, answers(3, start=4))
    assert [path.name for path in answer_files(tmp_path)] == [f"answers-0000{i}.jsonl" for i in range(3)]
    assert [path.read_text().count("\n") for path in answer_files(tmp_path)] == [3, 3, 1]
    assert list(read_answer_folder(tmp_path)) == answers(7)
    assert answer_manifest(tmp_path) == MANIFEST
    assert "provenance" in json.loads((tmp_path / "answers.json").read_text())


def test_a_torn_line_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, answers(5))
    last = answer_files(tmp_path)[-1]
    whole = last.read_bytes()
    last.write_bytes(whole[:-4])
    assert list(read_answer_folder(tmp_path)) == answers(4)
    assert last.read_bytes() == whole[:-4]  # reading changes nothing
    write(tmp_path, answers(2, start=4))
    assert list(read_answer_folder(tmp_path)) == answers(6)
    assert [path.read_text().count("\n") for path in answer_files(tmp_path)] == [3, 3]


def test_a_file_stands_for_itself(tmp_path: Path) -> None:
    write(tmp_path, answers(2))
    file = answer_files(tmp_path)[0]
    assert answer_files(file) == [file] and answer_manifest(file) is None
    assert list(read_answer_folder(file)) == answers(2)


def test_other_answers_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path, answers(1))
    with pytest.raises(ValueError, match="begun with seed=0, not 1: answer into another folder"):
        AnswerWriter(tmp_path, MANIFEST | {"seed": 1}, 3)
    with pytest.raises(ValueError, match="begun with temperature=None, not 1"):
        AnswerWriter(tmp_path, MANIFEST | {"temperature": 1}, 3)
    (tmp_path / "answers.json").unlink()
    with pytest.raises(ValueError, match=r"holds answers without answers\.json"):
        AnswerWriter(tmp_path, MANIFEST, 3)
    assert list(read_answer_folder(tmp_path)) == answers(1)


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing does not exist"):
        answer_files(tmp_path / "nothing")
    with pytest.raises(OSError, match=r"holds no answers-00000\.jsonl"):
        answer_files(tmp_path)
    with pytest.raises(OSError, match=r"holds no answers\.json"):
        answer_manifest(tmp_path)
    write(tmp_path, answers(4))
    for text in ("{", "[]", "{}", '{"answers": 3}'):
        (tmp_path / "answers.json").write_text(text)
        with pytest.raises(ValueError, match=r"answers\.json is damaged"):
            answer_manifest(tmp_path)
    last = answer_files(tmp_path)[-1]
    last.write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match=r"answers-00001\.jsonl, line 1: not an answer"):
        list(read_answer_folder(tmp_path))
    last.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"answers-00001\.jsonl is damaged"):
        list(read_answer_folder(tmp_path))


def test_an_id_that_comes_again_is_named(tmp_path: Path) -> None:
    write(tmp_path, [*answers(4), *answers(1)])
    with pytest.raises(ValueError, match=r"00001\.jsonl, line 2: the id 'a0' was in .*00000\.jsonl, line 1"):
        list(read_answer_folder(tmp_path))


def test_a_line_torn_within_a_character_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, answers(1))
    with answer_files(tmp_path)[0].open("ab") as file:
        file.write('{"id": "\u00e9'.encode()[:-1])
    assert list(read_answer_folder(tmp_path)) == answers(1)


def test_a_missing_shard_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, answers(8))
    answer_files(tmp_path)[1].unlink()
    write(tmp_path, answers(3, start=8))
    assert [(path.name, path.read_text().count("\n")) for path in answer_files(tmp_path)] == [
        ("answers-00000.jsonl", 3), ("answers-00002.jsonl", 3), ("answers-00003.jsonl", 2),
    ]  # fmt: skip


def test_one_target_by_several_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("t", "runs/t", "tuned"):
        Path(folder).mkdir(parents=True)
    for one, other in (("t", "./t"), ("t", str(tmp_path / "t")), ("owner/t", "t"), ("/moved/t", "t"), ("a/b", "a/b")):
        assert same_target(one, other) and same_target(other, one)
    for one, other in (
        ("t", "tuned"),
        ("t", "runs/t"),
        ("a/b", "c/b"),
        ("/moved/t", "/moved/u"),
        ("", "t"),
        (None, "t"),
    ):
        assert not same_target(one, other) and not same_target(other, one)


def test_the_same_target_by_another_path_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t").mkdir()
    Path("out").mkdir()
    AnswerWriter(tmp_path / "out", MANIFEST | {"target": "t"}, 3)
    AnswerWriter(tmp_path / "out", MANIFEST | {"target": "./t", "target_shape": {"hidden_size": 8}}, 3)
