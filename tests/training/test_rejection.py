"""Held-out answers under rejection sampling, and the rule that a trained drafter gets."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_drafter import TAPS, K, W, like
from transformers import LlamaForCausalLM

from flashmap_hf import FlashMapDrafter
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.blocks import make_batch
from flashmap_hf.training.config import TrainConfig
from flashmap_hf.training.features import compute
from flashmap_hf.training.rejection import DRAFT_TEMPERATURES, HiddenNoiseObjective, choose_rule
from flashmap_hf.training.shards import SequenceFeatures
from flashmap_hf.training.sources import LoadedFeatures
from flashmap_hf.training.train import matrices
from flashmap_hf.training.trainer import FlashMapTrainer


@pytest.fixture(scope="module")
def sequences(target: LlamaForCausalLM, answers: list[Answer]) -> list[SequenceFeatures]:
    return [compute(target, a, TAPS, context=8) for a in answers]


def trainer_for(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], folder: Path, hide_share: float, **overrides: Any
) -> FlashMapTrainer:
    torch.manual_seed(0)
    drafter = FlashMapDrafter(like(target, **overrides))
    source = LoadedFeatures(sequences, TAPS, 8)
    config = TrainConfig(
        folder, runs=4, run_length=4, ema=0.9, report_to="none", features=[folder], max_steps=200, muon_lr=0.05,
        adam_lr=5e-3, hide_share=hide_share,
    )  # fmt: skip
    return FlashMapTrainer(drafter, *matrices(target, drafter.config), source, source, config)


def test_hidden_noise_is_the_law_of_rejection_sampling(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures]
) -> None:
    """What FlashMap's own forward says without noise, the transition on the true tokens."""
    torch.manual_seed(0)
    drafter = FlashMapDrafter(like(target, transition_rank=4)).eval()
    torch.nn.init.normal_(drafter.head.transition.readout.weight)  # type: ignore[union-attr]  # it has one
    objective = HiddenNoiseObjective(drafter, *matrices(target, drafter.config), 1.0)
    batch = make_batch([sequences[1]], [sequences[1].first], 5, W, K)
    endpoints, logits = objective.draft(batch)
    for j in range(5):
        alone = drafter(
            batch.taps[:, j : j + W], objective.embeddings[batch.anchors[:, j]], rows=objective.rows,
            mask=batch.taps_mask[:, j : j + W],
        )  # fmt: skip
        torch.testing.assert_close(alone.z_1[0], endpoints[j], rtol=1e-4, atol=1e-5)
        previous = torch.cat([batch.anchors[:, j], batch.labels[0, j, :-1]])
        torch.testing.assert_close(
            drafter.head.biased(alone.logits[0], alone.z_1[0], previous), logits[j], rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize(("hide_share", "rule"), [(0.0, "auto"), (1.0, "rejection")])
def test_the_better_rule_goes_into_the_generation_config(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path, hide_share: float, rule: str
) -> None:
    """One sampled answer learnt by heart: from its noise, or without it, what noise does being left to chance."""
    sampled = next(s for s in sequences if s.sampled)
    trainer = trainer_for(target, [sampled] * 4, tmp_path, hide_share)
    batch = make_batch([sampled] * 2, [sampled.first, sampled.first + 6], 8, W, K)
    for step in range(100):
        trainer.train_step(batch, 1.0 - step / 200)
    drafter = trainer.load_average()
    if rule == "rejection":
        torch.nn.init.normal_(drafter.noise_embedding.u_out.weight, std=30.0)
    saved: Any = drafter.generation_config
    saved.verification = "one_hot"
    facts = choose_rule(trainer, LoadedFeatures([sampled], TAPS, 8))
    rates = facts["shared_noise_tokens_per_step_sampled"], facts["rejection_tokens_per_step_sampled"]
    by_heat = facts["rejection_by_draft_temperature"]
    assert rates[1] == max(by_heat.values()) and len(by_heat) == len(DRAFT_TEMPERATURES)
    heat = facts["draft_temperature"]
    assert heat is None if rule == "auto" else by_heat[str(heat)] == rates[1]
    assert max(rates) > 3.0 and (rates[1] > rates[0]) == (rule == "rejection")
    assert saved.verification == facts["verification"] == rule
    drafter.save_pretrained(tmp_path / "saved")
    loaded: Any = FlashMapDrafter.from_pretrained(tmp_path / "saved").generation_config
    assert loaded.verification == rule and loaded.draft_temperature == heat


def test_no_rule_is_chosen_without_sampled_answers_or_with_independent_noise(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path
) -> None:
    greedy = LoadedFeatures([s for s in sequences if not s.sampled], TAPS, 8)
    whole = LoadedFeatures(sequences, TAPS, 8)
    for coupling, held_out in (("quantile", greedy), ("independent", whole)):
        trainer = trainer_for(target, sequences, tmp_path, 0.2, coupling=coupling)
        config: Any = trainer.load_average().generation_config
        config.verification = "one_hot"
        assert choose_rule(trainer, held_out) == {}
        assert config.verification == "one_hot"
