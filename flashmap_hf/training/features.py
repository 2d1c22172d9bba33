"""`flashmap features`: one target forward per answer; taps, argmax and quantile intervals in shards with a manifest.

Of the prompt only the last `context` positions are kept: no drafter window reaches further.
The manifest is written after each shard and lists its answers: a run adds those that no shard in the folder holds.
"""

import hashlib
import json
import random
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flashmap_hf import targets
from flashmap_hf.conditioning import default_tap_layers, tap
from flashmap_hf.devices import choose_dtype, default_device
from flashmap_hf.fingerprints import chat_template_hash, vocabulary_hash
from flashmap_hf.options import option
from flashmap_hf.progress import ProgressLog
from flashmap_hf.provenance import write_record
from flashmap_hf.training.answer_folder import answer_manifest, check_out, read_answer_folder, same_target, target_shape
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.append_rows import only_writer
from flashmap_hf.training.shards import MANIFEST, Manifest, SequenceFeatures, write_shard
from flashmap_hf.verification import quantile_interval

ROWS = 32  # logits are read so many positions at a time: a whole answer's do not fit the processor's cache
LEAST_AGREEMENT = 0.5  # greedy answers of the same target in another dtype agree nearly everywhere
LEAST_MASS = 1 / 3  # of the probability that a target gives its own samples on average
DEVIATIONS = 5  # a sum of numbers >= 0 falls so far below its mean with a probability under exp(-DEVIATIONS^2 / 2)


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
    expected = squared = 0.0
    for rows, tokens in zip(logits.split(ROWS), answered.split(ROWS), strict=True):
        argmax.append(rows.argmax(-1))
        if sampled:
            lower, upper = quantile_interval(rows.float() / answer.temperature, tokens)
            law = (rows.float() / answer.temperature).softmax(-1)
            expected += float(law.square().sum())
            squared += float(law.pow(3).sum())
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
        expected=expected,
        squared=squared,
    )


