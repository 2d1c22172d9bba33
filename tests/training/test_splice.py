"""The splice test tells a drafter that reads the noise of earlier positions from one that does not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from flashmap_hf import FlashMapDrafter
from flashmap_hf.cli import main
from flashmap_hf.training import blocks
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.features import compute, make_features
from flashmap_hf.training.objective import BlockObjective
from flashmap_hf.training.sources import LoadedFeatures
from flashmap_hf.training.splice import splice
from flashmap_hf.training.train import matrices

TAPS = [2, 4]


class Scripted(nn.Module):
    """Drafts what is right if the noise that it looks at is right: at position k that of position k - `back`."""

    def __init__(self, objective: BlockObjective, u: torch.Tensor, labels: torch.Tensor, back: int):
        super().__init__()
        self.objective, self.u, self.labels, self.back = objective, u, labels, back

    def chain(self, seen: torch.Tensor) -> torch.Tensor:
        known = seen.roll(self.back, dims=1) == self.u.roll(self.back, dims=1)
        known[:, : self.back] = True
        return torch.where(known, self.labels, -1)


@pytest.mark.parametrize(("back", "spliced"), [(1, 0.0), (0, 1.0)])
def test_only_what_reads_earlier_noise_is_hurt(
    target: LlamaForCausalLM, answers: list[Answer], monkeypatch: pytest.MonkeyPatch, back: int, spliced: float
) -> None:
    sequences = [compute(target, a, TAPS, context=8) for a in answers if a.temperature][:1]
    drafter = FlashMapDrafter.from_target(target, tap_layers=TAPS, window=4, block_size=3, num_hidden_layers=1)
    objective = BlockObjective(drafter, *matrices(target, drafter.config), position_decay=1.0)
    script: dict[str, Any] = {}

    def endpoint(z: Any, s: Any, u: torch.Tensor, *rest: Any) -> torch.Tensor:
        script.setdefault("first", u)  # the block's own noise comes first
        script["seen"] = u
        return torch.zeros(*u.shape, 32)

    def chain(objective: BlockObjective, *_: Any) -> torch.Tensor:
        labels = script["labels"]
        return Scripted(objective, script["first"], labels, back).chain(script["seen"])

    original = blocks.make_batch

    def make_batch(*args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        script["labels"] = batch.labels[0]
        return batch

    monkeypatch.setattr(drafter, "endpoint", endpoint)
    monkeypatch.setattr("flashmap_hf.training.held_out.chain", chain)
    monkeypatch.setattr("flashmap_hf.training.splice.make_batch", make_batch)
    rows = splice(objective, LoadedFeatures(sequences, TAPS, 8), seed=0)
    assert [row["position"] for row in rows] == [2, 3]
    assert all(row["own"] == 1.0 and row["spliced"] == spliced for row in rows)
    assert all(row["hidden"] == 0.0 for row in rows)


def test_the_command_writes_a_record(
    target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target.save_pretrained(tmp_path / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "target")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "target")
    make_features(loaded, answers, tmp_path / "all", TAPS)
    make_features(loaded, [a for a in answers if not a.temperature], tmp_path / "greedy", TAPS)
    drafter = FlashMapDrafter.from_target(loaded, tap_layers=TAPS, window=4, block_size=3, num_hidden_layers=1)
    drafter.save_pretrained(tmp_path / "drafter")
    args = ["splice", "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--held-out", "0"]
    assert main([*args, "--features", str(tmp_path / "all"), "--out", str(tmp_path / "splice.json")]) == 0
    record = json.loads((tmp_path / "splice.json").read_text())
    assert record["answers"] == 8 and record["provenance"]["command"]
    capsys.readouterr()
    assert main([*args, "--features", str(tmp_path / "greedy"), "--out", str(tmp_path / "no.json")]) == 2
    assert "No sampled answer" in capsys.readouterr().err and not (tmp_path / "no.json").exists()
