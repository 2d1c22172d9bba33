"""The decoding loop: draft a block, verify it in one target forward, commit token by token, stop where plain would."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput
from transformers.utils.output_capturing import selected_hidden_states

from flashmap_hf.candidates import Draft, FlashMapCandidateGenerator
from flashmap_hf.compatibility import is_pure
from flashmap_hf.statistics import Recorder
from flashmap_hf.verification import (
    Verdict,
    verify_children,
    verify_greedy,
    verify_one_hot,
    verify_rejection,
    verify_shared_noise,
)


@dataclass
class Collected:
    """What `return_dict_in_generate` returns, one entry per token, as plain generation collects it."""

    config: GenerationConfig
    scores: list[Any] = field(default_factory=list)  # [1, V] each
    logits: list[Any] = field(default_factory=list)
    attentions: list[Any] = field(default_factory=list)  # tuples of one tensor per layer
    hidden_states: list[Any] = field(default_factory=list)

    def add(self, outputs: Any, row: int, scores: torch.Tensor, logits: torch.Tensor, prefill: bool) -> None:
        """Token `row` of a forward; the prefill's states are kept whole. scores: `[1, V]`, logits: `[k + 1, V]`."""
        config = self.config
        if not config.return_dict_in_generate:
            return
        if config.output_scores:
            self.scores.append(scores)
        if config.output_logits:
            self.logits.append(logits[row : row + 1])
        if config.output_hidden_states:
            states = outputs.hidden_states
            if (asked := selected_hidden_states(config.output_hidden_states)) is not None:  # the taps are not
                indices = {i % len(states) for i in asked}
                states = [h if i in indices else None for i, h in enumerate(states)]
            rows = [h if prefill or h is None else h[:, row : row + 1] for h in states]
            self.hidden_states.append(tuple(rows))
        if config.output_attentions:
            kept = [a for a in outputs.attentions if a is not None]
            rest = logits.shape[0] - 1 - row  # keys of later drafted tokens are not there in plain decoding
            rows = [a if prefill else a[:, :, row : row + 1, : a.shape[-1] - rest] for a in kept]
            self.attentions.append(tuple(rows))

    @property
    def seen_scores(self) -> tuple[torch.Tensor, ...] | None:
        """What a stopping criterion gets as `scores`."""
        config = self.config
        return tuple(self.scores) if config.return_dict_in_generate and config.output_scores else None

    def result(self, sequences: Any, cache: Any) -> GenerateDecoderOnlyOutput:
        config = self.config
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=tuple(self.scores) if config.output_scores else None,
            logits=tuple(self.logits) if config.output_logits else None,
            attentions=tuple(self.attentions) if config.output_attentions else None,
            hidden_states=tuple(self.hidden_states) if config.output_hidden_states else None,
            cache=cache,
        )


class SharedNoise:
    """One uniform number per new position, drawn once: a draft that was refused has already seen the later ones."""

    def __init__(self) -> None:
        self.u = torch.empty(0, dtype=torch.float64)

    def at(self, start: int, count: int) -> torch.Tensor:  # -> [count] in [0, 1)
        missing = max(start + count - len(self.u), 0)
        self.u = torch.cat([self.u, torch.rand(missing, dtype=torch.float64)])
        return self.u[start : start + count]


def verify(rule: str, draft: Draft, scores: torch.Tensor, u: torch.Tensor | None) -> Verdict:
    """Apply the accept rule of the call. scores: `[k + 1, V]` float32, processed; u: `[k + 1]` under shared noise."""
    if rule == "greedy":
        return verify_greedy(draft.tokens, scores)
    if rule == "shared_noise":
        assert u is not None
        return verify_shared_noise(draft.tokens, scores, u)
    if draft.probs is not None:
        return verify_rejection(draft.tokens, draft.probs, scores)
    return verify_one_hot(draft.tokens, scores)


