"""`python -m flashmap_hf.training features|train`: from a file of the target's answers to a drafter folder."""

import argparse
import dataclasses
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flashmap_hf import targets
from flashmap_hf.conditioning import default_tap_layers
from flashmap_hf.head import unembedding_rows
from flashmap_hf.modeling_flashmap import FlashMapDrafter
from flashmap_hf.provenance import provenance
from flashmap_hf.training.answers import read_answers
from flashmap_hf.training.config import TrainConfig
from flashmap_hf.training.features import Manifest, SequenceFeatures, make_features, read_shard
from flashmap_hf.training.trainer import Trainer

HELD_OUT = 64  # greedy answers that no block is taken from


def draft_vocabulary(sequences: Iterable[SequenceFeatures], size: int, always: Sequence[int]) -> torch.Tensor:
    """The `size` most frequent response tokens, `always` among them, in ascending order. `[size]`"""
    counts: Counter[int] = Counter()
    for sequence in sequences:
        counts.update(sequence.tokens[sequence.first :].tolist())
    ranked = list(dict.fromkeys([*always, *(token for token, _ in counts.most_common())]))
    if len(ranked) < size:
        known = set(ranked)
        ranked += [i for i in range(size + len(known)) if i not in known]
    return torch.tensor(sorted(ranked[:size]))


def build_drafter(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[SequenceFeatures],
    taps: list[int],
    args: argparse.Namespace,
) -> FlashMapDrafter:
    """An untrained drafter of the asked shape with its draft vocabulary filled."""
    torch.manual_seed(args.seed)
    drafter = FlashMapDrafter.from_target(
        target, tokenizer, tap_layers=taps, window=args.window, block_size=args.block_size,
        num_hidden_layers=args.layers, coupling=args.coupling, draft_vocab_size=args.draft_vocab,
    )  # fmt: skip
    if args.draft_vocab:
        eos = target.generation_config.eos_token_id
        always = eos if isinstance(eos, list) else [eos] if eos is not None else []
        drafter.head.draft_vocab_ids.copy_(draft_vocabulary(sequences, args.draft_vocab, always))
    return drafter


def features(args: argparse.Namespace) -> None:
    target, _ = targets.load(args.target, dtype=torch.float32)
    answers = list(read_answers(args.answers))
    random.Random(args.seed).shuffle(answers)
    layers = target.config.get_text_config().num_hidden_layers
    manifest = make_features(target.eval(), answers[: args.limit], args.out, default_tap_layers(layers))
    total = {name: sum(int(row[name]) for row in manifest.shards) for name in ("answers", "tokens")}
    skipped = f"skipped: {manifest.skipped_empty} empty, {manifest.skipped_long} too long"
    print(f"{total['answers']} answers, {total['tokens']} response tokens; {skipped}")


def train(args: argparse.Namespace) -> None:
    target, tokenizer = targets.load(args.target, dtype=torch.float32)
    manifests = [(folder, Manifest.read(folder)) for folder in args.features]
    for folder, manifest in manifests:
        if manifest.target != target.config.name_or_path:
            raise ValueError(f"{folder} holds features of {manifest.target}, not of {target.config.name_or_path}.")
        if manifest.tap_layers != manifests[0][1].tap_layers:
            raise ValueError(
                f"{folder} holds features of layers {manifest.tap_layers}, {manifests[0][0]} of "
                f"{manifests[0][1].tap_layers}: train on one of them."
            )
        if args.window > manifest.context:  # those positions exist when generating
            raise ValueError(
                f"--window {args.window}: {folder} keeps {manifest.context} positions of a prompt; lower it."
            )
    sequences = [s for folder, manifest in manifests for row in manifest.shards for s in read_shard(folder, row)]
    greedy = [s for s in sequences if not bool((s.f_right > 0).any())]
    held_out, chosen = greedy[:HELD_OUT], {id(s) for s in greedy[:HELD_OUT]}
    sequences = [s for s in sequences if id(s) not in chosen]
    drafter = build_drafter(target, tokenizer, sequences, manifests[0][1].tap_layers, args)
    names = {f.name for f in dataclasses.fields(TrainConfig)}
    config = TrainConfig(**{n: v for n, v in vars(args).items() if n in names and v is not None})
    with torch.no_grad():
        embeddings = target.get_input_embeddings()(torch.arange(drafter.config.vocab_size))
        unembedding = unembedding_rows(
            target.get_output_embeddings(), drafter.config.vocab_size, drafter.config.target_hidden_size
        )
    trainer = Trainer(drafter, embeddings, unembedding.float(), sequences, held_out, config, args.out)
    tokens, parameters = sum(len(s.f_left) for s in sequences), sum(p.numel() for p in drafter.parameters())
    print(f"{len(sequences)} answers, {tokens} response tokens, {len(held_out)} held out; {parameters} parameters")
    trainer.run()
    tokens_per_step = trainer.evaluate()
    folder = args.out / "drafter"
    trainer.averaged_drafter().bfloat16().save_pretrained(folder)
    record = {
        "provenance": provenance(), "config": dataclasses.asdict(config), "blocks": trainer.blocks,
        "steps": trainer.step, "epochs": trainer.epoch, "minutes": trainer.seconds / 60, "answers": len(sequences),
        "response_tokens": tokens, "held_out_answers": len(held_out), "parameters": parameters,
        "held_out_tokens_per_step": tokens_per_step,
        "held_out_history": trainer.history(),
    }  # fmt: skip
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{folder}: {tokens_per_step:.3f} held-out tokens per target step (simulated), {trainer.blocks} blocks")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashmap_hf.training", description=__doc__)
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("features", help="one target forward per answer")
    make.add_argument(
        "--answers", type=Path, required=True, help="JSONL(.gz) of id, temperature, prompt_ids, response_ids"
    )
    make.add_argument("--limit", type=int, help="use this many answers, in a seeded order")
    make.set_defaults(run=features)
    fit = commands.add_parser("train", help="train a drafter on features; resumes from --out")
    fit.add_argument("--features", type=Path, nargs="+", required=True)
    fit.add_argument("--block-size", type=int, default=5)
    fit.add_argument("--window", type=int, default=16)
    fit.add_argument("--layers", type=int, default=4)
    fit.add_argument("--draft-vocab", type=int, default=8192)
    fit.add_argument("--coupling", choices=("quantile", "independent"), default="quantile")
    for field in dataclasses.fields(TrainConfig):
        if field.name != "seed":
            fit.add_argument(
                "--" + field.name.replace("_", "-"), type=type(field.default), help=f"default {field.default}"
            )
    fit.set_defaults(run=train)
    for command in (make, fit):
        command.add_argument("--target", default="smollm2-135m-instruct")
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (OSError, ValueError, FloatingPointError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
