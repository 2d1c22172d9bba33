"""The trainer: shared context equals recomputation, overfitting reaches full acceptance, resuming changes nothing."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import flashmap_hf
from flashmap_hf import FlashMapConfig, FlashMapDrafter
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.blocks import draw_u, make_batch
from flashmap_hf.training.config import TrainConfig
from flashmap_hf.training.features import SequenceFeatures, compute
from flashmap_hf.training.trainer import Trainer, shared_context

TAPS = [2, 4]


def build(target: LlamaForCausalLM, **overrides: object) -> FlashMapDrafter:
    torch.manual_seed(0)
    return FlashMapDrafter.from_target(
        target, tap_layers=TAPS, window=4, block_size=3, num_hidden_layers=2, hidden_size=64, intermediate_size=128,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, **overrides,
    )  # fmt: skip


def trainer_for(
    target: LlamaForCausalLM,
    drafter: FlashMapDrafter,
    sequences: list[SequenceFeatures],
    folder: Path,
    **options: object,
) -> Trainer:
    weight = target.get_output_embeddings().weight.detach()
    embeddings = target.get_input_embeddings().weight.detach()
    config = dataclasses.replace(TrainConfig(runs=4, run_length=4, ema=0.9), **options)  # type: ignore[arg-type]
    return Trainer(drafter, embeddings, weight, sequences, sequences[:1], config, folder)


@pytest.fixture(scope="module")
def sequences(target: LlamaForCausalLM, answers: list[Answer]) -> list[SequenceFeatures]:
    return [compute(target, a, TAPS, context=8) for a in answers]


def test_shared_context_equals_the_drafters_own_pass(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    """One function for training and inference: the trainer's endpoint is what `forward` computes from the same taps."""
    drafter = build(target).eval()
    trainer = trainer_for(target, drafter, sequences, tmp_path)
    batch = make_batch([sequences[1]], [sequences[1].first], 5, 4, 3)
    u = draw_u(batch, 0.0, torch.Generator().manual_seed(0))[0]
    context, mask = shared_context(drafter, batch, 4)
    z_0 = drafter.prior(u, None, 5, 3)
    shared = drafter.endpoint(
        z_0, torch.zeros(5), u, trainer.embeddings[batch.anchors[0]], 4 + torch.arange(5), context, mask
    )
    for j in range(5):
        taps, seen = batch.taps[:, j : j + 4], batch.taps_mask[:, j : j + 4]
        alone = drafter(taps, trainer.embeddings[batch.anchors[:, j]], rows=trainer.rows, u=u[j : j + 1], mask=seen)
        torch.testing.assert_close(alone.z_1[0], shared[j], rtol=1e-4, atol=1e-5)


def test_overfitting_one_answer_reaches_full_acceptance(
    target: LlamaForCausalLM, answers: list[Answer], sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    """Through the real `generate`: every block of the known answer is accepted whole."""
    drafter = build(target)
    trainer = trainer_for(target, drafter, [sequences[0]] * 4, tmp_path, max_minutes=60.0, muon_lr=0.05, adam_lr=5e-3)
    batch = make_batch([sequences[0]] * 2, [sequences[0].first, sequences[0].first + 6], 8, 4, 3)
    for step in range(150):
        trainer.train_step(batch, 1.0 - step / 200, torch.Generator().manual_seed(step))
    prompt = torch.tensor([answers[0].prompt_ids])
    count = len(answers[0].response_ids)
    with flashmap_hf.record() as stats:
        output = target.generate(prompt, max_new_tokens=count, do_sample=False, assistant_model=drafter.eval())
    assert output[0, prompt.shape[1] :].tolist() == answers[0].response_ids
    assert stats.accepted == stats.drafted > 0
    # the prefill emits one token, each later step K + 1 until the last
    assert stats.target_steps == 1 + -(-(count - 1) // 4)
    assert trainer.evaluate() > 3.0


def test_resuming_gives_the_same_loss_curve(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    def losses(trainer: Trainer, steps: range) -> list[float]:
        batch = make_batch(sequences[:4], [s.first for s in sequences[:4]], 4, 4, 3)
        return [trainer.train_step(batch, 0.5, torch.Generator().manual_seed(i)).total.item() for i in steps]

    whole = trainer_for(target, build(target), sequences, tmp_path / "a")
    straight = losses(whole, range(6))
    first = trainer_for(target, build(target), sequences, tmp_path / "b")
    (tmp_path / "b").mkdir()
    assert losses(first, range(3)) == straight[:3]
    first.step = 3
    first.save_checkpoint()
    (tmp_path / "b" / "99-state.safetensors.tmp").write_bytes(b"half-written")
    second = trainer_for(target, build(target), sequences, tmp_path / "b")
    assert second.load_checkpoint() and second.step == 3
    second.step = 0  # the average's warm-up counts steps; the plain run above never advanced it
    assert losses(second, range(3, 6)) == straight[3:]
    assert all(torch.equal(second.average[n], whole.average[n]) for n in whole.average)


def test_a_run_stops_at_its_budget_and_exports(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    trainer = trainer_for(target, build(target), sequences, tmp_path, max_minutes=0.03, checkpoint_minutes=0.01)
    trainer.run()
    assert trainer.seconds >= 1.8 and trainer.blocks == trainer.step * 16
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert any("held_out_tokens_per_step" in row for row in rows)
    marker = json.loads((tmp_path / "state.json").read_text())
    assert marker["step"] == trainer.step
    again = trainer_for(target, build(target), sequences, tmp_path, max_minutes=0.03)
    again.run()  # the budget is spent: nothing more is done
    assert again.step == trainer.step
    copy = trainer.averaged_drafter()
    assert all(torch.equal(copy.state_dict()[n], t) for n, t in trainer.average.items())


def test_a_loss_that_is_not_finite_stops_the_run(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    drafter = build(target)
    trainer = trainer_for(target, drafter, sequences, tmp_path)
    with torch.no_grad():
        drafter.norm.weight.fill_(float("nan"))
    batch = make_batch(sequences[:1], [sequences[0].first], 2, 4, 3)
    with pytest.raises(FloatingPointError, match="muon_lr"):
        trainer.train_step(batch, 1.0, torch.Generator())


def test_nothing_to_train_on(target: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sequences is empty"):
        Trainer(
            build(target), target.get_input_embeddings().weight, target.get_output_embeddings().weight, [], [],
            TrainConfig(), tmp_path,
        )  # fmt: skip


def test_a_checkpoint_brings_its_own_draft_vocabulary(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    """More answers at resume would choose other ids: labels and rows must follow the ids that were trained."""
    first = build(target, draft_vocab_size=10)
    first.head.draft_vocab_ids.copy_(torch.arange(10) + 5)
    trainer_for(target, first, sequences, tmp_path).save_checkpoint()
    second = build(target, draft_vocab_size=10)
    trainer = trainer_for(target, second, sequences, tmp_path)
    assert trainer.load_checkpoint()
    assert torch.equal(trainer.rows, target.get_output_embeddings().weight[5:15])
    assert trainer.to_draft[5:15].tolist() == list(range(10)) and trainer.to_draft[0] == -100


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


@pytest.mark.parametrize("options", [{"runs": 0}, {"run_length": 0}, {"runs": 10_000}])
def test_sizes_that_make_no_batch_are_refused(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path, options: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        trainer_for(target, build(target), sequences, tmp_path, **options).run()
