"""`flashmap features` and `flashmap train` through the command, on a tiny target: files, online, LoRA, errors."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fixed, tiny_target
from peft import PeftModel
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import flashmap_hf
from flashmap_hf import FlashMapDrafter
from flashmap_hf.cli import main
from flashmap_hf.head import Transition
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.append_rows import only_writer
from flashmap_hf.training.features import make_features
from flashmap_hf.training.train import check_readout

SMALL = ["--layers", "1", "--block-size", "3", "--window", "2", "--draft-vocab", "20", "--runs", "2", "--run-length",
         "4", "--report-to", "none", "--hidden-size", "32", "--held-out", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def place(target: LlamaForCausalLM, answers: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder, its answers and their features."""
    folder = tmp_path_factory.mktemp("place")
    target.save_pretrained(folder / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "target")
    twice = [replace(a, id=f"{a.id}-{i}") for i in range(2) for a in answers]
    (folder / "answers.jsonl").write_text("".join(json.dumps(asdict(a)) + "\n" for a in twice))
    assert command(folder, "features", "--answers", folder / "answers.jsonl", "--out", folder / "features") == 0
    return folder


def command(place: Path, name: str, *args: Any) -> int:
    return main([name, "--target", str(place / "target"), *map(str, args)])


def train(place: Path, out: Path, *args: Any) -> int:
    return command(place, "train", "--features", place / "features", "--out", out, *SMALL, *args)


