"""Answers -> features: one target forward per answer; taps, tokens and quantile intervals in safetensors shards.

Of the prompt only the last `context` positions are kept: no drafter window reaches further.
The manifest is written after each shard: a killed run resumes at the first answer that no shard holds.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from flashmap_hf.conditioning import tap
from flashmap_hf.training.answers import Answer
from flashmap_hf.verification import quantile_interval

MANIFEST = "manifest.json"


@dataclass
class Manifest:
    """What a feature folder holds. `shards` rows: file, answers, tokens, bytes, sha256."""

    target: str
    target_hidden_size: int
    tap_layers: list[int]
    context: int
    dtype: str
    skipped_empty: int = 0
    skipped_long: int = 0
    shards: list[dict[str, int | str]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        aside = folder / (MANIFEST + ".tmp")
        aside.write_text(json.dumps(asdict(self), indent=1))
        aside.replace(folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        if not (folder / MANIFEST).is_file():
            raise OSError(
                f"{folder} holds no {MANIFEST}: make the features first (python -m flashmap_hf.training features)."
            )
        try:
            return cls(**json.loads((folder / MANIFEST).read_text()))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{folder / MANIFEST} is damaged ({error}): delete {folder} and make them again."
            ) from error


@dataclass(frozen=True)
class SequenceFeatures:
    """One answer. P kept prompt positions, R response tokens; position i holds token i and the hidden states at i.

    taps `[P + R, N * D]`; tokens `[P + R]` int32; f_left, f_right `[R]` float64, the quantile interval of each response
    token under the target at the answer's temperature (both 0 when the answer is greedy); first = P.
    """

    taps: torch.Tensor
    tokens: torch.Tensor
    f_left: torch.Tensor
    f_right: torch.Tensor
    first: int


@torch.inference_mode()
def compute(target: PreTrainedModel, answer: Answer, tap_layers: Sequence[int], context: int) -> SequenceFeatures:
    """One forward over prompt and response."""
    prompt, response = answer.prompt_ids, answer.response_ids
    ids = torch.tensor([prompt + response], device=target.device)
    sampled = answer.temperature > 0
    output = target(
        ids,
        output_hidden_states=list(tap_layers),
        logits_to_keep=len(response) + 1 if sampled else 1,
        use_cache=False,
    )
    kept = min(context, len(prompt))
    taps = tap(output.hidden_states, tap_layers)[0, len(prompt) - kept :].to(torch.bfloat16)
    if sampled:
        tokens = ids[0, len(prompt) :]
        f_left, f_right = quantile_interval(output.logits[0, :-1].float() / answer.temperature, tokens)
    else:
        f_left = f_right = torch.zeros(len(response), dtype=torch.float64)
    tokens = ids[0, len(prompt) - kept :].to(torch.int32)
    return SequenceFeatures(taps.cpu(), tokens.cpu(), f_left.double().cpu(), f_right.double().cpu(), kept)


def write_shard(path: Path, sequences: list[SequenceFeatures]) -> dict[str, int | str]:
    """Write aside, then rename; returns the shard's row of the manifest."""
    tensors = {
        "taps": torch.cat([s.taps for s in sequences]),
        "tokens": torch.cat([s.tokens for s in sequences]),
        "f_left": torch.cat([s.f_left for s in sequences]),
        "f_right": torch.cat([s.f_right for s in sequences]),
        "first": torch.tensor([s.first for s in sequences]),
        "length": torch.tensor([len(s.tokens) for s in sequences]),
    }
    aside = path.with_suffix(".tmp")
    save_file(tensors, aside)
    digest = hashlib.sha256(aside.read_bytes()).hexdigest()
    aside.replace(path)
    return {
        "file": path.name,
        "answers": len(sequences),
        "tokens": int(tensors["f_left"].numel()),
        "bytes": path.stat().st_size,
        "sha256": digest,
    }


def read_shard(folder: Path, row: dict[str, int | str]) -> list[SequenceFeatures]:
    """Read one shard and check it against its row of the manifest.

    Raises:
        OSError: the file is missing, truncated or has another checksum.
    """
    path = folder / str(row["file"])
    if not path.is_file() or path.stat().st_size != row["bytes"]:
        raise OSError(
            f"{path} is missing or truncated; delete it and its row in {MANIFEST} and make the features again."
        )
    if hashlib.sha256(path.read_bytes()).hexdigest() != row["sha256"]:
        raise OSError(f"{path} does not have the checksum in {MANIFEST}; delete both and make the features again.")
    tensors = load_file(path)
    sequences, position, response = [], 0, 0
    for first, length in zip(tensors["first"].tolist(), tensors["length"].tolist(), strict=True):
        count = length - first
        sequences.append(
            SequenceFeatures(
                tensors["taps"][position : position + length],
                tensors["tokens"][position : position + length],
                tensors["f_left"][response : response + count],
                tensors["f_right"][response : response + count],
                first,
            )
        )
        position, response = position + length, response + count
    return sequences


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
            or the folder holds other features.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fresh = Manifest(
        target.config.name_or_path or "",
        target.config.get_text_config().hidden_size,
        list(tap_layers),
        context,
        "bfloat16",
    )
    manifest = Manifest.read(folder) if (folder / MANIFEST).is_file() else fresh
    for name in ("target", "target_hidden_size", "tap_layers", "context"):
        if getattr(manifest, name) != getattr(fresh, name):
            raise ValueError(
                f"{folder} holds features with {name}={getattr(manifest, name)}, "
                f"not {getattr(fresh, name)}: use another folder."
            )
    rows = list(answers)
    kept = [a for a in rows if len(a.response_ids) > 1]
    usable = [a for a in kept if len(a.prompt_ids) + len(a.response_ids) <= max_length]
    manifest.skipped_empty, manifest.skipped_long = len(rows) - len(kept), len(kept) - len(usable)
    vocab_size = target.config.get_text_config().vocab_size
    for answer in usable:
        if (largest := max(answer.prompt_ids + answer.response_ids)) >= vocab_size:
            raise ValueError(
                f"Answer {answer.id} holds token {largest}, {fresh.target} has {vocab_size}: another model's?"
            )
    done = sum(int(row["answers"]) for row in manifest.shards)
    if not usable:
        raise ValueError(
            f"No answer is left: {manifest.skipped_long} exceed max_length={max_length}, the rest are empty."
        )
    for start in range(done, len(usable), shard_size):
        sequences = [compute(target, a, tap_layers, context) for a in usable[start : start + shard_size]]
        manifest.shards.append(write_shard(folder / f"features-{start:07d}.safetensors", sequences))
        manifest.write(folder)
        print(f"features: {start + len(sequences)}/{len(usable)} answers", flush=True)
    return manifest
