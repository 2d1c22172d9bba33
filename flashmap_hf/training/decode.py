"""Batched decoding of many prompts: a finished row leaves at once, and new prompts take the free places.

An answer depends on its own prompt, temperature, seed and id alone, not on what is decoded beside it (up to the
rounding of matrix products of another shape): each row has its own noise. Sampling is exact at the temperature, with
no other filter, whatever the target's generation config says: the training features are of that law.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby, islice
from typing import Any

import torch
from transformers import PreTrainedModel

from flashmap_hf.training.answers import Answer
from flashmap_hf.training.batch import Batch, Request, check_request, choose, row_noise, sampled_rows
from flashmap_hf.training.row_cache import row_cache

REFILL = 8  # new prompts come in once batch_size / REFILL places are free: a prefill has a cost of its own


@torch.inference_mode()
def decode(
    target: PreTrainedModel,
    requests: Iterable[Request],
    *,
    batch_size: int = 64,
    seed: int = 0,
    stop_ids: Collection[int] | None = None,
) -> Iterator[Answer]:
    """Yield the answers as they finish. A response ends with the stop token that ended it, if one did.

    Args:
        requests: read as places become free, so they may be endless. Padding is least when their lengths ascend.
        batch_size: rows decoded at once.
        stop_ids: tokens that end an answer; None: the target's own.

    A target with recurrent layers is decoded in batches of prompts of equal length, without refill; one with a cache
    of its own kind row by row, without cache.

    Raises:
        ValueError: a request does not fit the target.
        FloatingPointError: the target's logits are not finite.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    stop_ids = end_ids(target) if stop_ids is None else stop_ids
    with evaluating(target):
        supports_cache: Any = target._supports_default_dynamic_cache  # a method of GenerationMixin
        if not supports_cache():
            for request in requests:
                yield decode_reference(target, request, seed=seed, stop_ids=stop_ids)
        elif row_cache(target.config) is not None:
            yield from _decode(target, iter(requests), batch_size, seed, stop_ids)
        else:
            for _, same in groupby(requests, key=lambda request: len(request.prompt_ids)):
                while group := list(islice(same, batch_size)):
                    yield from _decode(target, iter(group), batch_size, seed, stop_ids)


@torch.inference_mode()
def decode_reference(
    target: PreTrainedModel, request: Request, *, seed: int = 0, stop_ids: Collection[int] | None = None
) -> Answer:
    """`decode` of one request, without batch and without cache: the definition."""
    check_request(target, request)
    stop_ids = end_ids(target) if stop_ids is None else stop_ids
    ids, answer = list(request.prompt_ids), list[int]()
    temperature = torch.tensor([request.temperature], device=target.device)
    with evaluating(target):
        for u in row_noise(seed, request).to(target.device):
            logits = target(torch.tensor([ids + answer], device=target.device), use_cache=False).logits[:, -1]
            answer.append(int(choose(logits.float(), temperature, u[None], sampled_rows([request], target))))
            if answer[-1] in stop_ids:
                break
    return Answer(request.id, request.temperature, ids, answer)


def end_ids(target: PreTrainedModel) -> list[int]:
    """The tokens that end the target's answers; none where its generation config has none."""
    ids = target.generation_config.eos_token_id
    return [] if ids is None else torch.as_tensor(ids).flatten().tolist()


@contextmanager
def evaluating(target: PreTrainedModel) -> Iterator[None]:
    """Dropout and the like are off inside; afterwards each module is in the mode that it was in."""
    training = [module for module in target.modules() if module.training]
    target.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _decode(
    target: PreTrainedModel, requests: Iterator[Request], batch_size: int, seed: int, stop_ids: Collection[int]
) -> Iterator[Answer]:
    stop = torch.tensor(sorted(stop_ids), dtype=torch.long, device=target.device)
    batch: Batch | None = None
    refill = max(1, batch_size // REFILL)
    while True:
        if batch:
            yield from batch.leave(stop)
            batch = batch if batch.requests else None
        free = batch_size - (len(batch.requests) if batch else 0)
        if free >= refill and (new := list(islice(requests, free))):
            fresh = Batch(target, new, seed)
            if batch:
                batch.join(fresh)
            batch = batch or fresh  # whose first tokens may be their last
        elif batch:
            batch.step()
        else:
            return
