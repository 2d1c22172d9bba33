"""Features are the target's own states; shards resume, and damage is found."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaForCausalLM

from flashmap_hf.conditioning import tap
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.features import check_room, compute, make_features
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
        with pytest.raises(OSError, match=r"features-0000002\.safetensors could not be written.*No space left"):
            make_features(target, answers, tmp_path, TAPS, shard_size=2)
    assert not list(tmp_path.glob("*.tmp")) and len(Manifest.read(tmp_path).shards) == 1
    assert len(make_features(target, answers, tmp_path, TAPS, shard_size=2).shards) == 4
