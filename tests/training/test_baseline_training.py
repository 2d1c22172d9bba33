"""`flashmap baselines`: overfitting reaches full acceptance through generate, equal blocks for all, resumable runs."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_drafter import TAPS, K, W, like
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import flashmap_hf
from flashmap_hf import FlashMapDrafter
from flashmap_hf.cli import main
from flashmap_hf.evaluation.baselines import KINDS, Baseline, load
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.baseline_trainer import BaselineObjective, BaselineTrainer
from flashmap_hf.training.baselines import build
from flashmap_hf.training.blocks import draw, make_batch
from flashmap_hf.training.config import TrainConfig
from flashmap_hf.training.features import compute
from flashmap_hf.training.held_out import kept, walk_held_out
from flashmap_hf.training.losses import NAMES
from flashmap_hf.training.run_log import read_rows
from flashmap_hf.training.shards import SequenceFeatures
from flashmap_hf.training.sources import LoadedFeatures
from flashmap_hf.training.train import matrices

ALL = (*KINDS, "flashmap")


@pytest.fixture(scope="module")
def sequences(target: LlamaForCausalLM, answers: list[Answer]) -> list[SequenceFeatures]:
    return [compute(target, a, TAPS, context=8) for a in answers]


def trainer_for(
    kind: str, target: LlamaForCausalLM, sequences: list[SequenceFeatures], folder: Path, **options: Any
) -> BaselineTrainer:
    source, held_out = LoadedFeatures(sequences, TAPS, 8), LoadedFeatures(sequences[:2], TAPS, 8)
    drafter = build(kind, like(target), target, None, source, seed=0)
    fields = {
        "runs": 4, "run_length": 4, "ema": 0.9, "report_to": "none", "features": [folder], "max_steps": 200,
        "optimiser": "muon",
    }  # fmt: skip
    config = TrainConfig(folder, **(fields | options))  # type: ignore[arg-type]
    return BaselineTrainer(drafter, *matrices(target, drafter.config), source, held_out, config)


@pytest.mark.parametrize("kind", KINDS)
def test_overfitting_one_answer_reaches_full_acceptance(
    target: LlamaForCausalLM, answers: list[Answer], sequences: list[SequenceFeatures], tmp_path: Path, kind: str
) -> None:
    """Through the real `generate`: every block of the known answer is accepted whole."""
    trainer = trainer_for(kind, target, [sequences[0]] * 4, tmp_path, muon_lr=0.05, adam_lr=5e-3)
    first = sequences[0].first
    batch = make_batch([sequences[0]] * 2, [first, first + 6], 8, W, K, hidden_size=trainer.final_size)
    for step in range(150):
        trainer.train_step(batch, 1.0 - step / 200)
    prompt, count = torch.tensor([answers[0].prompt_ids]), len(answers[0].response_ids)
    assert trainer.measure()["held_out_tokens_per_step"] > 3.0
    baseline = Baseline(trainer.load_average())  # type: ignore[arg-type]  # a BaselineDrafter
    with flashmap_hf.record() as stats:
        output = baseline.generate(
            target, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, max_new_tokens=count,
            do_sample=False,
        )  # fmt: skip
    assert output[0, prompt.shape[1] :].tolist() == answers[0].response_ids
    assert stats.accepted == stats.drafted > 0
    assert stats.target_steps == 1 + -(-(count - 1) // (K + 1))


def test_the_token_after_each_position(sequences: list[SequenceFeatures]) -> None:
    sequence = sequences[2]
    start, tokens = sequence.first, sequence.tokens.tolist()
    batch = make_batch([sequence], [start], len(tokens) - start, W, K)
    for place, exists in enumerate(batch.taps_mask[0].tolist()):
        position = start - W + place
        assert exists == (position >= 0)
        assert int(batch.following[0, place]) == (tokens[position + 1] if exists else 0)
    assert torch.equal(batch.following[:, W - 1 :], batch.anchors)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_context_equals_one_block_alone(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path, kind: str
) -> None:
    trainer = trainer_for(kind, target, sequences, tmp_path)
    objective: Any = trainer.objective
    batch = make_batch([sequences[1]], [sequences[1].first], 6, W, K)
    endpoints, _ = objective.draft(batch)
    for j in range(6):
        alone = make_batch([sequences[1]], [sequences[1].first + j], 1, W, K)
        torch.testing.assert_close(objective.draft(alone)[0][0], endpoints[j], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_losses(target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path, kind: str) -> None:
    """By hand: cross-entropy of true tokens, distance to what the endpoint stands for, divergence from the law."""
    trainer = trainer_for(kind, target, sequences, tmp_path, kl=1.0, position_decay=0.5)
    objective: Any = trainer.objective
    sequence = sequences[3]
    batch = make_batch([sequence], [sequence.first], 2, W, K, hidden_size=32)
    found = objective(batch, draw(batch, torch.Generator(), hide_share=0.0, start_share=1.0))
    endpoint, logits = objective.draft(batch)
    sums = torch.zeros(3)
    for j in range(2):
        for k in range(K):
            weight = 0.5**k
            token = int(sequence.tokens[sequence.first + j + 1 + k])
            law = logits[j, k].log_softmax(-1)
            final = sequence.taps[sequence.first + j + k, 32:].float()
            truth = objective.unembedding[token] if kind != "eagle" else final
            truth = truth / truth.square().mean().sqrt()
            p = target.lm_head(final).log_softmax(-1)
            sums[0] -= weight * law[token]
            sums[1] += weight * (endpoint[j, k] - truth).square().mean()
            sums[2] += weight * (p.exp() * (p - law)).sum()
    torch.testing.assert_close(found.sums, sums, rtol=1e-3, atol=1e-4)
    assert found.weights.tolist() == [2 * 1.75] * 3


@torch.no_grad()
def test_a_sampled_token_is_kept_as_often_as_rejection_sampling_keeps_it(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged over the true law of a position the rule keeps the sum of min(p, q); greedy answers ask for equality."""
    objective = trainer_for("dflash", target, sequences, tmp_path).objective
    assert isinstance(objective, BaselineObjective)
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(40, generator=generator).softmax(0)
    right = p.cumsum(0)
    sampled = sequences[1]
    wanted = found = 0.0
    for token in range(40):  # the block's first token; q does not depend on it
        tokens = sampled.tokens.clone()
        tokens[sampled.first + 1] = token
        f_left, f_right = sampled.f_left.clone(), sampled.f_right.clone()
        f_left[1], f_right[1] = right[token] - p[token], right[token]
        changed = replace(sampled, tokens=tokens, f_left=f_left, f_right=f_right)
        batch = make_batch([changed], [sampled.first], 1, W, K)
        drafted = objective.draft(batch)
        wanted += float(torch.minimum(p[token], drafted[1][0, 0].softmax(-1)[token]))
        with monkeypatch.context() as patch:
            patch.setattr(objective, "draft", lambda _, drafted=drafted: drafted)
            draws = [bool(kept(objective, batch, generator)[0, 0]) for _ in range(100)]
        found += float(p[token]) * sum(draws) / 100
    assert abs(found - wanted) < 4 * (0.25 / 4000) ** 0.5
    greedy = make_batch([sequences[0]], [sequences[0].first], 5, W, K)
    equal = objective.draft(greedy)[1].argmax(-1) == greedy.labels[0]
    assert torch.equal(kept(objective, greedy, generator), equal)
    walks = walk_held_out(objective, LoadedFeatures(sequences, TAPS, 8), 0)
    assert walks[True].steps > 0 and walks[False].steps > 0


