"""The call's logits processors as one row of a batch sees them: rows are processed one by one, at their own length."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)


def processors_of(processors: LogitsProcessorList, row: int, batch: int) -> LogitsProcessorList:
    """Those of `row`: what a processor keeps per row is cut to it, and a user's function is told the row's number.

    Some know the prompts before `num_return_sequences` repeated them. The user's objects stay as they are.
    """
    if batch == 1:
        return processors
    own = LogitsProcessorList()
    for processor in processors:
        kept: Any = processor
        if isinstance(kept, PrefixConstrainedLogitsProcessor):
            allowed = kept._prefix_allowed_tokens_fn
            kept = PrefixConstrainedLogitsProcessor(_told(allowed, row), 1)
        elif isinstance(kept, RepetitionPenaltyLogitsProcessor):
            if isinstance(kept.prompt_ignore_length, torch.Tensor):
                kept = copy.copy(kept)
                kept.prompt_ignore_length = _row(kept.prompt_ignore_length, row, batch)
        elif isinstance(kept, EncoderRepetitionPenaltyLogitsProcessor):
            kept = copy.copy(kept)
            kept.encoder_input_ids = _row(kept.encoder_input_ids, row, batch)
        elif isinstance(kept, EncoderNoRepeatNGramLogitsProcessor):
            kept, ngrams = copy.copy(kept), kept.generated_ngrams
            kept.generated_ngrams, kept.batch_size = [ngrams[row * len(ngrams) // batch]], 1
        own.append(kept)
    return own


def _told(allowed: Callable[[int, torch.Tensor], list[int]], row: int) -> Callable[[int, torch.Tensor], list[int]]:
    return lambda _, ids: allowed(row, ids)


def _row(values: torch.Tensor, row: int, batch: int) -> torch.Tensor:
    place = row * len(values) // batch
    return values[place : place + 1]
