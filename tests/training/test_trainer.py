"""The trainer: shared context equals recomputation, overfitting reaches full acceptance, resuming changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fixed
from torch import nn
from transformers import LlamaForCausalLM

import flashmap_hf
from flashmap_hf import FlashMapConfig, FlashMapDrafter
from flashmap_hf.training import trainer as trainer_module
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.blocks import draw, make_batch
from flashmap_hf.training.config import TrainConfig
from flashmap_hf.training.features import compute
from flashmap_hf.training.held_out import Walk, walk_held_out
from flashmap_hf.training.losses import NAMES
from flashmap_hf.training.objective import shared_context
from flashmap_hf.training.run_log import read_rows
from flashmap_hf.training.shards import SequenceFeatures
from flashmap_hf.training.sources import LoadedFeatures
from flashmap_hf.training.tied_transition import tie
from flashmap_hf.training.train import build_trainer
from flashmap_hf.training.trainer import FlashMapTrainer

TAPS = [2, 4]


def build(target: LlamaForCausalLM, **overrides: Any) -> FlashMapDrafter:
    torch.manual_seed(0)
    return FlashMapDrafter.from_target(
        target, tap_layers=TAPS, window=4, block_size=3, num_hidden_layers=2, hidden_size=64, intermediate_size=128,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, **overrides,
    )  # fmt: skip


def trainer_for(
    target: LlamaForCausalLM, drafter: FlashMapDrafter, sequences: list[SequenceFeatures], folder: Path, **options: Any
) -> FlashMapTrainer:
    fields = {"runs": 4, "run_length": 4, "ema": 0.9, "report_to": "none", "features": [folder], "optimiser": "muon"}
    source = LoadedFeatures(sequences, TAPS, 8)
    held_out = LoadedFeatures(sequences[:2], TAPS, 8)
    return build_trainer(target, drafter, source, held_out, TrainConfig(folder, **(fields | options)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sequences(target: LlamaForCausalLM, answers: list[Answer]) -> list[SequenceFeatures]:
    return [compute(target, a, TAPS, context=8) for a in answers]


def losses_of(folder: Path) -> dict[int, list[float]]:
    return {row["step"]: [row[name] for name in NAMES] for row in read_rows(folder) if "velocity" in row}


class Killed(Exception):
    pass


def kill_before(step: int, trainer: FlashMapTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    original = trainer.train_step

    def train_step(*args: Any) -> Any:
        if trainer.step == step:
            raise Killed
        return original(*args)

    monkeypatch.setattr(trainer, "train_step", train_step)


@pytest.mark.parametrize("anchored", [False, True])
def test_shared_context_equals_the_drafters_own_pass(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path, anchored: bool
) -> None:
    """One function for training and inference: the trainer's endpoint is what `forward` computes from the same taps."""
    drafter = build(target, anchored_slots=anchored).eval()
    objective = trainer_for(target, drafter, sequences, tmp_path).objective
    batch = make_batch([sequences[1]], [sequences[1].first], 5, 4, 3)
    u = draw(batch, torch.Generator().manual_seed(0), hide_share=0.0, start_share=1.0).u[0]
    context, mask = shared_context(drafter, batch, 4)
    z_0 = drafter.prior(u, None, 5, 3)
    shared = drafter.endpoint(
        z_0, torch.zeros(5), u, objective.embeddings[batch.anchors[0]], 4 + torch.arange(5), context, mask
    )
    for j in range(5):
        taps, seen = batch.taps[:, j : j + 4], batch.taps_mask[:, j : j + 4]
        alone = drafter(taps, objective.embeddings[batch.anchors[:, j]], rows=objective.rows, u=u[j : j + 1], mask=seen)
        torch.testing.assert_close(alone.z_1[0], shared[j], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transition_rank", [None, 8])
def test_overfitting_one_answer_reaches_full_acceptance(
    target: LlamaForCausalLM,
    answers: list[Answer],
    sequences: list[SequenceFeatures],
    tmp_path: Path,
    transition_rank: int | None,
) -> None:
    """Through the real `generate`: every block of the known answer is accepted whole."""
    drafter = build(target, transition_rank=transition_rank)
    trainer = trainer_for(target, drafter, [sequences[0]] * 4, tmp_path, max_steps=200, muon_lr=0.05, adam_lr=5e-3)
    batch = make_batch([sequences[0]] * 2, [sequences[0].first, sequences[0].first + 6], 8, 4, 3)
    for step in range(150):
        trainer.train_step(batch, 1.0 - step / 200)
    prompt = torch.tensor([answers[0].prompt_ids])
    count = len(answers[0].response_ids)
    assert trainer.measure()["held_out_tokens_per_step"] > 3.0
    drafter = trainer.load_average()
    with flashmap_hf.record() as stats:
        output = target.generate(prompt, max_new_tokens=count, do_sample=False, assistant_model=fixed(drafter))
    assert output[0, prompt.shape[1] :].tolist() == answers[0].response_ids
    assert stats.accepted == stats.drafted > 0
    # the prefill emits one token, each later step K + 1 until the last
    assert stats.target_steps == 1 + -(-(count - 1) // 4)


@pytest.mark.parametrize("transition_rank", [None, 8])
def test_a_killed_run_goes_on_with_the_same_loss_curve(
    target: LlamaForCausalLM,
    sequences: list[SequenceFeatures],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transition_rank: int | None,
) -> None:
    def new() -> FlashMapDrafter:
        drafter = build(target, transition_rank=transition_rank)
        tie(drafter.head, 0)
        return drafter

    options = {"max_steps": 9, "runs": 2, "log_steps": 1}
    whole = trainer_for(target, new(), sequences[:3], tmp_path / "whole", **options)
    whole.run()
    assert whole.epoch > 0  # the order of a second epoch is resumed, too
    killed = trainer_for(target, new(), sequences[:3], tmp_path / "cut", **options, checkpoint_minutes=1e-9)
    kill_before(7, killed, monkeypatch)
    with pytest.raises(Killed):
        killed.run()
    assert json.loads((tmp_path / "cut" / "state.json").read_text())["step"] == 7
    (tmp_path / "cut" / "99-state.safetensors.tmp").write_bytes(b"half-written")
    with (tmp_path / "cut" / "log.jsonl").open("a") as log:
        log.write('{"step": 8, "vel')
    again = trainer_for(target, new(), sequences[:3], tmp_path / "cut", **options)
    again.run()
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")
    assert sorted(losses_of(tmp_path / "whole")) == list(range(1, 10))
    assert 9 * 2 <= again.blocks == whole.blocks <= 9 * 2 * 4
    assert all(torch.equal(again.average[n], t) for n, t in whole.average.items())


def test_a_run_stops_at_its_minutes_and_exports(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    trainer = trainer_for(target, build(target), sequences, tmp_path, max_minutes=0.02, checkpoint_minutes=0.01)
    trainer.run()
    assert trainer.seconds >= 1.2 and trainer.step <= trainer.blocks <= trainer.step * 16
    measured = [row for row in read_rows(tmp_path) if "held_out_tokens_per_step" in row]
    assert len(measured) >= 1 and measured[-1]["step"] == trainer.step
    assert json.loads((tmp_path / "state.json").read_text())["step"] == trainer.step
    again = trainer_for(target, build(target), sequences, tmp_path, max_minutes=0.02)
    again.run()  # the budget is spent: nothing more is done
    assert again.step == trainer.step
    drafter = again.load_average()
    state = drafter.state_dict()
    assert all(torch.equal(state[n], t) for n, t in trainer.average.items())


def test_patience_stops_and_keeps_the_best(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_for(
        target, build(target), sequences, tmp_path, max_steps=50, runs=2, checkpoint_minutes=1e-9, patience=2
    )
    scores = iter([1.5, 1.7, 1.6, 1.7, 9.9])

    def walked(score: float) -> Walk:
        return Walk(steps=100, tokens=round(100 * score), joint=[0])

    monkeypatch.setattr(
        "flashmap_hf.training.held_out.walk_held_out",
        lambda _, part, seed: {False: walked(next(scores) if part is trainer.held_out else 0.0), True: Walk()},
    )
    kept: list[dict[str, torch.Tensor]] = []
    original = trainer.measure

    def measure() -> Any:
        row = original()
        kept.append({n: t.clone() for n, t in trainer.average.items()})
        return row

    monkeypatch.setattr(trainer, "measure", measure)
    trainer.run()
    assert trainer.step == 4 and trainer.best == 1.7
    state = trainer.load_average().state_dict()
    assert all(torch.equal(state[n], t) for n, t in kept[1].items())


def test_the_gap_to_answers_it_is_trained_on_is_measured(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    trainer = trainer_for(target, build(target), sequences[2:], tmp_path, max_steps=200, muon_lr=0.05, adam_lr=5e-3)
    trained = [trainer.seen[0], trainer.seen[1]]
    assert trained[0] is sequences[2] and trained[1] is sequences[5]  # spread over the source; one greedy, one sampled
    trainer.held_out, batch = (
        LoadedFeatures(sequences[:2], TAPS, 8),
        make_batch(trained, [s.first for s in trained], 16, 4, 3),
    )
    for _ in range(150):
        trainer.train_step(batch, 1.0)
    row = trainer.measure()
    assert row["trained_tokens_per_step"] > 3.0 and row["trained_tokens_per_step_sampled"] > 2.0
    assert row["held_out_tokens_per_step"] < 2.0


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    drafter = build(target)
    trainer = trainer_for(target, drafter, sequences, tmp_path, max_steps=2, runs=2)
    trainer.run()
    good = (tmp_path / "2-state.safetensors").read_bytes()
    again = trainer_for(target, drafter, sequences, tmp_path, max_steps=9, runs=2)
    again.load_checkpoint()
    with torch.no_grad():
        drafter.norm.weight.fill_(float("nan"))
    batch = make_batch(sequences[:1], [sequences[0].first], 2, 4, 3)
    with pytest.raises(FloatingPointError, match="muon-lr"):
        again.train_step(batch, 1.0)
    assert (tmp_path / "2-state.safetensors").read_bytes() == good


def test_losses_are_chosen_by_weight(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    """Each loss alone moves the drafter; a weight of zero leaves the loss out of the sum."""
    batch = make_batch(sequences[:4], [s.first for s in sequences[:4]], 4, 4, 3, hidden_size=32)
    for name in NAMES:
        weights = {**dict.fromkeys(NAMES, 0.0), name: 2.0}
        trainer = trainer_for(target, build(target), sequences, tmp_path, max_steps=9, **weights)
        loss, each, _ = trainer.losses(batch)
        assert loss.item() == pytest.approx(2.0 * each[NAMES.index(name)].item(), rel=1e-5)
        first = each[NAMES.index(name)].item()
        for _ in range(10):
            trainer.train_step(batch, 1.0)
        assert trainer.losses(batch)[1][NAMES.index(name)].item() < first


def test_kl_reads_the_targets_law_off_its_final_state(
    target: LlamaForCausalLM, answers: list[Answer], sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    trainer = trainer_for(target, build(target), sequences, tmp_path, kl=1.0)
    answer = answers[0]
    batch = make_batch([sequences[0]], [sequences[0].first], 4, 4, 3, hidden_size=32)
    ids = torch.tensor([answer.prompt_ids + answer.response_ids])
    logits = target(ids).logits[0, len(answer.prompt_ids) : len(answer.prompt_ids) + 6]  # after the first anchor
    found = nn.functional.linear(batch.final[0], trainer.objective.rows)
    torch.testing.assert_close(found, logits, rtol=0.02, atol=0.02)  # features are bfloat16
    final = build(target)
    final.config.tap_layers = [1, 2]
    with pytest.raises(ValueError, match=r"kl=1\.0 needs the final layer"):
        trainer_for(target, final, sequences, tmp_path, kl=1.0)


def test_a_batch_without_a_whole_block_is_logged_as_json(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    trainer = trainer_for(target, build(target), sequences, tmp_path)
    end = len(sequences[0].tokens)
    batch = make_batch([sequences[0]], [end - 2], 2, 4, 3)  # one token follows, a block has three
    losses, correct = trainer.train_step(batch, 1.0)
    trainer.log(batch, losses, correct, 1.0)
    assert "NaN" not in (tmp_path / "log.jsonl").read_text() and read_rows(tmp_path)[-1]["joint"] == []


def test_nothing_to_train_on(target: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="source is empty"):
        trainer_for(target, build(target), [], tmp_path)


def test_a_checkpoint_brings_its_own_draft_vocabulary(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    """More answers at resume would choose other ids: labels and rows must follow the ids that were trained."""
    first = build(target, draft_vocab_size=10)
    first.head.draft_vocab_ids.copy_(torch.arange(10) + 5)
    trainer_for(target, first, sequences, tmp_path).save_checkpoint()
    trainer = trainer_for(target, build(target, draft_vocab_size=10), sequences, tmp_path)
    assert trainer.load_checkpoint()
    assert torch.equal(trainer.objective.rows, target.get_output_embeddings().weight[5:15])
    assert trainer.objective.to_draft[5:15].tolist() == list(range(10)) and trainer.objective.to_draft[0] == -100


def test_a_run_that_trained_other_tensors_is_not_resumed(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    """As a version without tied transitions did."""
    trainer_for(target, build(target, transition_rank=4), sequences, tmp_path, max_steps=1).run()
    drafter = build(target, transition_rank=4)
    tie(drafter.head, 0)
    before = (tmp_path / "state.json").read_bytes()
    with pytest.raises(ValueError, match=r"another version.*--drafter"):
        trainer_for(target, drafter, sequences, tmp_path, max_steps=2).run()
    assert (tmp_path / "state.json").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value"), [("block_size", 2), ("window", 3), ("num_hidden_layers", 1), ("coupling", "independent")]
)
def test_a_run_is_not_resumed_with_another_drafter(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path, name: str, value: object
) -> None:
    trainer_for(target, build(target), sequences, tmp_path).save_checkpoint()
    fields = build(target).config.to_dict() | {name: value}
    other = trainer_for(target, FlashMapDrafter(FlashMapConfig.from_dict(fields)), sequences, tmp_path)
    with pytest.raises(ValueError, match=rf"holds a run with {name}=\w+, not {value}"):
        other.load_checkpoint()


@pytest.mark.parametrize(("kl", "expected"), [(0.0, 0.0), (0.5, 0.3)])
def test_greedy_blocks_hide_their_noise_only_where_kl_gives_them_a_law(
    target: LlamaForCausalLM,
    sequences: list[SequenceFeatures],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kl: float,
    expected: float,
) -> None:
    shares: list[float] = []

    def noted(*args: Any, hide_greedy: float, **rest: Any) -> Any:
        shares.append(hide_greedy)
        return draw(*args, hide_greedy=hide_greedy, **rest)

    monkeypatch.setattr(trainer_module, "draw", noted)
    trainer = trainer_for(target, build(target), sequences, tmp_path, kl=kl, hide_share=0.6, max_steps=1)
    trainer.train_step(next(iter(trainer.batches())), 1.0)
    assert shares == [expected]


def test_sizes_that_make_no_batch_are_refused(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="runs=10000"):
        trainer_for(target, build(target), sequences, tmp_path, runs=10_000).run()


def test_the_walk_equals_generate(
    target: LlamaForCausalLM, answers: list[Answer], sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    """The simulated tokens per step of a greedy answer are those of the real `generate`, but for its prefill."""
    drafter = build(target)
    trainer = trainer_for(target, drafter, sequences, tmp_path, max_steps=200)
    batch = make_batch(sequences[:4], [s.first for s in sequences[:4]], 8, 4, 3)
    for _ in range(25):  # half trained: some blocks are accepted, others are not
        trainer.train_step(batch, 1.0)
    drafter.eval()
    walk = walk_held_out(trainer.objective, LoadedFeatures([sequences[2]], TAPS, 8), seed=0)[False]
    prompt = torch.tensor([answers[2].prompt_ids])
    count = len(answers[2].response_ids)
    with flashmap_hf.record() as stats:
        target.generate(prompt, max_new_tokens=count, do_sample=False, assistant_model=fixed(drafter))
    assert 0 < stats.accepted < stats.drafted
    # the walk ends in a full block, generate at its last token: the accepted ones are counted on both sides
    assert walk.steps == stats.target_steps - 1
    assert walk.joint[: len(stats.accepted_by_position)] == stats.accepted_by_position
