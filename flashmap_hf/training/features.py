"""`flashmap features`: one target forward per answer; taps, argmax and quantile intervals in shards with a manifest.

Of the prompt only the last `context` positions are kept: no drafter window reaches further.
The manifest is written after each shard: a killed run resumes at the first answer that no shard holds.
"""

import random
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flashmap_hf import targets
from flashmap_hf.conditioning import default_tap_layers, tap
from flashmap_hf.devices import choose_dtype, default_device
from flashmap_hf.fingerprints import vocabulary_hash
from flashmap_hf.options import option
from flashmap_hf.progress import ProgressLog
from flashmap_hf.provenance import write_record
from flashmap_hf.training.answer_folder import answer_manifest, read_answer_folder
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.append_rows import only_writer
from flashmap_hf.training.shards import MANIFEST, Manifest, SequenceFeatures, write_shard
from flashmap_hf.verification import quantile_interval

ROWS = 32  # logits are read so many positions at a time: a whole answer's do not fit the processor's cache
LEAST_AGREEMENT = 0.5  # greedy answers of the same target in another dtype agree nearly everywhere


@torch.inference_mode()
def compute(target: PreTrainedModel, answer: Answer, tap_layers: Sequence[int], context: int) -> SequenceFeatures:
    """One forward over prompt and response."""
    prompt, response = answer.prompt_ids, answer.response_ids
    ids = torch.tensor([prompt + response], device=target.device)
    sampled = answer.temperature > 0
    output = target(ids, output_hidden_states=list(tap_layers), logits_to_keep=len(response) + 1, use_cache=False)
    kept = min(context, len(prompt))
    taps = tap(output.hidden_states, tap_layers)[0, len(prompt) - kept :].to(torch.bfloat16)
    answered = ids[0, len(prompt) :]
    logits = output.logits[0, -len(response) - 1 : -1]  # a target may not know logits_to_keep
    argmax, left, right = [], [], []
    for rows, tokens in zip(logits.split(ROWS), answered.split(ROWS), strict=True):
        argmax.append(rows.argmax(-1))
        if sampled:
            lower, upper = quantile_interval(rows.float() / answer.temperature, tokens)
            left.append(lower)
            right.append(upper)
    nothing = torch.zeros(len(response), dtype=torch.float64)
    return SequenceFeatures(
        taps=taps.cpu(),
        tokens=ids[0, len(prompt) - kept :].to(torch.int32).cpu(),
        argmax=torch.cat(argmax).to(torch.int32).cpu(),
        f_left=torch.cat(left).double().cpu() if sampled else nothing,
        f_right=torch.cat(right).double().cpu() if sampled else nothing,
        first=kept,
    )


def check_answers(
    target: PreTrainedModel, answers: Iterable[Answer], max_length: int
) -> tuple[list[Answer], dict[str, int]]:
    """The answers that a block can be taken from, and how many were left out for being empty or too long.

    Raises:
        ValueError: none is left, or one holds a token that the target does not have.
    """
    rows = list(answers)
    kept = [a for a in rows if len(a.response_ids) > 1]
    usable = [a for a in kept if len(a.prompt_ids) + len(a.response_ids) <= max_length]
    skipped = {"empty": len(rows) - len(kept), "long": len(kept) - len(usable)}
    vocab_size = target.config.get_text_config().vocab_size
    for answer in usable:
        if (largest := max(answer.prompt_ids + answer.response_ids)) >= vocab_size:
            raise ValueError(
                f"Answer {answer.id} holds token {largest}, {target.config.name_or_path} has {vocab_size}: "
                "another model's? Let this target answer (flashmap respond)."
            )
    if not usable:
        raise ValueError(
            f"No answer is left: {skipped['long']} exceed max_length={max_length}, {skipped['empty']} are empty."
        )
    return usable, skipped


def check_room(folder: Path, answers: Sequence[Answer], width: int, context: int) -> None:
    """Raise OSError where the features of `answers` (taps of `width` numbers) do not fit the disk."""
    positions = sum(min(context, len(a.prompt_ids)) + len(a.response_ids) for a in answers)
    needed, free = positions * (2 * width + 24), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"{folder} has {free / 2**30:.1f} GiB free, the features need {needed / 2**30:.1f} GiB: make room, use "
            "--limit, or train with --online, which needs no files."
        )


