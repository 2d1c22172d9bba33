"""Features on disk: safetensors shards beside a manifest that knows the bytes and checksum of each."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

MANIFEST = "manifest.json"


@dataclass
class Manifest:
    """What a feature folder holds. `shards` rows: file, answers, tokens, sampled, agreeing, bytes, sha256, ids.

    ids: a fingerprint of each answer by its id; rows of older folders lack it.
    """

    target: str
    target_hidden_size: int
    tap_layers: list[int]
    context: int
    dtype: str
    skipped_empty: int = 0
    skipped_long: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        aside = folder / (MANIFEST + ".tmp")
        try:
            aside.write_text(json.dumps(asdict(self), indent=1))
            aside.replace(folder / MANIFEST)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise OSError(
                f"{folder / MANIFEST} cannot be written ({error.strerror or error}); the shards in it are complete: "
                "make room and run this again."
            ) from error

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        if not (folder / MANIFEST).is_file():
            raise OSError(f"{folder} holds no {MANIFEST}: make the features first (flashmap features).")
        try:
            return cls(**json.loads((folder / MANIFEST).read_text()))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{folder / MANIFEST} is damaged ({error}): delete {folder} and make them again."
            ) from error

    def next_number(self) -> int:
        """The first number that no shard has had."""
        return 1 + max((int(Path(row["file"]).stem.rpartition("-")[2]) for row in self.shards), default=-1)

    def known(self) -> dict[str, str]:
        """The fingerprints of all answers, by id."""
        return {id: fingerprint for row in self.shards for id, fingerprint in row["ids"].items()}

    def drop_damaged(self, folder: Path) -> list[str]:
        """Forget the shards that are missing or truncated; returns a sentence on each.

        Raises:
            ValueError: the folder is older than the ids in the manifest.
        """
        if any("ids" not in row for row in self.shards):
            raise ValueError(
                f"{folder / MANIFEST} does not say which answers it holds (an older version wrote it), so that no more "
                "can be added: make the features again in another folder."
            )
        lost = {row["file"]: state for row in self.shards if (state := damage(folder, row))}
        self.shards = [row for row in self.shards if row["file"] not in lost]
        return [f"{folder / name} is {state}: its answers are computed again" for name, state in lost.items()]

    def total(self, name: str) -> int:
        return sum(int(row[name]) for row in self.shards)


@dataclass(frozen=True)
class SequenceFeatures:
    """One answer. P kept prompt positions, R response tokens; position i holds token i and the hidden states at i.

    taps `[P + R, N * D]`; tokens `[P + R]` int32; argmax `[R]` int32, the target's greedy choice where each response
    token stands; f_left, f_right `[R]` float64, the quantile interval of each response token under the target at the
    answer's temperature (both 0 when the answer is greedy); first = P. Not kept on disk, of a sampled answer: expected
    and squared, the sums over its tokens of the first and second moment of a token's probability when the target draws.
    """

    taps: torch.Tensor
    tokens: torch.Tensor
    argmax: torch.Tensor
    f_left: torch.Tensor
    f_right: torch.Tensor
    first: int
    expected: float = 0.0
    squared: float = 0.0

    @property
    def sampled(self) -> bool:
        return bool((self.f_right > 0).any())

    @property
    def agreeing(self) -> int:
        """How many response tokens are the target's greedy choice."""
        return int((self.argmax == self.tokens[self.first :]).sum())


def write_shard(path: Path, sequences: list[SequenceFeatures], ids: dict[str, str]) -> dict[str, Any]:
    """Write aside, then rename; returns the shard's row of the manifest, with the `ids` of its answers.

    Raises:
        OSError: the file cannot be written; the shards before it stay as they are.
    """
    tensors = {
        "taps": torch.cat([s.taps for s in sequences]),
        "tokens": torch.cat([s.tokens for s in sequences]),
        "argmax": torch.cat([s.argmax for s in sequences]),
        "f_left": torch.cat([s.f_left for s in sequences]),
        "f_right": torch.cat([s.f_right for s in sequences]),
        "first": torch.tensor([s.first for s in sequences]),
        "length": torch.tensor([len(s.tokens) for s in sequences]),
    }
    aside = path.with_suffix(".tmp")
    try:
        save_file(tensors, aside)
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise OSError(
            f"{path} could not be written ({error}); the shards before it are complete: make room and run this again, "
            "or train with --online."
        ) from error
    digest = hashlib.sha256(aside.read_bytes()).hexdigest()
    aside.replace(path)
    return {
        "file": path.name,
        "answers": len(sequences),
        "tokens": int(tensors["f_left"].numel()),
        "sampled": sum(s.sampled for s in sequences),
        "agreeing": sum(s.agreeing for s in sequences if not s.sampled),
        "bytes": path.stat().st_size,
        "sha256": digest,
        "ids": ids,
    }


def damage(folder: Path, row: dict[str, Any]) -> str:
    """How the file of a row differs from it at first sight: missing, truncated, or "" where it does not."""
    path = folder / row["file"]
    if not path.is_file():
        return "missing"
    return "" if path.stat().st_size == row["bytes"] else "truncated"


def read_shard(folder: Path, row: dict[str, Any]) -> list[SequenceFeatures]:
    """Read one shard and check it against its row of the manifest.

    Raises:
        OSError: the file is missing, truncated or has another checksum.
    """
    path = folder / str(row["file"])
    way_out = "delete that file alone and run flashmap features again, which computes its answers anew"
    if state := damage(folder, row):
        raise OSError(f"{path} is {state}: {way_out}.")
    if hashlib.sha256(path.read_bytes()).hexdigest() != row["sha256"]:
        raise OSError(f"{path} does not have the checksum in {MANIFEST}: {way_out}.")
    tensors = load_file(path)
    sequences, position, response = [], 0, 0
    for first, length in zip(tensors["first"].tolist(), tensors["length"].tolist(), strict=True):
        count = length - first
        sequences.append(
            SequenceFeatures(
                tensors["taps"][position : position + length],
                tensors["tokens"][position : position + length],
                tensors["argmax"][response : response + count],
                tensors["f_left"][response : response + count],
                tensors["f_right"][response : response + count],
                first,
            )
        )
        position, response = position + length, response + count
    return sequences
