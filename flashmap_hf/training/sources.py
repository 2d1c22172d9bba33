"""Where a run's features come from: shards on disk, or the target itself while training."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from flashmap_hf.training.answer_folder import same_target
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.features import check_agreement, check_answers, compute
from flashmap_hf.training.shards import Manifest, SequenceFeatures, read_shard

ONLINE_GROUP = 64  # answers whose features are held in memory at once
PROBED = 8  # answers that show whose they are


class FeatureSource(Protocol):
    """Answers with their features. group: how many can be held at once; blocks are shuffled within a group."""

    tap_layers: list[int]
    context: int
    group: int

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> SequenceFeatures: ...
    def first_and_length(self, index: int) -> tuple[int, int]:
        """Kept prompt positions, and all positions, of one answer."""
        ...

    def response(self, index: int) -> Sequence[int]:
        """Its response tokens."""
        ...

    def sampled(self, index: int) -> bool: ...


class LoadedFeatures:
    """Answers whose features are in memory, or mapped into it."""

    def __init__(self, items: Sequence[SequenceFeatures], tap_layers: Sequence[int], context: int):
        self.items, self.tap_layers, self.context = items, list(tap_layers), context
        self.group = max(1, len(items))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> SequenceFeatures:
        return self.items[index]

    def first_and_length(self, index: int) -> tuple[int, int]:
        return self.items[index].first, len(self.items[index].tokens)

    def response(self, index: int) -> Sequence[int]:
        item = self.items[index]
        return item.tokens[item.first :].tolist()

    def sampled(self, index: int) -> bool:
        return self.items[index].sampled


def stored_features(folders: Sequence[Path], target: str, target_hidden_size: int) -> LoadedFeatures:
    """The shards of one or more folders, checked and mapped into memory.

    Raises:
        OSError: a folder has no manifest, or a shard is missing or damaged.
        ValueError: the folders hold features of another target, or of different layers.
    """
    manifests = [(folder, Manifest.read(folder)) for folder in folders]
    for folder, manifest in manifests:
        if not same_target(manifest.target, target) or manifest.target_hidden_size != target_hidden_size:
            raise ValueError(
                f"{folder} holds features of {manifest.target} (hidden size {manifest.target_hidden_size}), not of "
                f"{target} ({target_hidden_size}): make them again, or name that target with --target."
            )
        if manifest.tap_layers != manifests[0][1].tap_layers:
            raise ValueError(
                f"{folder} holds features of layers {manifest.tap_layers}, {manifests[0][0]} of "
                f"{manifests[0][1].tap_layers}: train on one of them."
            )
    items = [s for folder, manifest in manifests for row in manifest.shards for s in read_shard(folder, row)]
    return LoadedFeatures(items, manifests[0][1].tap_layers, min(manifest.context for _, manifest in manifests))


class OnlineFeatures:
    """One target forward per answer and epoch; on several processes each computes the answers that its runs need."""

    def __init__(
        self,
        target: PreTrainedModel,
        answers: Iterable[Answer],
        tap_layers: Sequence[int],
        context: int,
        max_length: int,
    ):
        self.target, self.tap_layers, self.context = target, list(tap_layers), context
        self.answers, self.skipped = check_answers(target, answers, max_length)
        self.group = ONLINE_GROUP
        self.held: OrderedDict[int, SequenceFeatures] = OrderedDict()
        check_agreement([self[i] for i in range(min(PROBED, len(self)))], target.config.name_or_path or "this target")

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int) -> SequenceFeatures:
        if index not in self.held:
            self.held[index] = compute(self.target, self.answers[index], self.tap_layers, self.context)
            if len(self.held) > 2 * self.group:  # a batch may reach back into the group before
                self.held.popitem(last=False)
        return self.held[index]

    def first_and_length(self, index: int) -> tuple[int, int]:
        answer = self.answers[index]
        first = min(self.context, len(answer.prompt_ids))
        return first, first + len(answer.response_ids)

    def response(self, index: int) -> Sequence[int]:
        return self.answers[index].response_ids

    def sampled(self, index: int) -> bool:
        return self.answers[index].temperature > 0


class Part:
    """Some answers of a source, in its order."""

    def __init__(self, source: FeatureSource, indices: Sequence[int]):
        self.source, self.indices = source, indices
        self.tap_layers, self.context = source.tap_layers, source.context
        self.group = min(source.group, max(1, len(indices)))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> SequenceFeatures:
        return self.source[self.indices[index]]

    def first_and_length(self, index: int) -> tuple[int, int]:
        return self.source.first_and_length(self.indices[index])

    def response(self, index: int) -> Sequence[int]:
        return self.source.response(self.indices[index])

    def sampled(self, index: int) -> bool:
        return self.source.sampled(self.indices[index])


def split(source: FeatureSource, held_out: int) -> tuple[Part, Part]:
    """What to train on, and what is held out: `held_out` greedy answers and half as many sampled ones.

    They are those whose tokens have the smallest digests: a sample of the whole, in whatever order it comes. Of few
    answers at most a quarter goes. Once there are more, and answers are added or folders put together, none that was
    trained on is held out: what is smaller than they are is new. Copies of a held-out answer go with it.
    """
    chosen: set[int] = set()
    for sampled, wanted in ((False, held_out), (True, held_out // 2)):
        these = {i: digest(source.response(i)) for i in range(len(source)) if source.sampled(i) == sampled}
        smallest = set(sorted(set(these.values()))[: min(wanted, len(these) // 4)])
        chosen.update(i for i, value in these.items() if value in smallest)
    rest = [i for i in range(len(source)) if i not in chosen]
    return Part(source, rest), Part(source, sorted(chosen))


def digest(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(repr(list(tokens)).encode()).digest()


def draft_vocabulary(source: FeatureSource, size: int, always: Sequence[int], proposable: int) -> torch.Tensor:
    """The `size` most frequent response tokens below `proposable`, `always` among them, in ascending order. `[size]`"""
    counts: Counter[int] = Counter()
    for index in range(len(source)):
        counts.update(source.response(index))
    known_tokens = [*always, *(token for token, _ in counts.most_common())]
    ranked = [token for token in dict.fromkeys(known_tokens) if token < proposable]
    if len(ranked) < size:
        known = set(ranked)
        ranked += [i for i in range(min(size + len(known), proposable)) if i not in known]
    return torch.tensor(sorted(ranked[:size]))