def test_features_then_train(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    features = json.loads((place / "features" / "features.json").read_text())
    assert (features["answers"], features["sampled"]) == (16, 8) and features["provenance"]["command"]
    assert train(place, tmp_path, "--max-steps", 6) == 0
    assert "held-out tokens per target step (simulated), " in capsys.readouterr().out
    drafter = FlashMapDrafter.from_pretrained(tmp_path / "drafter")
    assert drafter.config.block_size == 3 and drafter.config.draft_vocab_size == 20
    assert drafter.config.tokenizer_hash is not None and drafter.config.hidden_size == 32
    record = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert record["held_out_answers"] == 6 and 40 <= record["blocks"] <= record["steps"] * 8 == 48  # some have no label
    assert (record["answers"], record["sampled_answers"], record["processes"]) == (
        10,
        6,
        1,
    )  # copies are held out together
    assert record["held_out_history"][-1]["held_out_tokens_per_step"] == round(record["held_out_tokens_per_step"], 4)
    assert record["provenance"]["versions"]["torch"] == torch.__version__
    assert str(place) not in json.dumps(record)


def test_a_configuration_from_a_file_is_trained(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(place, tmp_path / "run", "--max-steps", 1) == 0
    made = FlashMapDrafter.from_pretrained(tmp_path / "run" / "drafter").config
    made.num_hidden_layers, made.head_dim, made.tokenizer_hash = 2, 8, None
    made.save_pretrained(tmp_path / "recipe")
    own = ["--runs", 2, "--run-length", 4, "--report-to", "none", "--held-out", 2, "--max-steps", 1]
    args = ["--features", place / "features", *own, "--config", tmp_path / "recipe" / "config.json"]
    assert command(place, "train", *args, "--out", tmp_path / "described") == 0
    trained = FlashMapDrafter.from_pretrained(tmp_path / "described" / "drafter").config
    assert (trained.num_hidden_layers, trained.head_dim, trained.block_size) == (2, 8, made.block_size)
    assert trained.tokenizer_hash is not None  # of the target at hand
    for name, value, message in (
        ("tap_layers", [1, 4], "make features with --taps 1 4"),
        ("target_hidden_size", 48, "hidden size 48"),
        ("window", 99, "--window 99: the features keep"),
    ):
        fields = json.loads((tmp_path / "recipe" / "config.json").read_text()) | {name: value}
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "config.json").write_text(json.dumps(fields))
        assert command(place, "train", *args[:-1], tmp_path / "other", "--out", tmp_path / "none") == 2
        assert message in capsys.readouterr().err


def test_a_transition_is_saved_as_tables_and_trained_on_from_them(place: Path, tmp_path: Path) -> None:
    """Going on at no rate to speak of gives the same tables: what was tied is tied again, by least squares."""
    assert train(place, tmp_path / "run", "--transition-rank", 4, "--max-steps", 6) == 0
    first = FlashMapDrafter.from_pretrained(tmp_path / "run" / "drafter", dtype=torch.float32).head.transition
    assert isinstance(first, Transition) and first.previous.weight.shape == (21, 4)
    assert bool(first.readout.weight.any())
    args = ["--drafter", tmp_path / "run" / "drafter", "--max-steps", 1, "--adam-lr", 1e-9]
    assert train(place, tmp_path / "on", *args) == 0
    again = FlashMapDrafter.from_pretrained(tmp_path / "on" / "drafter", dtype=torch.float32).head.transition
    assert isinstance(again, Transition)
    for name in ("previous", "endpoint", "readout"):
        tables = (getattr(found, name).weight for found in (again, first))
        torch.testing.assert_close(*tables, rtol=0.02, atol=1e-3)  # both rounded to bfloat16


def test_online_training_needs_no_files_and_learns_the_same(place: Path, tmp_path: Path) -> None:
    """The losses are those of stored features: one way of making features, whether before or while training."""
    assert train(place, tmp_path / "stored", "--max-steps", 3, "--log-steps", 1) == 0
    assert (
        command(place, "train", "--answers", place / "answers.jsonl", "--online", "--out", tmp_path / "online", *SMALL,
                "--max-steps", 3, "--log-steps", 1) == 0
    )  # fmt: skip

    def first(folder: Path) -> list[Any]:
        rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        return [row["step"] for row in rows if "velocity" in row]

    assert first(tmp_path / "stored") == first(tmp_path / "online") == [1, 2, 3]
    assert not list((tmp_path / "online").glob("*features*"))
    FlashMapDrafter.from_pretrained(tmp_path / "online" / "drafter")


def test_lora_trains_saves_loads_and_merges(place: Path, target: LlamaForCausalLM, tmp_path: Path) -> None:
    assert train(place, tmp_path / "base", "--max-steps", 4) == 0
    base = tmp_path / "base" / "drafter"
    before = (base / "model.safetensors").read_bytes()
    args = ["--drafter", base, "--lora", 4, "--merge", "--max-steps", 8, "--adam-lr", 0.02]
    assert train(place, tmp_path / "lora", *args) == 0
    assert (base / "model.safetensors").read_bytes() == before
    adapter = tmp_path / "lora" / "adapter"
    assert (adapter / "adapter_model.safetensors").is_file() and (adapter / "training.json").is_file()
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
    loaded: Any = PeftModel.from_pretrained(FlashMapDrafter.from_pretrained(base, dtype=torch.float32), str(adapter))
    prompt = torch.tensor([[5, 9, 3]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    for drafter in (loaded, loaded.merge_and_unload(), FlashMapDrafter.from_pretrained(tmp_path / "lora" / "drafter")):
        with flashmap_hf.record() as stats:
            found = target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=fixed(drafter))
        assert torch.equal(found, plain) and stats.blocks > 0
    merged = FlashMapDrafter.from_pretrained(tmp_path / "lora" / "drafter", dtype=torch.float32).state_dict()
    original = FlashMapDrafter.from_pretrained(base, dtype=torch.float32).state_dict()
    name = "layers.0.attention.q_proj.weight"
    assert not torch.equal(merged[name], original[name])


def test_a_drafter_is_trained_on_from_its_weights(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(place, tmp_path / "base", "--max-steps", 2) == 0
    base = tmp_path / "base" / "drafter"
    assert train(place, tmp_path / "on", "--drafter", base, "--max-steps", 1, "--muon-lr", 1e-9, "--adam-lr", 1e-9) == 0
    trained = re.findall(r"(\d+) parameters to train", capsys.readouterr().out)
    assert len(trained) == 2 and trained[0] == trained[1]
    first, second = (FlashMapDrafter.from_pretrained(f).state_dict() for f in (base, tmp_path / "on" / "drafter"))
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "--out", "{run}", "--features", "{run}"], r"run holds no manifest\.json.*flashmap features"),
        (["features", "--answers", "nothing.jsonl", "--out", "{run}"], r"nothing\.jsonl"),
        (["features", "--answers", "{bad}", "--out", "{run}"], r"bad\.jsonl, line 2: not an answer"),
        (["train", "--out", "{run}", "--features", "{features}", "--window", "64"], "--window 64: .*lower it"),
        (["train", "--out", "{run}", "--features", "{features}", "--report-to", "trackio"], "pip install trackio"),
        (["train", "--out", "{run}", "--features", "{features}", "--drafter", "{run}"], "run"),
        (["train", "--out", "{run}", "--features", "{features}", "--lora", "4"], "name it with --drafter"),
        (["train", "--out", "{run}", "--features", "{features}", "--target", "no/such"], "no/such"),
        (["train", "--out", "{bad}", "--features", "{features}"], r"--out .*bad\.jsonl is a file"),
        (["train", "--out", "{bad}/below", "--features", "{features}"], r"--out .*bad\.jsonl is a file"),
    ],
)
def test_errors_are_one_line(
    place: Path, tmp_path: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps(asdict(Answer("a", 0.0, [1], [2, 3]))) + "\n{}\n")
    names = {"run": tmp_path / "run", "bad": tmp_path / "bad.jsonl", "features": place / "features"}
    filled = [arg.format(**names) for arg in args]
    target = [] if "--target" in filled else ["--target", str(place / "target")]
    assert main([filled[0], *target, *filled[1:]]) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert captured.err.splitlines()[-1].startswith("flashmap: ")