def emit(
    rule: str,
    draft: Draft,
    raw: torch.Tensor,  # [k + 1, V] float32
    processors: Any,  # LogitsProcessorList
    input_ids: torch.Tensor,  # [1, T]
    u: torch.Tensor | None,  # [k + 1]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """What one target forward yields, one by one: token `[1]`, its processed scores `[1, V]`, whether it was drafted.

    Processors that are not known to be pure get what plain decoding gives them: every prefix once, in order, and none
    behind the token at which the caller stops. So a position is decided before the next one is processed.
    """
    if all(is_pure(p) for p in processors):
        scores = process(processors, input_ids, draft.tokens, raw)
        verdict = verify(rule, draft, scores, u)
        accepted = int(verdict.num_accepted)
        for i in range(accepted):
            yield draft.tokens[i : i + 1], scores[i : i + 1], True
        yield verdict.token.view(1), scores[accepted : accepted + 1], False
        return
    nothing = Draft(draft.tokens[:0])
    drafted = True
    for i, row in enumerate(raw.split(1)):
        if not drafted:
            return
        proposed = draft.tokens[i : i + 1]
        scores = processors(torch.cat([input_ids, draft.tokens[None, :i]], dim=1), row.clone())
        if draft.probs is not None and len(proposed):
            token = verify_children(proposed, draft.probs[i : i + 1], scores[0]).token.view(1)
        else:  # the target's own token, which is the drafted one or not
            token = verify(rule, nothing, scores, None if u is None else u[i : i + 1]).token.view(1)
        drafted = len(proposed) > 0 and bool(token == proposed)
        yield token, scores, drafted


def target_step(
    target: Any,  # PreTrainedModel with GenerationMixin
    forward: Callable[..., ModelOutput],
    input_ids: torch.Tensor,  # [1, T]
    draft_tokens: torch.Tensor,  # [k]
    model_kwargs: dict[str, Any],
) -> ModelOutput:
    """One target forward over the anchor and the drafted tokens; logits of all k + 1 positions."""
    candidates = torch.cat([input_ids, draft_tokens[None]], dim=1)
    size = len(draft_tokens)
    kwargs = copy.copy(model_kwargs)
    # with a cache from an earlier turn these may be longer than the ids
    if (mask := kwargs.get("attention_mask")) is not None:
        kwargs = _prepare_attention_mask(kwargs, mask.shape[1] + size, False)
    if (types := kwargs.get("token_type_ids")) is not None:
        kwargs = _prepare_token_type_ids(kwargs, types.shape[1] + size)
    if (positions := kwargs.get("position_ids")) is not None and size > 0:
        kwargs = _prepare_position_ids(kwargs, positions.shape[-1] + size, False)
    inputs = target.prepare_inputs_for_generation(
        candidates, next_sequence_length=size + 1, is_first_iteration=False, **kwargs
    )
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = size + 1
    return forward(**inputs, return_dict=True)


def generate_with_drafter(
    target: Any,  # PreTrainedModel with GenerationMixin
    input_ids: torch.Tensor,  # [1, T]
    candidates: FlashMapCandidateGenerator,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Decode one sequence. The law is the target's own; greedy output equals plain greedy output in exact arithmetic.

    Returns:
        `[1, T + n]` ids, or a `GenerateDecoderOnlyOutput` as `return_dict_in_generate` asks.

    Raises:
        ValueError: the target's cache cannot be rolled back.
    """
    recorder = Recorder(target.device)
    recorder.add(calls=1)
    collected = Collected(generation_config)
    if generation_config.output_hidden_states is not True:
        asked = selected_hidden_states(generation_config.output_hidden_states) or []
        model_kwargs = model_kwargs | {"output_hidden_states": [*asked, *candidates.tap_layers]}
    noise = SharedNoise() if candidates.rule == "shared_noise" else None
    prompt_length = input_ids.shape[1]
    draft = Draft(input_ids.new_empty(0))
    with recorder.timed("seconds_target"), recorder.timed("seconds_prefill"):
        outputs = target._prefill(input_ids, generation_config, model_kwargs)
    cache = outputs.cache
    if not cache.is_croppable:
        raise ValueError(
            f"The cache of {type(target).__name__} cannot be rolled back (a recurrent state): "
            "generate without assistant_model."
        )
    # only now: recording during the prefill would keep what a sliding window is there to drop
    cache.activate_past_recording()
    real = input_ids.shape[1]
    if (mask := model_kwargs.get("attention_mask")) is not None:
        real = int(mask[0].sum())  # left padding conditions nothing
    seen = outputs.hidden_states[candidates.tap_layers[-1]].shape[1]
    candidates.observe(outputs.hidden_states, max(seen - real, 0), min(real, seen))
    forward = target.__call__
    if target._valid_auto_compile_criteria(model_kwargs, generation_config):
        forward = target.get_compiled_call(generation_config.compile_config)
    finished = False
    while True:
        size = len(draft.tokens)
        prefill = input_ids.shape[1] == prompt_length
        raw = outputs.logits[:, -size - 1 :].to(dtype=torch.float32, device=input_ids.device, copy=True)[0]
        before, accepted = input_ids.shape[1], 0
        u = None if noise is None else noise.at(before - prompt_length, size + 1).to(raw.device)
        for token, scores, drafted in emit(candidates.rule, draft, raw, logits_processor, input_ids, u):
            collected.add(outputs, input_ids.shape[1] - before, scores, raw, prefill)
            input_ids = torch.cat([input_ids, token.to(input_ids.device)[None]], dim=1)
            accepted += drafted
            # the criteria see every prefix once, in order, as in plain decoding
            if bool(stopping_criteria(input_ids, collected.seen_scores).all()):
                finished = True
                break
        committed = input_ids.shape[1] - before
        recorder.add(committed=committed, target_steps=1)
        if size:
            recorder.add_block(size, accepted)
        if streamer is not None:
            streamer.put(input_ids[0, before:].cpu())
        # the cache holds every committed token but the newest
        cache.crop(-(size + 1 - committed))
        model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=committed)
        if finished:
            break
        if not prefill:
            candidates.observe(outputs.hidden_states, 0, committed)
        del outputs
        with recorder.timed("seconds_drafter"):
            place = input_ids.shape[1] - prompt_length
            u = None if noise is None else noise.at(place, candidates.drafter.config.block_size)
            draft = candidates.draft(input_ids, u)
        recorder.add(blocks=int(len(draft.tokens) > 0))
        with recorder.timed("seconds_target"), target._optimize_model_for_decode():
            outputs = target_step(target, forward, input_ids, draft.tokens, model_kwargs)
    recorder.add(plain_calls=int(not candidates.working))
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = False  # the next prefill on this cache may drop what the window drops
    if streamer is not None:
        streamer.end()
    if generation_config.return_dict_in_generate:
        return collected.result(input_ids, cache)
    return input_ids


def process(processors: Any, input_ids: torch.Tensor, draft_tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Processed scores `[k + 1, V]`: row i on the prefix that ends with drafted token i. logits stay as they are."""
    if not processors:
        return logits
    candidates = torch.cat([input_ids, draft_tokens[None]], dim=1)
    length = input_ids.shape[1]
    rows = [processors(candidates[:, : length + i], row[None].clone()) for i, row in enumerate(logits)]
    return torch.cat(rows)
