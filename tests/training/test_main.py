"""From a file of answers to a drafter folder, on a tiny target, through the command."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from flashmap_hf import FlashMapDrafter
from flashmap_hf.training.__main__ import draft_vocabulary, main
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.features import SequenceFeatures, make_features


@pytest.fixture
def folders(target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path) -> dict[str, str]:
    target.save_pretrained(tmp_path / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "target")
    # the first 64 greedy answers are held out, so there must be more
    many = [a for i in range(40) for a in answers]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(asdict(a)) + "\n" for a in many))
    return {name: str(tmp_path / name) for name in ("target", "answers.jsonl", "features", "run")}


def test_features_then_train(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    main(
        ["features", "--answers", folders["answers.jsonl"], "--target", folders["target"], "--out", folders["features"]]
    )
    assert "320 answers" in capsys.readouterr().out
    main(
        ["train", "--features", folders["features"], "--target", folders["target"], "--out", folders["run"],
         "--max-minutes", "0.03", "--layers", "1", "--block-size", "3", "--window", "2", "--draft-vocab", "20",
         "--runs", "2", "--run-length", "4"]
    )  # fmt: skip
    drafter = FlashMapDrafter.from_pretrained(Path(folders["run"]) / "drafter")
    assert drafter.config.block_size == 3 and drafter.config.draft_vocab_size == 20
    assert drafter.config.tokenizer_hash is not None
    record = json.loads((Path(folders["run"]) / "drafter" / "training.json").read_text())
    assert record["held_out_answers"] == 64 and record["blocks"] == record["steps"] * 8
    assert record["held_out_history"][-1]["held_out_tokens_per_step"] == round(record["held_out_tokens_per_step"], 4)
    assert record["provenance"]["versions"]["torch"] == torch.__version__


def test_errors_are_one_line(folders: dict[str, str]) -> None:
    with pytest.raises(SystemExit, match=r"error: .*manifest\.json"):
        main(["train", "--features", folders["run"], "--target", folders["target"], "--out", folders["run"]])
    with pytest.raises(SystemExit, match=r"error: .*nothing"):
        main(["features", "--answers", "nothing.jsonl", "--target", folders["target"], "--out", folders["features"]])


def test_draft_vocabulary_is_the_most_frequent_and_the_end() -> None:
    tokens = torch.tensor([9, 9, 5, 5, 5, 7, 3], dtype=torch.int32)
    empty = torch.zeros(5, dtype=torch.float64)
    sequence = SequenceFeatures(torch.zeros(7, 1), tokens, empty, empty, first=2)
    assert draft_vocabulary([sequence], 3, [30]).tolist() == [5, 7, 30]
    assert draft_vocabulary([sequence], 6, [30]).tolist() == [0, 1, 3, 5, 7, 30]


def test_features_must_fit_each_other_and_the_window(
    target: LlamaForCausalLM, answers: list[Answer], folders: dict[str, str], tmp_path: Path
) -> None:
    target = LlamaForCausalLM.from_pretrained(folders["target"])
    for name, taps in (("one", [2, 4]), ("other", [1, 4])):
        make_features(target, answers[:2], tmp_path / name, taps, context=8)
    rest = ["--target", folders["target"], "--out", folders["run"]]
    with pytest.raises(SystemExit, match=r"error: .*other holds features of layers \[1, 4\]"):
        main(["train", "--features", str(tmp_path / "one"), str(tmp_path / "other"), "--window", "4", *rest])
    with pytest.raises(SystemExit, match=r"error: --window 9: .*keeps 8"):
        main(["train", "--features", str(tmp_path / "one"), "--window", "9", *rest])
