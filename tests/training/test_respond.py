"""`flashmap respond` on a tiny target: the answers are the target's own, and a killed run is resumed."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_files import byte_tokenizer, write_target

from flashmap_hf import cli, prompts, targets
from flashmap_hf.training import respond
from flashmap_hf.training.answer_folder import answer_files, answer_manifest, read_answer_folder
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.append_rows import RowWriter
from flashmap_hf.training.batch import Request
from flashmap_hf.training.decode import decode_reference

STOP = list(range(3, 259, 12))
LIMIT = 10


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), eos_token_id=STOP)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{i}", "prompt": "why? " * (1 + i % 5)}) + "\n" for i in range(14)))
    return path


def run(target: Path, questions: Path, out: Path, *options: str) -> int:
    needed = ["--target", str(target), "--prompts", str(questions), "--out", str(out)]
    return cli.main(["respond", *needed, "--batch-size", "4", "--max-new-tokens", str(LIMIT), *options])


def answers_in(folder: Path) -> dict[str, Answer]:
    rows = list(read_answer_folder(folder))
    found = {row.id: row for row in rows}
    assert len(found) == len(rows)
    return found


def expected(target: Path, questions: Path, share: float = 2 / 3, temperature: float = 1.0) -> dict[str, Answer]:
    model, tokenizer = targets.load(target)
    found = {}
    for row in map(json.loads, questions.read_text().splitlines()):
        ids = prompts.encode(model, tokenizer, row["prompt"])["input_ids"][0].tolist()
        chosen = 0.0 if respond.share(0, row["id"]) < share else temperature
        found[row["id"]] = decode_reference(model, Request(row["id"], ids, chosen, LIMIT))
    return found


def record_of(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "respond.json").read_text())
    assert isinstance(record, dict)
    return record


def test_answers_are_the_targets_own(
    target: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(target, questions, tmp_path, "--shard-rows", "5") == 0
    answers = answers_in(tmp_path)
    assert answers == expected(target, questions)
    assert [path.read_text().count("\n") for path in answer_files(tmp_path)] == [5, 5, 4]
    record, kinds = record_of(tmp_path), {0.0: "greedy", 1.0: "sampled"}
    for temperature, kind in kinds.items():
        rows = [answer for answer in answers.values() if answer.temperature == temperature]
        assert record[f"{kind}_answers"] == len(rows) > 0
        assert record[f"{kind}_tokens"] == sum(len(row.response_ids) for row in rows)
    assert 0 < record["cut_off"] == sum(a.response_ids[-1] not in STOP for a in answers.values()) < 14
    assert record["skipped_long"] == 0 and record["prompts"] == 14
    this = record["this_run"]
    assert this["tokens"] == record["greedy_tokens"] + record["sampled_tokens"]
    assert this["tokens_per_second"] == pytest.approx(this["tokens"] / this["seconds"])
    assert record["options"]["out"] == tmp_path.name and record["provenance"]["versions"]["torch"] == torch.__version__
    manifest = answer_manifest(tmp_path)
    assert manifest is not None and manifest["target"] == str(target)
    assert set(manifest) >= {"vocabulary_hash", "chat_template_hash", "seed", "temperature", "greedy_share"}
    out = capsys.readouterr().out
    assert f"{record['greedy_answers']} greedy and {record['sampled_answers']} sampled answers" in out
    assert f"{this['tokens_per_second']:.1f} tokens/s" in out


def test_a_killed_run_is_resumed(
    target: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        left = iter(range(6))
        write = RowWriter.write

        def killed(writer: RowWriter, row: dict[str, Any]) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            write(writer, row)

        patch.setattr(RowWriter, "write", killed)
        assert run(target, questions, tmp_path, "--shard-rows", "4") == cli.INTERRUPTED
    first = answers_in(tmp_path)
    assert len(first) == 6
    with answer_files(tmp_path)[-1].open("a") as file:
        file.write('{"id": "q13", "temp')
    done: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(RowWriter, "write", lambda writer, row: (done.append(row["id"]), write(writer, row)))
        assert run(target, questions, tmp_path, "--shard-rows", "4") == 0
    assert answers_in(tmp_path) == expected(target, questions)
    assert len(done) == 8 and not set(done) & set(first)
    seconds = record_of(tmp_path)["seconds"]
    assert run(target, questions, tmp_path, "--shard-rows", "4") == 0  # nothing left to do
    assert answers_in(tmp_path) == expected(target, questions)
    again = record_of(tmp_path)
    assert again["seconds"] > seconds and again["this_run"]["tokens"] == 0


def test_a_full_disk_loses_nothing(
    target: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert run(target, questions, tmp_path, "--limit", "2") == 0
    kept = answers_in(tmp_path)
    room = answer_files(tmp_path)[0].stat().st_size + 300
    capsys.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        assert run(target, questions, tmp_path) == cli.USAGE_ERROR
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert "answers-00000.jsonl cannot be written (File too large)" in error and "stay" in error
    assert answer_files(tmp_path)[0].stat().st_size == room
    assert answers_in(tmp_path).items() >= kept.items()
    assert run(target, questions, tmp_path) == 0
    assert answers_in(tmp_path) == expected(target, questions)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--seed", "1"), "begun with seed=0, not 1"),
        (("--temperature", "0.5"), "begun with temperature=1.0, not 0.5"),
        (("--greedy-share", "1"), "begun with greedy_share=0.6666666666666666, not 1.0"),
        (("--max-new-tokens", "11"), "begun with max_new_tokens=10, not 11"),
    ],
)
def test_other_options_are_not_mixed(
    target: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    option: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    assert run(target, questions, tmp_path, "--limit", "1") == 0
    before = answer_files(tmp_path)[0].read_bytes()
    capsys.readouterr()
    assert run(target, questions, tmp_path, *option) == cli.USAGE_ERROR
    assert message in capsys.readouterr().err
    assert answer_files(tmp_path)[0].read_bytes() == before


def test_another_target_is_not_mixed(
    target: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_target(tmp_path / "other", seed=1)
    assert run(target, questions, tmp_path / "out", "--limit", "1") == 0
    assert run(other, questions, tmp_path / "out") == cli.USAGE_ERROR
    assert f"begun with target={target}, not {other}" in capsys.readouterr().err


def test_budgets(target: Path, questions: Path, tmp_path: Path) -> None:
    assert run(target, questions, tmp_path / "limit", "--limit", "3") == 0
    assert set(answers_in(tmp_path / "limit")) == {"q0", "q1", "q2"}
    assert run(target, questions, tmp_path / "tokens", "--max-tokens", "20") == 0
    answers = answers_in(tmp_path / "tokens")
    tokens = sum(len(answer.response_ids) for answer in answers.values())
    assert 20 <= tokens < 20 + 4 * LIMIT  # those begun are finished, or the folder had the short ones
    assert answers.items() <= expected(target, questions).items()
    assert run(target, questions, tmp_path / "tokens", "--max-tokens", "20") == 0
    assert answers_in(tmp_path / "tokens") == answers


def test_long_prompts_are_skipped_and_counted(
    target: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(target, questions, tmp_path / "some", "--max-prompt-length", "20") == 0
    assert set(answers_in(tmp_path / "some")) == {f"q{i}" for i in range(14) if i % 5 < 2}
    assert record_of(tmp_path / "some")["skipped_long"] == 8
    assert "8 prompts skipped" in capsys.readouterr().out
    assert run(target, questions, tmp_path / "none", "--max-prompt-length", "3") == cli.USAGE_ERROR
    assert "none of the 14 prompts" in capsys.readouterr().err
    long = tmp_path / "long.jsonl"  # the target has 512 positions
    long.write_text("".join(json.dumps({"id": str(n), "prompt": "x" * n}) + "\n" for n in (490, 500, 600)))
    assert run(target, long, tmp_path / "long", "--max-new-tokens", "20", "--greedy-share", "0") == 0
    answers = answers_in(tmp_path / "long")
    assert record_of(tmp_path / "long")["skipped_long"] == 3 - len(answers)
    assert all(len(a.prompt_ids) + len(a.response_ids) <= 512 for a in answers.values()) and "490" in answers


def test_a_target_without_a_chat_template(questions: Path, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    byte_tokenizer(None).save_pretrained(target)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    assert run(target, questions, tmp_path / "out", "--limit", "1") == 0
    assert answers_in(tmp_path / "out")["q0"].prompt_ids == byte_tokenizer(None)("why? ")["input_ids"]
    manifest = answer_manifest(tmp_path / "out")
    assert manifest is not None and manifest["chat_template_hash"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--greedy-share", "1.5"), "--greedy-share 1.5"),
        (("--temperature", "0"), "--temperature 0.0"),
        (("--batch-size", "0"), "--batch-size 0"),
        (("--max-tokens", "0"), "--max-tokens 0"),
        (("--target", "nobody"), "unknown target 'nobody'"),
        (("--dtype", "int3"), "dtype must be one of"),
        (("--prompts", "missing.jsonl"), "missing.jsonl"),
    ],
)
def test_bad_options_are_one_line(
    target: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    assert run(target, questions, tmp_path / "out", *options) == cli.USAGE_ERROR
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_malformed_prompts_are_named_with_their_line(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    for text, message in (("", "holds no prompt"), ('{"prompt": "a"}\n{"prompt": 3}\n', "bad.jsonl, line 2: needs")):
        bad.write_text(text)
        assert run(target, bad, tmp_path / "out") == cli.USAGE_ERROR
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_shares_are_even_and_fixed() -> None:
    shares = torch.tensor([respond.share(0, f"q{i}") for i in range(4000)], dtype=torch.float64)
    assert torch.histc(shares, 4, 0, 1).sub(1000).abs().max() < 120
    assert respond.share(0, "q7") == float(shares[7]) != respond.share(1, "q7")


def test_damaged_record(target: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(target, questions, tmp_path, "--limit", "1") == 0
    (tmp_path / "respond.json").write_text("{")
    assert run(target, questions, tmp_path, "--limit", "1") == cli.USAGE_ERROR
    assert "respond.json is damaged" in capsys.readouterr().err
    (tmp_path / "respond.json").unlink()
    assert run(target, questions, tmp_path, "--limit", "2") == 0


def test_an_empty_last_shard_is_gone_on_with(target: Path, questions: Path, tmp_path: Path) -> None:
    assert run(target, questions, tmp_path, "--limit", "4", "--shard-rows", "4") == 0
    first = answers_in(tmp_path)
    (tmp_path / "answers-00001.jsonl").write_text("")
    assert run(target, questions, tmp_path, "--limit", "6", "--shard-rows", "4") == 0
    assert len(answers_in(tmp_path)) == 6 and answers_in(tmp_path).items() >= first.items()
    assert record_of(tmp_path)["greedy_answers"] + record_of(tmp_path)["sampled_answers"] == 6


def test_an_out_that_is_a_file_is_named_first(
    questions: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashmap_hf.targets.load", None)
    for out in (questions, questions / "below"):
        assert cli.main(["respond", "--prompts", str(questions), "--out", str(out)]) == cli.USAGE_ERROR
        assert f"--out {out}: {questions} is a file" in capsys.readouterr().err
