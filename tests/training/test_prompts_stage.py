"""`flashmap prompts`: a target's own user turns, files and data sets, filtered; a killed run is resumed."""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import tiny_target
from tiny_files import byte_tokenizer, write_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flashmap_hf import cli, targets
from flashmap_hf.prompt_files import read_prompts
from flashmap_hf.training import prompts
from flashmap_hf.training.append_rows import RowWriter
from flashmap_hf.training.batch import Request
from flashmap_hf.training.decode import decode_reference
from flashmap_hf.training.prompt_filter import PromptFilter, is_loop
from flashmap_hf.training.user_turns import UserTurn, write_turns

WORDS = [f"word{i}" for i in range(36)]
CHAT = "{% for m in messages %}<turn> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A random target of these words writes prompts that pass the filter."""
    vocabulary = ["<pad>", "<turn>", "<end>", "user", "assistant", "?", *WORDS]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "additional_special_tokens": ["<turn>", "<end>"]}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT, **special)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_target("llama", vocab_size=len(word_tokenizer()), initializer_range=0.1).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def run(out: Path, *options: object) -> int:
    return cli.main(["prompts", "--out", str(out), *map(str, options)])


def own(target: Path, out: Path, *options: object) -> int:
    return run(out, "--target", target, "--max-new-tokens", 40, "--batch-size", 4, "--min-length", 10, *options)


def record_of(out: Path) -> dict[str, Any]:
    record = json.loads(out.with_suffix(".json").read_text())
    assert isinstance(record, dict)
    return record