# through the command


@pytest.fixture(scope="module")
def place(target: LlamaForCausalLM, answers: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder, its answers, their features, and a drafter to be like."""
    folder = tmp_path_factory.mktemp("place")
    target.save_pretrained(folder / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "target")
    twice = [replace(a, id=f"{a.id}-{i}") for i in range(2) for a in answers]
    (folder / "answers.jsonl").write_text("".join(json.dumps(asdict(a)) + "\n" for a in twice))
    arguments = ["features", "--target", folder / "target", "--answers", folder / "answers.jsonl", "--out",
                 folder / "features", "--taps", *TAPS]  # fmt: skip
    assert main([str(a) for a in arguments]) == 0
    FlashMapDrafter(like(target, draft_vocab_size=20, target_name=str(folder / "target"))).save_pretrained(
        folder / "like"
    )
    return folder


def command(place: Path, out: Path, *args: Any) -> int:
    arguments = ["baselines", "--target", place / "target", "--features", place / "features", "--out", out,
                 "--like", place / "like", "--runs", 2, "--run-length", 4, "--held-out", 2, "--report-to", "none",
                 *args]  # fmt: skip
    return main([str(a) for a in arguments])


def test_all_kinds_are_trained_on_the_same_blocks_and_loaded(
    place: Path, target: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(place, tmp_path, "--blocks", 33) == 0
    assert capsys.readouterr().out.count("held-out tokens per target step") == 4
    records = {kind: json.loads((tmp_path / kind / "training.json").read_text()) for kind in ALL}
    assert {r["steps"] for r in records.values()} == {5}  # 33 blocks need five steps of eight
    assert len({r["blocks"] for r in records.values()}) == 1
    assert all((r["kind"], r["like"]) == (kind, "like") for kind, r in records.items())
    sizes = {kind: r["parameters"] for kind, r in records.items()}
    assert all(abs(size / sizes["flashmap"] - 1) <= 0.1 for size in sizes.values())
    assert records["flashmap"]["rejection_tokens_per_step_sampled"] >= 1.0
    saved = json.loads((tmp_path / "flashmap" / "generation_config.json").read_text())
    assert saved.get("verification", "auto") == records["flashmap"]["verification"]
    assert len(records["flashmap"]["rejection_joint_sampled"]) == K
    row = records["eagle"]["held_out_history"][-1]
    assert row["held_out_tokens_per_step"] >= 1.0 and row["held_out_tokens_per_step_sampled"] >= 1.0
    assert str(place) not in json.dumps(records) and records["medusa"]["provenance"]["command"]
    flashmap = FlashMapDrafter.from_pretrained(tmp_path / "flashmap")
    for kind in KINDS:
        baseline = load(tmp_path / kind, target)
        assert (baseline.name, baseline.parameters) == (kind, sizes[kind])
        assert torch.equal(baseline.drafter.head.draft_vocab_ids, flashmap.head.draft_vocab_ids)
        assert baseline.drafter.config.tokenizer_hash == flashmap.config.tokenizer_hash is not None
        prompt = torch.tensor([[3, 5, 8]])
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        expected = target.generate(**inputs, do_sample=False, max_new_tokens=12)
        assert torch.equal(baseline.generate(target, inputs, do_sample=False, max_new_tokens=12), expected)


class Killed(Exception):
    pass


@pytest.mark.parametrize("kind", ["eagle", "flashmap"])
def test_a_killed_run_goes_on_with_the_same_loss_curve(
    place: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["--kind", kind, "--blocks", 40, "--log-steps", 1]

    def curve(folder: Path) -> dict[int, list[float]]:
        rows = read_rows(folder / kind / "run")
        return {row["step"]: [row[name] for name in NAMES] for row in rows if "velocity" in row}

    assert command(place, tmp_path / "whole", *args) == 0
    original = BaselineTrainer.train_step

    def train_step(self: Any, *rest: Any) -> Any:
        if self.step == 3:
            raise Killed
        return original(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("flashmap_hf.training.trainer.FlashMapTrainer.train_step", train_step)
        with pytest.raises(Killed):
            command(place, tmp_path / "cut", *args, "--checkpoint-minutes", 1e-9)
    assert not (tmp_path / "cut" / kind / "training.json").exists()
    assert command(place, tmp_path / "cut", *args) == 0
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole") and len(curve(tmp_path / "cut")) == 5
    whole, cut = (load_file(tmp_path / name / kind / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())
    assert command(place, tmp_path / "cut", *args) == 0  # done: written again, the same
    again = load_file(tmp_path / "cut" / kind / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


def test_bad_arguments_are_one_line(
    place: Path, target: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FlashMapDrafter(like(target, tap_layers=[3])).save_pretrained(tmp_path / "other")
    capsys.readouterr()
    for args, message in (
        (["--blocks", 0], "blocks=0: must be at least 1."),
        (["--runs", 0], "runs=0: must be a finite number greater than 0."),
        (["--muon-lr", -1], "muon_lr=-1.0: must be"),
        (["--like", tmp_path / "other"], "sees layers [3] at 4 positions, the features hold [2, 4]"),
        (["--like", tmp_path / "nothing"], "there is no such folder"),
        (["--like", place / "target"], "holds a model of type 'llama', not a FlashMap drafter"),
    ):
        assert command(place, tmp_path / "run", *args) == 2
        error = capsys.readouterr().err
        assert message in error and error.splitlines()[-1].startswith("flashmap: "), error
    assert not (tmp_path / "run").exists()
