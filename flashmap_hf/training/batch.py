"""Rows that are decoded together: prefill, one token for each, finished ones out, new ones in."""

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from flashmap_hf.prompts import check_length
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.row_cache import join_rows, keep_rows, row_cache
from flashmap_hf.verification import draw, first_argmax


@dataclass(frozen=True)
class Request:
    """What to decode. `id` and the seed choose the noise; temperature 0 is greedy."""

    id: str
    prompt_ids: list[int]
    temperature: float = 0.0
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"request {self.id}: prompt_ids is empty: give it at least one token.")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"request {self.id}: temperature={self.temperature} must be 0 (greedy) or positive.")
        if self.max_new_tokens < 1:
            raise ValueError(f"request {self.id}: max_new_tokens={self.max_new_tokens} must be at least 1.")


def check_request(target: PreTrainedModel, request: Request) -> None:
    """Raise ValueError where the target has no such token, or fewer positions than the request may need."""
    try:
        check_length(target, len(request.prompt_ids), request.max_new_tokens)
    except ValueError as error:
        raise ValueError(f"request {request.id}: {error}") from error
    vocab_size = target.config.get_text_config().vocab_size
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
        raise ValueError(f"request {request.id}: prompt_ids must lie below the target's {vocab_size} tokens.")


class Batch:
    """Rows being decoded. B changes all the time; W is the longest answer that is allowed.

    length `[B]`: tokens that a row has in the cache, which has `columns`; count `[B]`: tokens of its answer so far, in
    `tokens` `[B, W]`, of which the cache lacks the last; noise `[B, W]`.
    """

    STATE = ("length", "count", "limit", "temperature", "tokens", "noise")

    def __init__(self, target: PreTrainedModel, requests: list[Request], seed: int):
        """Prefill the prompts and choose the first token of each answer."""
        for request in requests:
            check_request(target, request)
        self.target, self.requests = target, requests
        device, width = target.device, max(r.max_new_tokens for r in requests)
        cache = row_cache(target.config)
        self.flexible = cache is not None
        config = target.config.get_text_config(decoder=True)
        self.cache = DynamicCache(config=config) if cache is None else cache
        accepted = inspect.signature(target.forward).parameters
        self.takes = {name for name in ("position_ids", "logits_to_keep") if name in accepted}
        self.length = torch.tensor([len(r.prompt_ids) for r in requests], device=device)
        self.count = torch.zeros(len(requests), dtype=torch.long, device=device)
        self.limit = torch.tensor([r.max_new_tokens for r in requests], device=device)
        self.temperature = torch.tensor([r.temperature for r in requests], device=device)
        self.tokens = torch.zeros(len(requests), width, dtype=torch.long, device=device)
        noise = torch.zeros(len(requests), width, dtype=torch.float64)
        self.columns = max(len(r.prompt_ids) for r in requests)
        ids = torch.zeros(len(requests), self.columns, dtype=torch.long)
        for i, request in enumerate(requests):
            ids[i, self.columns - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            if request.temperature > 0:
                noise[i, : request.max_new_tokens] = row_noise(seed, request)
        self.noise = noise.to(device)
        self.sampled = sampled_rows(requests, target)
        self._forward(ids.to(device))

    def step(self) -> None:
        """One more token for each row."""
        ids = self.tokens.gather(1, self.count[:, None] - 1)
        self.length, self.columns = self.length + 1, self.columns + 1
        self._forward(ids)

    def _forward(self, ids: Tensor) -> None:  # [B, T], already counted in `length` and `columns`
        columns = torch.arange(self.columns, device=ids.device)
        padding = self.columns - self.length[:, None]
        inputs: dict[str, Any] = {"attention_mask": (columns >= padding).long()}
        if "position_ids" in self.takes:
            inputs["position_ids"] = (columns[-ids.shape[1] :] - padding).clamp(min=0)
        if "logits_to_keep" in self.takes:
            inputs["logits_to_keep"] = 1
        logits = self.target(ids, cache=self.cache, use_cache=True, **inputs).logits[:, -1]
        place = self.count[:, None]
        u = self.noise.gather(1, place).squeeze(1)
        chosen = choose(logits.to(ids.device, torch.float32), self.temperature, u, self.sampled)
        self.tokens.scatter_(1, place, chosen[:, None])
        self.count = self.count + 1

    def leave(self, stop: Tensor) -> list[Answer]:
        """Take the finished rows out."""
        newest = self.tokens.gather(1, self.count[:, None] - 1).squeeze(1)
        done = (torch.isin(newest, stop) | (self.count >= self.limit)).tolist()
        if not any(done):
            return []
        answers = []
        for i, request in enumerate(self.requests):
            if done[i]:
                response = self.tokens[i, : int(self.count[i])].tolist()
                answers.append(Answer(request.id, request.temperature, request.prompt_ids, response))
        size = len(done) - sum(done)
        last = [i for i in range(size, len(done)) if not done[i]]
        self._keep([last.pop() if done[i] else i for i in range(size)])
        return answers

    def _keep(self, order: list[int]) -> None:
        self.requests = [self.requests[i] for i in order]
        self.sampled = sampled_rows(self.requests, self.target)
        if not order:
            return
        rows = torch.tensor(order, device=self.length.device)
        for name in self.STATE:
            setattr(self, name, getattr(self, name)[rows])
        if self.flexible:
            self.columns = int(self.length.max())
            keep_rows(self.cache, order, self.columns)
        else:
            self.cache.reorder_cache(rows)  # type: ignore[arg-type]  # a LongTensor, which no tensor is to mypy

    def join(self, other: "Batch") -> None:
        """Append the rows of `other`."""
        join_rows(self.cache, other.cache)
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        for name in self.STATE:
            both = [getattr(batch, name) for batch in (self, other)]
            if both[0].dim() == 2:
                both = [torch.nn.functional.pad(state, (0, width - state.shape[1])) for state in both]
            setattr(self, name, torch.cat(both))
        self.columns = max(self.columns, other.columns)
        self.requests = self.requests + other.requests
        self.sampled = sampled_rows(self.requests, self.target)


def choose(logits: Tensor, temperature: Tensor, u: Tensor, sampled: Tensor) -> Tensor:  # [B, V], [B], [B], [S] -> [B]
    """The next token of each row: the first argmax, and for the rows `sampled` a draw from softmax(logits / T)."""
    tokens = first_argmax(logits)
    if not logits.gather(-1, tokens[:, None]).isfinite().all():
        raise FloatingPointError("The target's logits are not finite: load it in another dtype, or check its weights.")
    if len(sampled):
        laws = (logits[sampled] / temperature[sampled, None]).softmax(-1)
        tokens[sampled] = draw(laws, u[sampled])
    return tokens


def row_noise(seed: int, request: Request) -> Tensor:  # [max_new_tokens] float64
    """One uniform number per token, a function of the seed and the id."""
    digest = hashlib.sha256(f"{seed}:{request.id}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return torch.rand(request.max_new_tokens, dtype=torch.float64, generator=generator)


def sampled_rows(requests: Sequence[Request], target: PreTrainedModel) -> Tensor:  # [S] rows that are not greedy
    rows = [i for i, request in enumerate(requests) if request.temperature > 0]
    return torch.tensor(rows, dtype=torch.long, device=target.device)