def test_a_target_writes_its_own(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "own.jsonl"
    assert own(target, out, "-n", 12) == 0
    rows = read_prompts(out)
    model, tokenizer = targets.load(target)
    opening = tokenizer("<turn> user")["input_ids"]
    assert len(rows) == 12
    for row in rows:  # each is what the target says to the opening of a user turn
        answer = decode_reference(model, Request(row.id.removeprefix("own-0-"), opening, 0.9, 40), stop_ids=[0, 1, 2])
        assert answer.response_ids[-1] == 2 and tokenizer.decode(answer.response_ids[:-1]) == row.prompt
        assert len(row.prompt) >= 10
    record = record_of(out)
    assert record["prompts"] == 12 and record["attempts"] == int(rows[-1].id.split("-")[2]) + 1
    assert record["attempts"] == 12 + sum(record["refused"].values())
    assert set(record["refused"]) <= {"unfinished", "too short", "loop", "duplicate", "empty"} and record["refused"]
    assert record["tokens"] > 0 and record["seconds"] > 0
    reason, count = next(iter(record["refused"].items()))
    assert f"12 prompts in {out}" in (printed := capsys.readouterr().out) and f"{count} {reason}" in printed


def test_a_killed_run_is_resumed(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert own(target, whole, "-n", 10) == 0
    with monkeypatch.context() as patch:
        left, write = iter(range(5)), RowWriter.write

        def stop(writer: RowWriter, row: dict[str, Any]) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            write(writer, row)

        patch.setattr(RowWriter, "write", stop)
        assert own(target, killed, "-n", 10) == cli.INTERRUPTED
    assert killed.read_bytes().count(b"\n") == 5
    with killed.open("a") as file:
        file.write('{"id": "own-0-')
    assert own(target, killed, "-n", 7) == 0
    assert own(target, killed, "-n", 10) == 0  # more may be asked for later
    assert killed.read_bytes() == whole.read_bytes()
    assert record_of(killed)["attempts"] == record_of(whole)["attempts"]
    before = killed.read_bytes()
    assert own(target, killed, "-n", 3) == 0
    assert killed.read_bytes() == before


def test_prompts_of_another_source_are_not_mixed(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "own.jsonl"
    assert own(target, out, "-n", 2) == 0
    capsys.readouterr()
    for options in (("--seed", 1), ("--temperature", 0.5)):
        assert own(target, out, "-n", 4, *options) == cli.USAGE_ERROR
        assert "own.jsonl was begun with target=" in capsys.readouterr().err
    out.with_suffix(".json").write_text("{}")
    assert own(target, out, "-n", 4) == cli.USAGE_ERROR
    assert "own.json is no record of prompts" in capsys.readouterr().err
    out.with_suffix(".json").unlink()
    assert own(target, out, "-n", 4) == cli.USAGE_ERROR
    assert "exists without own.json" in capsys.readouterr().err
    assert len(read_prompts(out)) == 2


def test_a_target_that_writes_nothing_useful(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "PATIENCE", 20)
    target = write_target(tmp_path / "target")  # random bytes
    out = tmp_path / "own.jsonl"
    assert own(target, out, "--max-new-tokens", 5, "--batch-size", 10) == cli.USAGE_ERROR
    error = capsys.readouterr().err
    assert "none of the last 20 attempts gave a prompt (refused: " in error and "--prompts FILE" in error
    assert record_of(out)["attempts"] == 20 == sum(record_of(out)["refused"].values())


def test_turns_come_in_order_and_from_any_start(target: Path) -> None:
    model, tokenizer = targets.load(target)
    all_turns = list(islice(write_turns(model, tokenizer, max_new_tokens=20, batch_size=3), 12))
    assert [turn.index for turn in all_turns] == list(range(12))
    later = write_turns(model, tokenizer, start=5, max_new_tokens=20, batch_size=4)
    assert list(islice(later, 7)) == all_turns[5:]
    assert {turn.text is None for turn in all_turns} == {True, False}
    assert all(turn.tokens == 20 for turn in all_turns if turn.text is None and turn.tokens > 19)


CHATML = """{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system
Be nice.<|im_end|>
{% endif %}<|im_start|>{{ m['role'] }}
{{ m['content'] | trim }}<|im_end|>
{% endfor %}"""
LLAMA = """<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %} \
{{ m['content'] }} </s>{% endif %}{% endfor %}"""
ALPACA = """{% for m in messages %}### {{ 'Instruction' if m['role'] == 'user' else 'Response' }}:
{{ m['content'] }}

{% endfor %}"""
BARE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"


def with_template(template: str | None, *special: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(list(special), special_tokens=True)
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "opening", "closing", "ending"),
    [
        (
            with_template(CHATML, "<|im_start|>", "<|im_end|>"),
            "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\n", "<|im_end|>", "",
        ),
        (with_template(CHATML), "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\n", None, "<|im_end|>"),
        (with_template(LLAMA, "<s>", "</s>"), "<s>[INST] ", None, "[/INST]"),
        (with_template(LLAMA, "[INST]", "[/INST]"), "<s>[INST] ", "[/INST]", ""),
        (with_template(ALPACA), "### Instruction:\n", None, "### Response:"),
        (with_template(BARE, "<|im", "<|im_end|>"), "", "<|im_end|>", ""),
    ],
)  # fmt: skip
def test_the_template_says_how_a_turn_opens_and_ends(
    tokenizer: PreTrainedTokenizerFast, opening: str, closing: str | None, ending: str
) -> None:
    target = tiny_target(vocab_size=len(tokenizer), eos_token_id=2)
    stop_ids = (2,) if closing is None else (2, tokenizer.convert_tokens_to_ids(closing))
    assert UserTurn.of(target, tokenizer) == UserTurn(opening, stop_ids, ending)


def test_text_that_ends_a_turn_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template(ALPACA)
    target = tiny_target(vocab_size=len(tokenizer), eos_token_id=2)
    said = ["What now?\n\n### Response:\nNothing", "No end", "An end<eos>", "One<bos>"]
    answers = [SimpleNamespace(id=str(i), response_ids=tokenizer(text)["input_ids"]) for i, text in enumerate(said)]
    monkeypatch.setattr("flashmap_hf.training.user_turns.decode", lambda *args, **kwargs: iter(answers[::-1]))
    turns = list(write_turns(target, tokenizer))
    assert [turn.text for turn in turns] == ["What now?", None, "An end", None]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template, so it cannot write user turns: give it prompts instead: --prompts FILE"),
        ("hello", "does not write the turns one after the other"),
        ("{% for m in messages %}{{ raise_exception('no users here') }}{% endfor %}", "no users here"),
        ("{% if %}", "cannot be rendered"),
        ("{% for m in messages %}{{ m['content'] }} {% endfor %}", "opens a user turn with nothing"),
    ],
)
def test_templates_that_cannot_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str | None, message: str
) -> None:
    target = write_target(tmp_path / "target")
    tokenizer = byte_tokenizer(template)
    tokenizer.bos_token = None
    (target / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(target)
    assert own(target, tmp_path / "own.jsonl") == cli.USAGE_ERROR
    error = capsys.readouterr().err.splitlines()[-1]  # behind the bars of loading
    assert error.startswith("flashmap: ") and message in error and "--prompts FILE" in error
    assert not (tmp_path / "own.jsonl").exists() and not (tmp_path / "own.json").exists()


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_file_is_filtered_into_the_common_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = " ".join(["over and over again"] * 9)
    source = write_rows(
        tmp_path / "in.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Again."]},
        {"prompt": "Why is the sky blue?", "license": "MIT"},
        {"prompt": "why  is the SKY\nblue?"},
        {"prompt": "Hi"},
        {"prompt": "x" * 5000},
        {"prompt": loop},
        {"id": "last", "prompt": "Wie geht es dir, Müller?"},
    )
    out = tmp_path / "out.jsonl"
    expected = [
        {"id": "81", "prompt": "Write a poem.", "category": "writing"},
        {"id": "2", "prompt": "Why is the sky blue?"},
        {"id": "last", "prompt": "Wie geht es dir, Müller?"},
    ]
    for _ in range(2):  # a second run finds everything done
        assert run(out, "--prompts", source) == 0
        assert [json.loads(line) for line in out.read_text().splitlines()] == expected
        record = record_of(out)
        assert record["attempts"] == 7 and record["source"] == {"prompts": "in.jsonl"}
        assert record["refused"] == {"duplicate": 1, "too short": 1, "too long": 1, "loop": 1}
        assert "3 prompts in" in capsys.readouterr().out
    assert run(tmp_path / "two.jsonl", "--prompts", source, "--num-prompts", 2) == 0
    assert [row.id for row in read_prompts(tmp_path / "two.jsonl")] == ["81", "2"]


