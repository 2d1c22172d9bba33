"""The door to transformers' own assisted decoding for a drafter that it does not know, without a patch.

`assisted(target)` is the target, of a subclass of its class that asks the assistant for its candidate generator. It
has the target's own state; `generate`, `_assisted_decoding` and the verification are transformers' code as it stands.
"""

import functools
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from flashmap_hf.statistics import Recorder


class Recorded(CandidateGenerator):
    """Another generator, with its time and what became of its blocks in the active statistics."""

    requires_model_outputs = True

    def __init__(self, inner: Any, recorder: Recorder):
        self.inner, self.recorder = inner, recorder
        self.model_kwargs_overrides: dict[str, Any] = inner.model_kwargs_overrides
        self.drafted = torch.empty(1, 0)  # [1, k]
        self.length = 0
        recorder.add(calls=1)

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[Any, Any]:
        with self.recorder.timed("seconds_drafter"):
            ids, logits = self.inner.get_candidates(input_ids, **kwargs)
        self.length = input_ids.shape[1]
        self.drafted = ids[:, self.length :]
        self.recorder.add(blocks=int(self.drafted.shape[1] > 0))
        return ids, logits

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        self.inner.update_candidate_strategy(input_ids, scores, num_matches)
        committed = input_ids[:, self.length :]
        size = self.drafted.shape[1]
        self.recorder.add(committed=committed.shape[1], target_steps=1, nodes=size)
        if size:
            # by the tokens: `num_matches` counts one too few where a drafted token ends the text
            both = min(size, committed.shape[1])
            right = self.drafted[0, :both].to(committed.device) == committed[0, :both]
            self.recorder.add_block(size, int(right.int().cumprod(0).sum()))


class Assisted:
    """What is put in front of the target's class."""

    device: torch.device

    def _get_candidate_generator(
        self, generation_config: Any, logits_processor: Any, assistant_model: Any, **kwargs: Any
    ) -> Recorded:
        candidates = assistant_model.candidates(self, generation_config, logits_processor)
        return Recorded(candidates, Recorder(self.device))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder, cache = Recorder(self.device), kwargs.get("cache")
        forward: Any = super()
        if cache is not None and cache.get_seq_length() == 0:
            with recorder.timed("seconds_target"), recorder.timed("seconds_prefill"):
                return forward.__call__(*args, **kwargs)
        with recorder.timed("seconds_target"):
            return forward.__call__(*args, **kwargs)


@functools.cache
def assisted_class(target_class: Any) -> type[Any]:
    """One subclass for each class of targets."""
    return type(target_class.__name__, (Assisted, target_class), {"__module__": target_class.__module__})


def assisted(target: PreTrainedModel) -> Any:
    """`target` itself, by another class; nothing is copied and nothing of it is changed.

    Raises:
        ValueError: the target is wrapped.
    """
    if not isinstance(target, PreTrainedModel):
        raise ValueError(
            f"{type(target).__name__} wraps a model: pass the model itself (of a peft model: merge_and_unload())."
        )
    target_class: Any = type(target)
    door: Any = object.__new__(assisted_class(target_class))
    object.__setattr__(door, "__dict__", target.__dict__)
    return door
