"""Train a drafter on a target's own answers, or adapt one: resumes from --out until its budget is spent."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flashmap_hf import targets
from flashmap_hf.compatibility import check_target
from flashmap_hf.conditioning import default_tap_layers
from flashmap_hf.configuration_flashmap import FlashMapConfig
from flashmap_hf.devices import choose_dtype, default_device
from flashmap_hf.head import unembedding_rows
from flashmap_hf.modeling_flashmap import FlashMapDrafter, config_for_target
from flashmap_hf.provenance import write_record
from flashmap_hf.training import run_log
from flashmap_hf.training.answer_folder import answer_files, check_out, read_answer_folder
from flashmap_hf.training.append_rows import only_writer
from flashmap_hf.training.checkpoint import MARKER
from flashmap_hf.training.config import TrainConfig
from flashmap_hf.training.dry_run_report import described, reckon
from flashmap_hf.training.features import Options as FeatureOptions
from flashmap_hf.training.features import check_answerer
from flashmap_hf.training.lora import ADAPTER, add_adapter, save_adapter
from flashmap_hf.training.rejection import choose_rule
from flashmap_hf.training.sources import FeatureSource, OnlineFeatures, draft_vocabulary, split, stored_features
from flashmap_hf.training.tied_transition import tie, tie_tables
from flashmap_hf.training.trainer import FlashMapTrainer

Options = TrainConfig
DRAFTER = "drafter"  # the folder in a run's folder
# what a configuration says of the drafter itself, not of its target
OWN_FIELDS = (
    "window", "block_size", "coupling", "num_steps", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "initializer_range", "head",
    "head_rank", "draft_vocab_size", "transition_rank", "anchored_slots",
)  # fmt: skip


def main(config: TrainConfig) -> None:
    """Load, train, and write `<out>/drafter` (and `<out>/adapter`) with `training.json` beside the weights."""
    if config.dry_run:
        reckon(config)
        return
    train(config)


def train(config: TrainConfig) -> Path:
    """The whole run. Returns the folder of the drafter, or of the adapter."""
    check_out(config.out)
    run_log.tracker(config.report_to)  # what is not installed is named before anything is loaded
    if config.answers is not None:
        answer_files(config.answers)
    device = default_device()
    dtype = choose_dtype("auto", device) if config.online else torch.float32 if config.kl else None
    # with stored features two matrices are all that is read of it
    target, tokenizer = targets.load(config.target, dtype=dtype, device=device if config.online else "cpu")
    target.eval()
    if config.answers is not None:
        check_answerer(config.answers, target, tokenizer)
    source = build_source(target, config)
    window = config.window if config.config is None else described(config.config).window
    if window > source.context and config.drafter is None:  # those positions exist when generating
        raise ValueError(
            f"--window {window}: the features keep {source.context} positions of a prompt; lower it, or make "
            "features with a larger --context."
        )
    if config.kl:
        check_readout(target)
    training, held_out = split(source, config.held_out)
    drafter = build_drafter(target, tokenizer, training, config)
    if config.drafter is None:
        tie(drafter.head, config.seed)
    elif config.lora is None:  # adapters are made for the tables
        tie_tables(drafter.head, *matrices(target, drafter.config))
    adapted = add_adapter(drafter, config.lora) if config.lora is not None else None
    trainer = build_trainer(target, drafter, training, held_out, config)
    del target
    main_process = trainer.accelerator.is_main_process
    if main_process:
        print(
            f"{len(training)} answers, {response_tokens(training)} response tokens, {len(held_out)} held out; "
            f"{sum(p.numel() for p in trainer.named.values())} parameters to train",
            flush=True,
        )
    with only_writer(config.out / MARKER) if main_process else nullcontext():
        trainer.run()
        folder = config.out / (ADAPTER if adapted is not None else DRAFTER)
        if main_process:
            export(trainer, adapted, training, held_out)
            score = "nothing was held out to measure on"
            if trainer.saved_score is not None:
                score = f"{trainer.saved_score:.3f} held-out tokens per target step (simulated)"
            print(f"{folder}: {score}, {trainer.blocks} blocks")
    trainer.accelerator.wait_for_everyone()
    return folder


def export(
    trainer: FlashMapTrainer, adapted: PeftModel | None, training: FeatureSource, held_out: FeatureSource
) -> None:
    """Write the averaged weights: the drafter in bfloat16, or its adapter (and both with --merge), with the record."""
    config, drafter = trainer.config, trainer.load_average()
    facts = record(trainer, training, held_out)
    if adapted is None:
        facts |= choose_rule(trainer, held_out)
    written = []
    if adapted is not None:
        save_adapter(adapted, config.out / ADAPTER, str(config.drafter))
        written.append(config.out / ADAPTER)
    if adapted is None or config.merge:
        whole: Any = drafter if adapted is None else adapted.merge_and_unload()
        whole.bfloat16().save_pretrained(config.out / DRAFTER)
        written.append(config.out / DRAFTER)
    for folder in written:
        write_record(folder / "training.json", facts)


@torch.inference_mode()
def check_readout(target: PreTrainedModel) -> None:
    """Raise ValueError where the target's law is not its final hidden state times its unembedding, which --kl reads."""
    ids = torch.arange(min(64, target.config.get_text_config().vocab_size), device=target.device)[None]
    output = target(ids, output_hidden_states=True, use_cache=False)
    output_embeddings: Any = target.get_output_embeddings()
    size = output.hidden_states[-1].shape[-1]
    rows = unembedding_rows(output_embeddings, output.logits.shape[-1], size)
    read = torch.nn.functional.linear(output.hidden_states[-1].float(), rows.float()).log_softmax(-1)
    law = output.logits.float().log_softmax(-1)
    if float((law.exp() * (law - read)).sum(-1).max()) > 1e-3:  # nats
        raise ValueError(
            f"--kl: the logits of {type(target).__name__} are more than its final hidden state times its unembedding "
            "(a bias, a scale or a cap): train without --kl."
        )


