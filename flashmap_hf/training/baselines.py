"""Train the drafters that FlashMap is compared with, and FlashMap beside them: one size, the same blocks in one order.

Each lands in a folder of its kind in --out: config.json, model.safetensors, training.json, and run/ with its
checkpoints. A run in it is resumed; one whose blocks are done is only written again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flashmap_hf import drafters, targets
from flashmap_hf.compatibility import check_target
from flashmap_hf.configuration_flashmap import FlashMapConfig
from flashmap_hf.devices import default_device
from flashmap_hf.evaluation.baselines import CLASSES, KINDS, sized_like
from flashmap_hf.head import unembedding_rows
from flashmap_hf.modeling_flashmap import FlashMapDrafter
from flashmap_hf.options import option
from flashmap_hf.provenance import write_record
from flashmap_hf.training.append_rows import only_writer
from flashmap_hf.training.baseline_trainer import BaselineTrainer
from flashmap_hf.training.checkpoint import MARKER
from flashmap_hf.training.config import TrainConfig
from flashmap_hf.training.rejection import HiddenNoiseObjective, choose_rule
from flashmap_hf.training.sources import FeatureSource, draft_vocabulary, split, stored_features
from flashmap_hf.training.tied_transition import tie
from flashmap_hf.training.train import OWN_FIELDS, check_readout, matrices, record
from flashmap_hf.training.trainer import FlashMapTrainer
from flashmap_hf.training.tree_walk import tree_facts

FLASHMAP = "flashmap"
RUN = "run"  # the folder in a drafter's folder
TREES = (8, 16)  # nodes of trees that the FlashMap drafter is tried with, beside as many as a block has


@dataclass(frozen=True)
class Options:
    """What `flashmap baselines` can be told; what it is not is as in `flashmap train`."""

    features: list[Path] = option(help="folders of `flashmap features`")
    out: Path = option(help="folder of the runs: one of each kind")
    like: str = option(help="the drafter whose size, block and vocabulary they get (a folder or Hub id)")
    blocks: int = option(15360, "blocks that each of them sees")
    kind: Literal["dflash", "eagle", "medusa", "flashmap", "all"] = option("all", "which; flashmap: from scratch, too")
    target: str = option(targets.SMOLLM2.name, "an embedded target, a folder or a Hub id")
    held_out: int = option(64, "as in `flashmap train`")
    runs: int = option(24, "a batch is so many runs of consecutive anchors")
    run_length: int = option(2, "anchors of a run")
    hide_share: float = option(
        0.2, "of flashmap: share of the sampled blocks with hidden noise u; with --kl of half as many greedy ones"
    )
    cross_entropy: float = option(1.0, "weight of the cross-entropy at the endpoint")
    velocity: float = option(0.1, "weight of the regression to what the endpoint stands for")
    kl: float = option(0.0, "weight of KL(target at temperature 1 || drafter)")
    position_decay: float = option(0.85, "position k weighs this to the power k - 1, in every loss")
    optimiser: Literal["adamw", "muon"] = option("adamw", "for matrices; everything else has AdamW")
    muon_lr: float = option(0.02, "peak rate of Muon")
    adam_lr: float = option(5e-4, "peak rate of AdamW")
    ema: float = option(0.995, "decay of the averaged weights per step; they are what is measured and saved")
    checkpoint_minutes: float = option(5.0, "time between checkpoints, with a measurement each")
    log_steps: int = option(20, "steps between two lines of log.jsonl")
    report_to: Literal["auto", "none", "trackio", "tensorboard"] = option("auto", "auto: the first that is installed")
    seed: int = option(0, "of weights and order")

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"blocks={self.blocks}: must be at least 1.")
        self.train_config(FLASHMAP)  # refuses the others

    @property
    def kinds(self) -> Sequence[str]:
        return (*KINDS, FLASHMAP) if self.kind == "all" else (self.kind,)

    @property
    def steps(self) -> int:
        return -(-self.blocks // (self.runs * self.run_length))

    def train_config(self, kind: str) -> TrainConfig:
        """The run of one kind, as `flashmap train` knows it."""
        shared = {f.name for f in fields(TrainConfig)} & {f.name for f in fields(self)}
        values: dict[str, Any] = {name: getattr(self, name) for name in shared}
        steps = self.steps if min(self.runs, self.run_length) > 0 else 1
        return TrainConfig(**(values | {"out": self.out / kind / RUN, "max_steps": steps}))


def main(options: Options) -> None:
    """Load once, train one after the other, and print what each has learnt."""
    drafters.check(options.like)
    like: Any = FlashMapConfig.from_pretrained(options.like)
    device = default_device()
    target, tokenizer = targets.load(options.target, dtype=torch.float32, device=device)
    target.eval()
    check_target(like, target, tokenizer)
    source = stored_features(options.features, target.config.name_or_path or "", like.target_hidden_size)
    if source.tap_layers != like.tap_layers or source.context < like.window:
        raise ValueError(
            f"--like {options.like} sees layers {like.tap_layers} at {like.window} positions, the features hold "
            f"{source.tap_layers} at {source.context}: make features for it."
        )
    if options.kl:
        check_readout(target)
    training, held_out = split(source, options.held_out)
    for kind in options.kinds:
        train(kind, options, like, target, tokenizer, training, held_out)


def train(
    kind: str,
    options: Options,
    like: FlashMapConfig,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    training: FeatureSource,
    held_out: FeatureSource,
) -> Path:
    """One run. Returns the drafter's folder."""
    config = options.train_config(kind)
    folder = config.out.parent
    folder.mkdir(parents=True, exist_ok=True)
    drafter = build(kind, like, target, tokenizer, training, options.seed)
    if kind == FLASHMAP:  # as `flashmap train` does
        tie(drafter.head, options.seed)
    trainer_class = FlashMapTrainer if kind == FLASHMAP else BaselineTrainer
    trainer = trainer_class(drafter, *matrices(target, drafter.config), training, held_out, config)
    config.out.mkdir(exist_ok=True)
    with only_writer(config.out / MARKER):
        trainer.run()
        weights: Any = trainer.load_average()
        facts = record(trainer, training, held_out)
        if kind == FLASHMAP:
            facts |= choose_rule(trainer, held_out)
            own = trainer.objective
            hidden = HiddenNoiseObjective(drafter, own.embeddings, own.unembedding, 1.0)
            hidden.draft_temperature = facts.get("draft_temperature") or 1.0
            facts |= tree_facts(hidden, held_out, [drafter.config.block_size, *TREES], options.seed)
        weights.bfloat16().save_pretrained(folder)
        write_record(folder / "training.json", {"kind": kind, "like": Path(options.like).name} | facts)
    score = trainer.saved_score
    measured = "nothing was held out to measure on" if score is None else f"{score:.3f} held-out tokens per target step"
    print(f"{folder}: {facts['parameters']} parameters, {trainer.blocks} blocks, {measured}", flush=True)
    return folder


def build(
    kind: str,
    like: FlashMapConfig,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    training: FeatureSource,
    seed: int,
) -> Any:
    """An untrained drafter of `kind`, sized like `like`, with the most frequent tokens of `training`."""
    shape = {name: getattr(like, name) for name in (*OWN_FIELDS, "tap_layers")}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter: Any = FlashMapDrafter.from_target(target, tokenizer, **shape)
        if kind != FLASHMAP:
            drafter = CLASSES[kind](sized_like(kind, drafter.config))
            # logits of unit spread, as in `FlashMapDrafter.from_target`
            output_embeddings: Any = target.get_output_embeddings()
            rows = unembedding_rows(output_embeddings, drafter.head.ids[:1024], like.target_hidden_size)
            drafter.head.readout_scale.data.fill_(1.0 / rows.float().square().sum(-1).mean().sqrt())
    if like.draft_vocab_size:
        eos: Any = target.generation_config.eos_token_id
        always = eos if isinstance(eos, list) else [eos] if eos is not None else []
        ids = draft_vocabulary(training, like.draft_vocab_size, always, drafter.config.num_proposable)
        drafter.head.draft_vocab_ids.copy_(ids)
    return drafter.train()