def check_answers(
    target: PreTrainedModel, answers: Iterable[Answer], max_length: int
) -> tuple[list[Answer], dict[str, int]]:
    """The answers that a block can be taken from, and how many were left out: empty, or too long (for the target, too).

    Raises:
        ValueError: none is left, or one holds a token that the target does not have.
    """
    rows = list(answers)
    kept = [a for a in rows if len(a.response_ids) > 1]
    positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    longest = max_length if positions is None else min(max_length, positions)
    usable = [a for a in kept if len(a.prompt_ids) + len(a.response_ids) <= longest]
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
            f"No answer is left: {skipped['long']} exceed max_length={max_length} or the target's {positions} "
            f"positions, {skipped['empty']} are empty."
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
    """Compute features of all answers into `folder`, except those that its shards already hold.

    Raises:
        ValueError: no answer is left after dropping empty and too long ones, one holds a token that the target lacks,
            they are another model's, two have one id, or the folder holds other features (of one of these ids, even).
        OSError: the folder cannot be written, or the disk is too small.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, hidden_size = target.config.name_or_path or "", target.config.get_text_config().hidden_size
    fresh = Manifest(name, hidden_size, list(tap_layers), context, "bfloat16")
    manifest = Manifest.read(folder) if (folder / MANIFEST).is_file() else fresh
    for part in ("target", "target_hidden_size", "tap_layers", "context"):
        now, then = getattr(fresh, part), getattr(manifest, part)
        if not (same_target(then, now) if part == "target" else then == now):
            raise ValueError(f"{folder} holds features with {part}={then}, not {now}: use another folder.")
    number = manifest.next_number()
    for lost in manifest.drop_damaged(folder):
        print(lost, file=sys.stderr)
    usable, skipped = check_answers(target, answers, max_length)
    manifest.skipped_empty, manifest.skipped_long = skipped["empty"], skipped["long"]
    missing = not_yet(usable, manifest.known(), folder)
    check_room(folder, missing, hidden_size * len(tap_layers), context)
    with ProgressLog() as progress:
        task = progress.add_task("features", total=len(usable), completed=len(usable) - len(missing))
        for shard, start in enumerate(range(0, len(missing), shard_size), start=number):
            sequences, rows = [], missing[start : start + shard_size]
            for answer in rows:
                sequences.append(compute(target, answer, tap_layers, context))
                progress.advance(task)
            check_agreement(sequences, name)
            path, ids = folder / f"features-{shard:07d}.safetensors", {a.id: fingerprint(a) for a in rows}
            manifest.shards.append(write_shard(path, sequences, ids))
            manifest.write(folder)
    manifest.write(folder)
    return manifest


def fingerprint(answer: Answer) -> str:
    """Tells answers of one id apart."""
    content = json.dumps([answer.temperature, answer.prompt_ids, answer.response_ids])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def not_yet(answers: Sequence[Answer], known: dict[str, str], folder: Path) -> list[Answer]:
    """The answers that are not among those of `folder`, `known` by id and fingerprint.

    Raises:
        ValueError: two have one id, or the folder holds another answer of the same id.
    """
    seen: set[str] = set()
    for answer in answers:
        if answer.id in seen:
            raise ValueError(f"Two answers have the id {answer.id!r}: give each its own.")
        seen.add(answer.id)
        if known.get(answer.id, fingerprint(answer)) != fingerprint(answer):
            raise ValueError(
                f"{folder} holds features of another answer with the id {answer.id!r}: use another folder."
            )
    return [answer for answer in answers if answer.id not in known]


def check_agreement(sequences: Sequence[SequenceFeatures], target: str) -> None:
    """Raise ValueError where fresh features show that greedy or sampled answers are not what `target` would say."""
    greedy = [s for s in sequences if not s.sampled]
    tokens, agreeing = sum(len(s.argmax) for s in greedy), sum(s.agreeing for s in greedy)
    if tokens and agreeing < LEAST_AGREEMENT * tokens:
        raise ValueError(
            f"Only {agreeing} of {tokens} tokens of greedy answers are what {target} would say: these are another "
            "model's answers. Let this target answer (flashmap respond)."
        )
    drawn = [s for s in sequences if s.sampled]
    mass, expected = sum(float((s.f_right - s.f_left).sum()) for s in drawn), sum(s.expected for s in drawn)
    far = expected - mass > DEVIATIONS * sum(s.squared for s in drawn) ** 0.5
    if far and mass < LEAST_MASS * expected:
        count = sum(len(s.argmax) for s in drawn)
        raise ValueError(
            f"{target} gives the tokens of sampled answers a probability of {mass / count:.3g} on average, its own "
            f"samples would have {expected / count:.3g}: these are another model's answers, or another temperature's. "
            "Let this target answer (flashmap respond)."
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
        if any(later <= earlier for earlier, later in pairwise([-1, *self.taps])):
            raise ValueError(f"--taps {shown(self.taps)}: indices from 0, each larger than the one before.")


def main(options: Options) -> None:
    start = time.monotonic()
    check_out(options.out)
    answers = [a for a in read_answer_folder(options.answers) if options.kind in ("any", kind_of(a))]
    if not answers:
        kind = "" if options.kind == "any" else f"{options.kind} "
        raise ValueError(f"{options.answers} holds no {kind}answer: let the target answer first (flashmap respond).")
    random.Random(options.seed).shuffle(answers)
    device = default_device()
    target, tokenizer = targets.load(options.target, dtype=choose_dtype(options.dtype, device), device=device)
    check_answerer(options.answers, target, tokenizer)
    layers = target.config.get_text_config().num_hidden_layers
    taps = options.taps or default_tap_layers(layers)
    if max(taps) > layers:
        raise ValueError(f"--taps {shown(taps)}: {options.target} has {layers} layers, the last index is {layers}.")
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
    if made is None:
        return
    name = target.config.name_or_path
    facts: dict[str, Any] = {
        "target": name,
        "vocabulary_hash": vocabulary_hash(tokenizer),
        "target_shape": target_shape(target),
    }
    for fact, value in facts.items():
        found = made.get(fact)
        if fact == "target_shape" and found is None:
            continue  # the folder is older than this part of the manifest
        if not (same_target(found, value) if fact == "target" else found == value):
            raise ValueError(
                f"{path} holds answers of {made.get('target')} ({fact} {found}), not of {name} ({fact} {value}): "
                "let this target answer (flashmap respond), or name that one with --target."
            )
    template = chat_template_hash(tokenizer)
    if "chat_template_hash" in made and made["chat_template_hash"] != template:
        raise ValueError(
            f"{path} holds answers to prompts in another chat template ({made['chat_template_hash']}) than that of "
            f"{name} ({template}): let it answer again (flashmap respond), or put the old template back."
        )


def shown(taps: Sequence[int]) -> str:
    return " ".join(map(str, taps))


def kind_of(answer: Answer) -> str:
    return "sampled" if answer.temperature > 0 else "greedy"