def build_source(target: PreTrainedModel, config: TrainConfig) -> FeatureSource:
    """The features of the run, from files or from the target itself."""
    if config.answers is None:
        return stored_features(
            config.features, target.config.name_or_path or "", target.config.get_text_config().hidden_size
        )
    taps = default_tap_layers(target.config.get_text_config().num_hidden_layers)
    defaults = FeatureOptions(config.answers, config.out)
    return OnlineFeatures(target, read_answer_folder(config.answers), taps, defaults.context, defaults.max_length)


def build_drafter(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, training: FeatureSource, config: TrainConfig
) -> FlashMapDrafter:
    """An untrained drafter of the asked shape, or the one to start from, in float32."""
    if config.drafter is not None:
        drafter: FlashMapDrafter = FlashMapDrafter.from_pretrained(config.drafter, dtype=torch.float32)
        check_target(drafter.config, target, tokenizer)
        if drafter.config.tap_layers != training.tap_layers or drafter.config.window > training.context:
            raise ValueError(
                f"The drafter {config.drafter} sees layers {drafter.config.tap_layers} at {drafter.config.window} "
                f"positions, the features hold {training.tap_layers} at {training.context}: make features for it."
            )
        return drafter.train()
    overrides = shape_overrides(target, tokenizer, training, config)
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        drafter = FlashMapDrafter.from_target(target, tokenizer, tap_layers=training.tap_layers, **overrides)
    if drafter.config.draft_vocab_size:
        eos: Any = target.generation_config.eos_token_id
        always = eos if isinstance(eos, list) else [eos] if eos is not None else []
        proposable = drafter.config.num_proposable
        drafter.head.draft_vocab_ids.copy_(draft_vocabulary(training, drafter.head.size, always, proposable))
    return drafter.train()


def shape_overrides(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, training: FeatureSource, config: TrainConfig
) -> dict[str, Any]:
    """Fields of the drafter's configuration, from the options or from the file that --config names."""
    if config.config is not None:
        asked = described(config.config)
        check_target(asked, target, tokenizer)
        if asked.tap_layers != training.tap_layers:
            raise ValueError(
                f"{config.config} sees layers {asked.tap_layers}, the features hold {training.tap_layers}: make "
                f"features with --taps {' '.join(map(str, asked.tap_layers or []))}."
            )
        return {name: getattr(asked, name) for name in OWN_FIELDS}
    overrides: dict[str, Any] = {"hidden_size": config.hidden_size} if config.hidden_size else {}
    proposable = config_for_target(target, tokenizer).num_proposable
    draft_vocab = config.draft_vocab if 0 < config.draft_vocab < proposable else None
    if config.head_rank:
        overrides |= {"head": "low_rank", "head_rank": config.head_rank}
    return overrides | {
        "window": config.window,
        "block_size": config.block_size,
        "num_hidden_layers": config.layers,
        "coupling": config.coupling,
        "draft_vocab_size": draft_vocab,
        "transition_rank": config.transition_rank,
    }


def build_trainer(
    target: PreTrainedModel,
    drafter: FlashMapDrafter,
    training: FeatureSource,
    held_out: FeatureSource,
    config: TrainConfig,
) -> FlashMapTrainer:
    """The trainer, with what it reads of the target."""
    return FlashMapTrainer(drafter, *matrices(target, drafter.config), training, held_out, config)


@torch.no_grad()
def matrices(target: PreTrainedModel, config: FlashMapConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Input embeddings and unembedding of the target, `[V, D]` float32 each."""
    ids = torch.arange(config.vocab_size, device=target.device)
    output_embeddings: Any = target.get_output_embeddings()
    rows = unembedding_rows(output_embeddings, config.vocab_size, config.target_hidden_size)
    return target.get_input_embeddings()(ids).float(), rows.float()


def response_tokens(source: FeatureSource) -> int:
    return sum(length - first for first, length in map(source.first_and_length, range(len(source))))


def record(trainer: FlashMapTrainer, training: FeatureSource, held_out: FeatureSource) -> dict[str, Any]:
    """What `training.json` holds beside its provenance."""
    drafter = trainer.drafter
    return {
        "config": trainer.config.record(),
        "processes": trainer.accelerator.num_processes,
        "precision": trainer.accelerator.mixed_precision,
        "blocks": trainer.blocks,
        "steps": trainer.step,
        "epochs": trainer.epoch,
        "minutes": trainer.seconds / 60,
        "blocks_per_second": trainer.blocks / trainer.seconds if trainer.seconds else None,
        "answers": len(training),
        "sampled_answers": sum(training.sampled(i) for i in range(len(training))),
        "response_tokens": response_tokens(training),
        "held_out_answers": len(held_out),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "held_out_tokens_per_step": trainer.saved_score,
        "held_out_history": run_log.held_out_history(trainer.folder),
    }