def test_features_must_fit_each_other_and_the_target(
    place: Path, answers: list[Answer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = LlamaForCausalLM.from_pretrained(place / "target")
    for name, taps in (("one", [2, 4]), ("other", [1, 4])):
        make_features(target, answers[:2], tmp_path / name, taps, context=8)
    rest = ["--out", tmp_path / "run", *SMALL]
    assert command(place, "train", "--features", tmp_path / "one", tmp_path / "other", *rest) == 2
    assert "other holds features of layers [1, 4]" in capsys.readouterr().err
    LlamaForCausalLM.from_pretrained(place / "target").save_pretrained(tmp_path / "twin")
    PreTrainedTokenizerFast.from_pretrained(place / "target").save_pretrained(tmp_path / "twin")
    assert (
        main(["train", "--target", str(tmp_path / "twin"), "--features", str(tmp_path / "one"), *map(str, rest)]) == 2
    )
    assert "holds features of" in capsys.readouterr().err


def test_a_drafter_that_sees_other_layers_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = LlamaForCausalLM.from_pretrained(place / "target")
    FlashMapDrafter.from_target(target, tap_layers=[3], num_hidden_layers=1).save_pretrained(tmp_path / "drafter")
    assert train(place, tmp_path / "run", "--drafter", tmp_path / "drafter") == 2
    assert "sees layers [3]" in capsys.readouterr().err


def test_two_runs_do_not_share_a_folder(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with only_writer(tmp_path / "run" / "state.json"):
        assert train(place, tmp_path / "run", "--max-steps", 1) == 2
    assert "being written by another run" in capsys.readouterr().err
    assert train(place, tmp_path / "run", "--max-steps", 1) == 0


def test_another_kind_of_run_is_not_resumed(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(place, tmp_path / "run", "--max-steps", 1) == 0
    assert train(place, tmp_path / "other", "--max-steps", 1, "--seed", 5) == 0
    one, other = tmp_path / "run" / "drafter", tmp_path / "other" / "drafter"
    assert train(place, tmp_path / "lora", "--max-steps", 1, "--drafter", one, "--lora", 4) == 0
    for folder, message, args in (
        ("run", "optimiser=adamw, not muon", ["--optimiser", "muon"]),
        ("run", "lora=None, not 4", ["--drafter", one, "--lora", 4]),
        ("lora", "lora=4, not 8", ["--drafter", one, "--lora", 8]),
        ("lora", "lora=4, not None", []),
        ("lora", "adapts another drafter than", ["--drafter", other, "--lora", 4]),
    ):
        capsys.readouterr()
        assert train(place, tmp_path / folder, "--max-steps", 2, *args) == 2
        assert message in capsys.readouterr().err


def test_kl_is_refused_where_the_law_cannot_be_read() -> None:
    check_readout(tiny_target("llama"))
    check_readout(tiny_target("gpt2"))
    with pytest.raises(ValueError, match="--kl: the logits of GraniteForCausalLM are more than"):
        check_readout(tiny_target("granite", intermediate_size=48, num_key_value_heads=2, logits_scaling=8.0))


def test_weights_that_are_not_finite_are_never_saved(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--max-steps", 1, "--warmup", 0, "--decay", 0, "--weight-decay", 1e42]
    assert train(place, tmp_path, *args) == 2
    assert "not finite" in capsys.readouterr().err
    assert not (tmp_path / "drafter").exists() and not (tmp_path / "state.json").exists()


def test_patience_needs_something_to_measure_on(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(place, tmp_path, "--max-steps", 1, "--held-out", 0, "--patience", 2) == 2
    assert "raise --held-out" in capsys.readouterr().err
    assert train(place, tmp_path, "--max-steps", 1, "--held-out", 0) == 0
    assert "nothing was held out" in capsys.readouterr().out
    record = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert record["held_out_tokens_per_step"] is None


def test_a_vocabulary_smaller_than_the_default_is_taken_whole(place: Path, tmp_path: Path) -> None:
    args = ["--features", place / "features", "--out", tmp_path, *SMALL, "--max-steps", 1, "--draft-vocab", 8192]
    assert command(place, "train", *args) == 0
    assert FlashMapDrafter.from_pretrained(tmp_path / "drafter").config.draft_vocab_size is None
