"""The decoding loop: draft a block, verify it in one target forward, commit token by token, stop where plain decoding stops."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from flashmap_hf.candidates import Draft, FlashMapCandidateGenerator
from flashmap_hf.statistics import Recorder
from flashmap_hf.verification import Verdict, verify_greedy, verify_one_hot, verify_rejection, verify_shared_noise


@dataclass
class Collected:
    """What `return_dict_in_generate` returns, one entry per token, as plain generation collects it."""

    config: GenerationConfig
    scores: list[torch.Tensor] = field(default_factory=list)  # [1, V] each
    logits: list[torch.Tensor] = field(default_factory=list)
    attentions: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    hidden_states: list[tuple[torch.Tensor, ...]] = field(default_factory=list)

    def add(self, outputs: ModelOutput, row: int, scores: torch.Tensor, logits: torch.Tensor, prefill: bool) -> None:
        """Token `row` of a forward; the prefill's states are kept whole. scores, logits: `[k + 1, V]`."""
        config = self.config
        if not config.return_dict_in_generate:
            return
        if config.output_scores:
            self.scores.append(scores[row : row + 1])
        if config.output_logits:
            self.logits.append(logits[row : row + 1])
        if config.output_hidden_states:
            states = outputs.hidden_states
            self.hidden_states.append(tuple(states) if prefill else tuple(h[:, row : row + 1] for h in states))
        if config.output_attentions:
            kept = [a for a in outputs.attentions if a is not None]
            rest = scores.shape[0] - 1 - row  # keys of later drafted tokens are not there in plain decoding
            rows = [a if prefill else a[:, :, row : row + 1, : a.shape[-1] - rest] for a in kept]
            self.attentions.append(tuple(rows))

    def result(self, sequences: torch.Tensor, cache: Any) -> GenerateDecoderOnlyOutput:
        config = self.config
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=tuple(self.scores) if config.output_scores else None,
            logits=tuple(self.logits) if config.output_logits else None,
            attentions=tuple(self.attentions) if config.output_attentions else None,
            hidden_states=tuple(self.hidden_states) if config.output_hidden_states else None,
            cache=cache,
        )


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


def target_step(
    target: PreTrainedModel,
    forward: Callable[..., ModelOutput],
    input_ids: torch.Tensor,  # [1, T]
    draft_tokens: torch.Tensor,  # [k]
    model_kwargs: dict[str, Any],
) -> ModelOutput:
    """One target forward over the anchor and the drafted tokens; logits of all k + 1 positions."""
    candidates = torch.cat([input_ids, draft_tokens[None]], dim=1)
    size = len(draft_tokens)
    kwargs = _prepare_attention_mask(copy.copy(model_kwargs), candidates.shape[1], False)
    kwargs = _prepare_token_type_ids(kwargs, candidates.shape[1])
    if (positions := kwargs.get("position_ids")) is not None and size > 0:
        kwargs = _prepare_position_ids(kwargs, positions.shape[-1] + size, False)
    inputs = target.prepare_inputs_for_generation(
        candidates, next_sequence_length=size + 1, is_first_iteration=False, **kwargs
    )
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = size + 1
    return forward(**inputs, return_dict=True)


def generate_with_drafter(
    target: PreTrainedModel,
    input_ids: torch.Tensor,  # [1, T]
    candidates: FlashMapCandidateGenerator,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Decode one sequence. The emitted law is the target's own; greedy output equals plain greedy output in exact arithmetic.

    Returns:
        `[1, T + n]` ids, or a `GenerateDecoderOnlyOutput` as `return_dict_in_generate` asks.

    Raises:
        ValueError: the target's cache cannot be rolled back.
    """
    recorder = Recorder(target.device)
    recorder.add(calls=1)
    collected = Collected(generation_config)
    if not generation_config.output_hidden_states:
        model_kwargs = model_kwargs | candidates.model_kwargs_overrides
    u = None
    if candidates.rule == "shared_noise":
        # one number per absolute position, drawn once: a draft that was refused has already seen the later ones
        positions = generation_config.max_length - input_ids.shape[1] + candidates.drafter.config.block_size + 1
        u = torch.rand(positions, dtype=torch.float64)
    prompt_length = input_ids.shape[1]
    draft = Draft(input_ids.new_empty(0))
    with recorder.timed("seconds_target"), recorder.timed("seconds_prefill"):
        outputs = target._prefill(input_ids, generation_config, model_kwargs)
    cache = outputs.cache
    if not cache.is_croppable:
        raise ValueError(
            f"The cache of {type(target).__name__} cannot be rolled back (a recurrent state): generate without assistant_model."
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
        scores = process(logits_processor, input_ids, draft.tokens, raw)
        place = input_ids.shape[1] - prompt_length
        noise = None if u is None else u[place : place + size + 1].to(scores.device)
        verdict = verify(candidates.rule, draft, scores, noise)
        accepted = int(verdict.num_accepted)
        tokens = torch.cat([draft.tokens[:accepted], verdict.token.view(1).to(input_ids.device)])
        committed = 0
        for token in tokens:  # the criteria see every prefix once, in order, as in plain decoding
            input_ids = torch.cat([input_ids, token.view(1, 1)], dim=1)
            collected.add(outputs, committed, scores, raw, prefill)
            committed += 1
            if bool(
                stopping_criteria(input_ids, tuple(collected.scores) if generation_config.output_scores else None).all()
            ):
                finished = True
                break
        recorder.add(committed=committed, target_steps=1)
        if size:
            recorder.add_block(size, min(accepted, committed))
        if streamer is not None:
            streamer.put(tokens[:committed].cpu())
        # the cache holds every committed token but the newest
        cache.crop(-(size + 1 - committed))
        model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=committed)
        if finished:
            break
        if not prefill:
            candidates.observe(outputs.hidden_states, 0, committed)
        del outputs
        with recorder.timed("seconds_drafter"):
            upcoming = None
            if u is not None:
                start = input_ids.shape[1] - prompt_length
                upcoming = u[start : start + candidates.drafter.config.block_size]
            draft = candidates.draft(input_ids, upcoming)
        recorder.add(blocks=int(len(draft.tokens) > 0))
        with recorder.timed("seconds_target"), target._optimize_model_for_decode():
            outputs = target_step(target, forward, input_ids, draft.tokens, model_kwargs)
    if streamer is not None:
        streamer.end()
    if generation_config.return_dict_in_generate:
        return collected.result(input_ids, cache)
    return input_ids


def process(
    processors: LogitsProcessorList, input_ids: torch.Tensor, draft_tokens: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """Processed scores `[k + 1, V]`: row i on the prefix that ends with the i-th drafted token. logits are not changed."""
    if not processors:
        return logits
    candidates = torch.cat([input_ids, draft_tokens[None]], dim=1)
    length = input_ids.shape[1]
    rows = [processors(candidates[:, : length + i], row[None].clone()) for i, row in enumerate(logits)]
    return torch.cat(rows)