def make_features(
    target: PreTrainedModel,
    answers: Iterable[Answer],
    folder: Path,
    tap_layers: Sequence[int],
    *,
    context: int = 32,
    max_length: int = 2048,
    shard_size: int = 128,
) -> Manifest:
    """Compute features of all answers into `folder`, resuming after the answers that its shards already hold.

    Raises:
        ValueError: no answer is left after dropping empty and too long ones, one holds a token that the target lacks,
            the greedy ones are another model's, or the folder holds other features.
        OSError: the folder cannot be written, or the disk is too small.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, hidden_size = target.config.name_or_path or "", target.config.get_text_config().hidden_size
    fresh = Manifest(name, hidden_size, list(tap_layers), context, "bfloat16")
    manifest = Manifest.read(folder) if (folder / MANIFEST).is_file() else fresh
    for part in ("target", "target_hidden_size", "tap_layers", "context"):
        if getattr(manifest, part) != getattr(fresh, part):
            raise ValueError(
                f"{folder} holds features with {part}={getattr(manifest, part)}, "
                f"not {getattr(fresh, part)}: use another folder."
            )
    usable, skipped = check_answers(target, answers, max_length)
    manifest.skipped_empty, manifest.skipped_long = skipped["empty"], skipped["long"]
    done = manifest.total("answers")
    check_room(folder, usable[done:], hidden_size * len(tap_layers), context)
    with ProgressLog() as progress:
        task = progress.add_task("features", total=len(usable), completed=done)
        for start in range(done, len(usable), shard_size):
            sequences = []
            for answer in usable[start : start + shard_size]:
                sequences.append(compute(target, answer, tap_layers, context))
                progress.advance(task)
            check_agreement(sequences, name)
            manifest.shards.append(write_shard(folder / f"features-{start:07d}.safetensors", sequences))
            manifest.write(folder)
    return manifest


def check_agreement(sequences: Sequence[SequenceFeatures], target: str) -> None:
    """Raise ValueError where greedy answers are not what `target` would say."""
    greedy = [s for s in sequences if not s.sampled]
    tokens, agreeing = sum(len(s.argmax) for s in greedy), sum(s.agreeing for s in greedy)
    if tokens and agreeing < LEAST_AGREEMENT * tokens:
        raise ValueError(
            f"Only {agreeing} of {tokens} tokens of greedy answers are what {target} would say: these are another "
            "model's answers. Let this target answer (flashmap respond)."
        )


# --- flashmap features


@dataclass(frozen=True)
class Options:
    """What `flashmap features` can be told."""

    answers: Path = option(help="JSONL(.gz) of id, temperature, prompt_ids, response_ids; or a folder of respond")
    out: Path = option(help="folder of the shards; a run in it is resumed")
    target: str = option("smollm2-135m-instruct", "an embedded target, a folder or a Hub id")
    kind: Literal["any", "greedy", "sampled"] = option("any", "which answers to take")
    limit: int | None = option(None, "use this many answers, in a seeded order")
    taps: list[int] = option(factory=list, help="indices of hidden states (default: four, evenly spaced)")
    context: int = option(32, "positions of the prompt to keep: the longest window that a drafter can have")
    max_length: int = option(2048, "answers with more tokens, prompt included, are left out")
    shard_size: int = option(128, "answers of a shard")
    dtype: str = option("auto", "of the target's forward: auto, float32, bfloat16, float16")
    seed: int = option(0, "of the order")

    def __post_init__(self) -> None:
        for name in ("limit", "context", "max_length", "shard_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1.")


def main(options: Options) -> None:
    start = time.monotonic()
    answers = [a for a in read_answer_folder(options.answers) if options.kind in ("any", kind_of(a))]
    random.Random(options.seed).shuffle(answers)
    device = default_device()
    target, tokenizer = targets.load(options.target, dtype=choose_dtype(options.dtype, device), device=device)
    check_answerer(options.answers, target, tokenizer)
    taps = options.taps or default_tap_layers(target.config.get_text_config().num_hidden_layers)
    with only_writer(options.out / MANIFEST):
        manifest = make_features(
            target.eval(), answers[: options.limit], options.out, taps,
            context=options.context, max_length=options.max_length, shard_size=options.shard_size,
        )  # fmt: skip
    totals = {name: manifest.total(name) for name in ("answers", "sampled", "tokens", "bytes")}
    skipped = {"empty": manifest.skipped_empty, "long": manifest.skipped_long}
    write_record(options.out / "features.json", totals | {"skipped": skipped, "seconds": time.monotonic() - start})
    print(
        f"{totals['answers']} answers ({totals['sampled']} sampled), {totals['tokens']} response tokens, "
        f"{totals['bytes'] / 2**20:.0f} MiB; skipped: {skipped['empty']} empty, {skipped['long']} too long"
    )


def check_answerer(path: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError where the answers in the folder `path` are another target's; a single file does not say."""
    made = answer_manifest(path)
    found = {"target": target.config.name_or_path, "vocabulary_hash": vocabulary_hash(tokenizer)}
    for name, value in found.items():
        if made is not None and made.get(name) != value:
            raise ValueError(
                f"{path} holds answers of {made.get('target')} ({name} {made.get(name)}), not of {found['target']} "
                f"({name} {value}): let this target answer (flashmap respond), or name that one with --target."
            )


def kind_of(answer: Answer) -> str:
    return "sampled" if answer.temperature > 0 else "greedy"
