"""Features are the target's own states; shards resume, and damage is found."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from tiny_files import byte_tokenizer, write_target
from transformers import LlamaForCausalLM

from flashmap_hf import cli
from flashmap_hf.conditioning import tap
from flashmap_hf.fingerprints import chat_template_hash, vocabulary_hash
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.features import check_agreement, check_answers, check_room, compute, make_features
from flashmap_hf.training.shards import Manifest, read_shard
from flashmap_hf.verification import quantile_token

TAPS = [2, 4]


def test_features_are_the_states_that_generation_sees(target: LlamaForCausalLM, answers: list[Answer]) -> None:
    answer = answers[0]
    features = compute(target, answer, TAPS, context=2)
    ids = torch.tensor([answer.prompt_ids + answer.response_ids])
    whole = tap(target(ids, output_hidden_states=True).hidden_states, TAPS)[0, len(answer.prompt_ids) - 2 :]
    assert features.first == 2
    assert torch.equal(features.taps, whole.to(torch.bfloat16))
    assert features.tokens.tolist() == ids[0, len(answer.prompt_ids) - 2 :].tolist()
    assert not features.f_right.any() and not features.sampled
    assert torch.equal(features.argmax, features.tokens[2:]) and features.agreeing == len(answer.response_ids)


def test_noise_in_the_interval_makes_the_target_choose_the_token(
    target: LlamaForCausalLM, answers: list[Answer]
) -> None:
    answer = answers[1]
    features = compute(target, answer, TAPS, context=2)
    ids = torch.tensor([answer.prompt_ids + answer.response_ids])
    logits = target(ids).logits[0, len(answer.prompt_ids) - 1 : -1].float()
    assert bool((features.f_left < features.f_right).all())
    middle = (features.f_left + features.f_right) / 2
    assert quantile_token(logits, middle).tolist() == answer.response_ids
    assert features.argmax.tolist() == logits.argmax(-1).tolist() and features.sampled


def test_shards_resume_after_what_is_there(target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path) -> None:
    make_features(target, answers[:4], tmp_path, TAPS, shard_size=2)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("*.safetensors")}
    manifest = make_features(target, answers, tmp_path, TAPS, shard_size=2)
    assert [row["answers"] for row in manifest.shards] == [2, 2, 2, 2]
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in before.items())
    read = [s for row in Manifest.read(tmp_path).shards for s in read_shard(tmp_path, row)]
    assert len(read) == len(answers)
    for got, answer in zip(read, answers, strict=True):
        expected = compute(target, answer, TAPS, context=32)
        assert got.first == expected.first
        for name in ("taps", "tokens", "argmax", "f_left", "f_right"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_damage_is_found(target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path) -> None:
    row = make_features(target, answers[:2], tmp_path, TAPS).shards[0]
    path = tmp_path / str(row["file"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(OSError, match="checksum"):
        read_shard(tmp_path, row)
    path.write_bytes(whole[:-10])
    with pytest.raises(OSError, match="truncated"):
        read_shard(tmp_path, row)
    with pytest.raises(OSError, match="manifest"):
        Manifest.read(tmp_path / "elsewhere")


def test_other_features_in_the_folder_are_refused(
    target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path
) -> None:
    make_features(target, answers[:2], tmp_path, TAPS)
    with pytest.raises(ValueError, match="tap_layers"):
        make_features(target, answers[:2], tmp_path, [1, 4])


def test_empty_and_long_answers_are_counted(target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path) -> None:
    empty = Answer("e", 0.0, [1, 2], [])
    manifest = make_features(target, [empty, answers[7], answers[0]], tmp_path / "a", TAPS, max_length=20)
    assert manifest.skipped_long == 1 and manifest.skipped_empty == 1 and manifest.shards[0]["answers"] == 1
    with pytest.raises(ValueError, match="No answer is left"):
        make_features(target, [empty], tmp_path / "b", TAPS)


def test_tokens_of_another_model_are_named(target: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Answer far holds token 40"):
        make_features(target, [Answer("far", 0.0, [1, 2], [3, 40])], tmp_path, TAPS)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        Manifest.read(tmp_path)


def test_answers_of_another_target_are_refused(target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path) -> None:
    """A greedy answer is what the target would say: one that is not is another model's."""
    foreign = [
        Answer(f"f{i}", 0.0, a.prompt_ids, [(t + 7) % 40 for t in a.response_ids]) for i, a in enumerate(answers)
    ]
    with pytest.raises(ValueError, match="another model's answers"):
        make_features(target, foreign, tmp_path, TAPS)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_small_disk_is_named_before_any_work(
    target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashmap_hf.training.features.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr(target, "forward", None)
    with pytest.raises(OSError, match=r"GiB free, the features need .*--online"):
        make_features(target, answers, tmp_path, TAPS)
    check_room(tmp_path, answers[:0], 64, 8)


def test_a_disk_that_fills_up_loses_nothing(
    target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_features(target, answers[:2], tmp_path, TAPS, shard_size=2)

    def full(_: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("flashmap_hf.training.shards.save_file", full)
        with pytest.raises(OSError, match=r"features-0000001\.safetensors could not be written.*No space left"):
            make_features(target, answers, tmp_path, TAPS, shard_size=2)
    assert not list(tmp_path.glob("*.tmp")) and len(Manifest.read(tmp_path).shards) == 1
    assert len(make_features(target, answers, tmp_path, TAPS, shard_size=2).shards) == 4


def ids_in(folder: Path) -> list[str]:
    return [id for row in Manifest.read(folder).shards for id in row["ids"]]


def test_other_answers_add_up(target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path) -> None:
    """Whatever the order, the kind or the limits of the runs: each answer is there once."""
    sampled = [a for a in answers if a.temperature]
    make_features(target, sampled[::-1], tmp_path, TAPS, shard_size=3)
    make_features(target, answers, tmp_path, TAPS, max_length=15, shard_size=2)
    make_features(target, answers[3:], tmp_path, TAPS, shard_size=2)
    manifest = make_features(target, answers, tmp_path, TAPS, shard_size=2)
    ids = ids_in(tmp_path)
    assert sorted(ids) == [a.id for a in answers] and manifest.total("answers") == 8
    by_id = {a.id: a for a in answers}
    read = [s for row in manifest.shards for s in read_shard(tmp_path, row)]
    for id, sequence in zip(ids, read, strict=True):
        assert torch.equal(sequence.taps, compute(target, by_id[id], TAPS, context=32).taps)


def test_a_lost_shard_is_computed_again(
    target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_features(target, answers, tmp_path, TAPS, shard_size=2).shards
    (tmp_path / rows[1]["file"]).unlink()
    last = tmp_path / rows[3]["file"]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(OSError, match=r"0000001\.safetensors is missing: delete that file alone and run flashmap feat"):
        read_shard(tmp_path, rows[1])
    capsys.readouterr()
    manifest = make_features(target, answers, tmp_path, TAPS, shard_size=2)
    error = capsys.readouterr().err
    assert "0000001.safetensors is missing: its" in error and "0000003.safetensors is truncated: its" in error
    assert [int(row["file"][9:16]) for row in manifest.shards] == [0, 2, 4, 5]
    assert sorted(ids_in(tmp_path)) == [a.id for a in answers]
    assert sum(len(read_shard(tmp_path, row)) for row in manifest.shards) == 8


def test_folders_without_ids_are_read_and_not_resumed(
    target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path
) -> None:
    manifest = make_features(target, answers[:2], tmp_path, TAPS)
    for row in manifest.shards:
        del row["ids"]
    manifest.write(tmp_path)
    assert len(read_shard(tmp_path, Manifest.read(tmp_path).shards[0])) == 2
    with pytest.raises(ValueError, match="make the features again in another folder"):
        make_features(target, answers, tmp_path, TAPS)


def test_another_answer_of_the_same_id_is_refused(
    target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path
) -> None:
    make_features(target, answers[:2], tmp_path, TAPS)
    with pytest.raises(ValueError, match="another answer with the id 'a0': use another folder"):
        make_features(target, [replace(answers[2], id="a0")], tmp_path, TAPS)
    with pytest.raises(ValueError, match="Two answers have the id 'a3'"):
        make_features(target, [answers[3], answers[3]], tmp_path, TAPS)


def test_sampled_answers_of_another_target_are_refused(
    target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path
) -> None:
    sampled = [a for a in answers if a.temperature]
    own = [compute(target, a, TAPS, 32) for a in sampled]
    check_agreement(own, "tiny")
    law = (
        target(torch.tensor([sampled[0].prompt_ids + sampled[0].response_ids])).logits[0].detach().double().softmax(-1)
    )
    law = law[len(sampled[0].prompt_ids) - 1 : -1]
    assert own[0].expected == pytest.approx(float((law**2).sum()), rel=1e-5)
    assert own[0].squared == pytest.approx(float((law**3).sum()), rel=1e-5)
    foreign = [
        replace(a, id=f"{a.id}+{n}", response_ids=[(t + n) % 40 for t in a.response_ids])
        for a in sampled for n in range(5, 25)
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"on average, its own samples would have .* another model's answers"):
        make_features(target, foreign, tmp_path, TAPS)
    assert not list(tmp_path.glob("*.safetensors"))


def test_answers_beyond_the_targets_positions_are_too_long(
    target: LlamaForCausalLM, answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.config, "max_position_embeddings", len(answers[1].prompt_ids + answers[1].response_ids))
    usable, skipped = check_answers(target, answers, 2048)
    assert [a.id for a in usable] == ["a0", "a1"] and skipped == {"empty": 0, "long": 6}


def test_a_manifest_that_cannot_be_written_is_named(
    target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    manifest = make_features(target, answers[:2], tmp_path, TAPS, shard_size=2)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match=r"manifest\.json cannot be written \(No space left on device\)"):
            make_features(target, answers, tmp_path, TAPS, shard_size=2)
    assert Manifest.read(tmp_path) == manifest
    assert len(make_features(target, answers, tmp_path, TAPS, shard_size=2).shards) == 4
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


def answered(folder: Path, **changes: object) -> Path:
    """A folder of one answer of `write_target`'s, whose manifest says `changes` besides."""
    tokenizer, made = byte_tokenizer(), folder / "answered"
    made.mkdir(exist_ok=True)
    row = Answer("a", 1.0, [5, 6], [7, 8, 9])
    (made / "answers-00000.jsonl").write_text(json.dumps(asdict(row)) + "\n")
    facts = {
        "target": str(folder / "t"), "vocabulary_hash": vocabulary_hash(tokenizer),
        "chat_template_hash": chat_template_hash(tokenizer),
    }  # fmt: skip
    (made / "answers.json").write_text(json.dumps({"answers": facts | changes}))
    return made


def test_whose_answers_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_target(tmp_path / "t")
    write_target(tmp_path / "tuned", seed=1)
    monkeypatch.chdir(tmp_path)

    def run(target: str, *options: str) -> str:
        made = ["features", "--answers", "answered", "--out", "out", "--target", target, *options]
        code = cli.main(made)
        error = capsys.readouterr().err
        assert (code == 0) == ("answered holds" not in error and "--taps" not in error), error
        return error

    for name in ("t", "./t", str(tmp_path / "t"), "/moved/here/t"):
        answered(tmp_path, target=name)
        run("t")
    answered(tmp_path)
    run("./t")
    assert "holds answers of" in run("./tuned")
    answered(tmp_path, chat_template_hash="0" * 16)
    assert "in another chat template (0000000000000000) than that of" in run("t")
    answered(tmp_path, target_shape={"hidden_size": 1, "num_hidden_layers": 3, "vocab_size": 259})
    assert "target_shape" in run("t")
    answered(tmp_path)
    for taps in (("1", "9"), ("2", "1"), ("1", "1"), ("-1", "2")):
        assert f"--taps {' '.join(taps)}" in run("t", "--taps", *taps)


def test_an_out_that_is_a_file_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = answered(tmp_path)
    monkeypatch.setattr("flashmap_hf.targets.load", None)
    for out in (made / "answers.json", made / "answers.json" / "below"):
        assert cli.main(["features", "--answers", str(made), "--out", str(out)]) == cli.USAGE_ERROR
        assert f"--out {out}: {made / 'answers.json'} is a file" in capsys.readouterr().err