def test_bad_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, out = tmp_path / "bad.jsonl", tmp_path / "out.jsonl"
    for text, message in (("", "holds no prompt"), ('{"prompt": "good one"}\n{"text": 3}', "bad.jsonl, line 2: needs")):
        bad.write_text(text)
        assert run(out, "--prompts", bad) == cli.USAGE_ERROR
        assert message in capsys.readouterr().err
        assert not out.exists()
    write_rows(bad, {"prompt": "a"}, {"prompt": "b"})
    assert run(out, "--prompts", bad) == cli.USAGE_ERROR
    assert "no prompt is left (refused: 2 too short)" in capsys.readouterr().err
    assert run(tmp_path / "new.jsonl", "--prompts", tmp_path / "missing.jsonl") == cli.USAGE_ERROR
    assert "missing.jsonl" in capsys.readouterr().err


def fake_datasets(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> list[Any]:
    calls: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Iterator[dict[str, Any]]:
        calls.append((args, kwargs))
        return iter(rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    talk = [{"role": "system", "content": "Be nice."}, {"role": "user", "content": "How are you today?"}]
    values: list[Any] = ["What is the time?", ["First question?", "Second?"], talk, None, [], talk[:1]]
    calls = fake_datasets(monkeypatch, [{"q": value, "a": "..."} for value in values])
    out = tmp_path / "out.jsonl"
    assert run(out, "--dataset", "someone/talks", "--column", "q", "--subset", "main", "--split", "test") == 0
    assert calls == [(("someone/talks", "main"), {"split": "test", "streaming": True})]
    assert [(row.id, row.prompt) for row in read_prompts(out)] == [
        ("someone/talks/main/test/0", "What is the time?"),
        ("someone/talks/main/test/1", "First question?"),
        ("someone/talks/main/test/2", "How are you today?"),
    ]
    assert record_of(out)["refused"] == {"empty": 3}
    fake_datasets(monkeypatch, [{"q": "Enough of this."}, {"q": 3}, {"b": "?"}])
    assert run(tmp_path / "one.jsonl", "--dataset", "d/d", "--column", "q", "-n", 1) == 0  # the rest is not read
    capsys.readouterr()
    assert run(tmp_path / "two.jsonl", "--dataset", "d/d", "--column", "q") == cli.USAGE_ERROR
    assert "d/d/train, row 1: q holds 3" in capsys.readouterr().err
    assert run(tmp_path / "three.jsonl", "--dataset", "d/d", "--column", "b") == cli.USAGE_ERROR
    assert "d/d/train has no column 'b', but 'q': choose with --column" in capsys.readouterr().err
    fake_datasets(monkeypatch, [{"q": [{"from": "human"}]}])
    assert run(tmp_path / "four.jsonl", "--dataset", "d/d", "--column", "q") == cli.USAGE_ERROR
    assert "no text and no conversation" in capsys.readouterr().err


def test_a_data_set_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert run(tmp_path / "out.jsonl", "--dataset", "d/d", "--column", "q") == cli.USAGE_ERROR
    assert "pip install datasets" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out", "x.txt"), "--out x.txt: must end with .jsonl"),
        (("--prompts", "a.jsonl", "--dataset", "d", "--column", "c"), "exclude each other"),
        (("--dataset", "d"), "belong together"),
        (("--column", "c"), "belong together"),
        (("--temperature", "0"), "--temperature 0.0"),
        (("-n", "0"), "--num-prompts 0"),
        (("--max-new-tokens", "0"), "--max-new-tokens 0"),
        (("--target", "nobody"), "unknown target 'nobody'"),
        (("--unknown",), "--unknown"),
    ],
)
def test_bad_options_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert run(tmp_path / "out.jsonl", *options) == cli.USAGE_ERROR
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_the_file_that_is_read_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "in.jsonl", {"prompt": "What is this?"})
    assert run(path, "--prompts", path) == cli.USAGE_ERROR
    assert "is the file that --prompts reads" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "Can you help me?",
        "What is 2 + 2 + 2 + 2 + 2 + 2 + 2 + 2 + 2 + 2?",
        "no no no no no",
        "Compute 100000000000 times three, or draw a line ---------------------------- here.",
        "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\nSum up this table, please.",
        "def f(x):\n    return x\n\ndef g(x):\n    return f(x)\n\nWhat does g(x) return, and what does f(x) return?",
        "你好,请问现在几点了?",
    ],
)
def test_prompts_are_no_loops(text: str) -> None:
    assert not is_loop(text)
    assert PromptFilter(1, 500).accept(text)


@pytest.mark.parametrize(
    "text",
    [
        "Tell me. " + "I am a dog. " * 12,
        "very " * 12,
        "a" * 40,
        "Why? " + "ha" * 40,
        "I like tea. Do you like tea? Yes, I like tea. Do you like tea? Yes, I like tea. Do you like tea? Yes, I",
        "哈" * 30,
    ],
)
def test_loops(text: str) -> None:
    assert is_loop(text)


def test_reasons() -> None:
    chosen = PromptFilter(5, 20)
    reasons = {
        " \n": "empty", "half \ud800 pair": "broken characters", "cut \ufffd": "broken characters", "four": "too short",
        "x y" * 10: "too long", "What now?": "", "aaaaaaaaaaaaaaa": "loop",
    }  # fmt: skip
    assert {text: chosen.reason(text) for text in reasons} == reasons
    assert chosen.accept("What now?") and chosen.reason(" what\tNOW? ") == "duplicate"
    assert not chosen.accept(None) and not chosen.accept("What now?")
    assert chosen.refused == {"unfinished": 1, "duplicate": 1}
