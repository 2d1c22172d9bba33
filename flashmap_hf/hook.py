"""The one place that touches `GenerationMixin`: from then on `generate(..., assistant_model=drafter)` uses FlashMap.

Three methods are wrapped. For any other `assistant_model` each calls the original with the same arguments.
"""

import functools
import inspect
import warnings
from contextvars import ContextVar
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from flashmap_hf import compatibility
from flashmap_hf.candidates import FlashMapCandidateGenerator
from flashmap_hf.decoding import generate_with_drafter
from flashmap_hf.generation_config import DraftOptions
from flashmap_hf.modeling_flashmap import FlashMapDrafter
from flashmap_hf.statistics import Recorder

_options: ContextVar[DraftOptions | None] = ContextVar("flashmap_options", default=None)


def as_drafter(assistant_model: Any) -> FlashMapDrafter | None:
    """The drafter behind `assistant_model`, which peft may have wrapped; None for any other assistant."""
    if isinstance(assistant_model, FlashMapDrafter):
        return assistant_model
    base = getattr(assistant_model, "get_base_model", None)
    inner = base() if callable(base) else None
    return inner if isinstance(inner, FlashMapDrafter) else None


def install() -> None:
    """Wrap `GenerationMixin`; a second call changes nothing, a second copy of the package adds its own class."""
    if getattr(GenerationMixin.generate, "_flashmap", None) is FlashMapDrafter:
        return
    mixin: Any = GenerationMixin
    mixin.generate = _wrap_generate(mixin.generate)
    mixin._assisted_decoding = _wrap_assisted_decoding(mixin._assisted_decoding)
    mixin._get_candidate_generator = _wrap_get_candidate_generator(mixin._get_candidate_generator)


def _wrap_generate(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(self, *args, **kwargs)
        drafter = as_drafter(bound.arguments.get("assistant_model"))
        if drafter is None:
            return original(self, *args, **kwargs)
        bound.arguments["assistant_model"] = drafter
        call: GenerationConfig | None = bound.arguments.get("generation_config")
        keywords: dict[str, Any] = bound.arguments.get("kwargs", {})
        compatibility.check_target(drafter.config, self, keywords.get("tokenizer"))
        options = DraftOptions.resolve(
            keywords,
            call,
            self.generation_config,
            drafter.generation_config,
            drafter.config.block_size,
            drafter.config.num_steps,
        )
        merged, _ = self._prepare_generation_config(call, **keywords)
        compatibility.check_call(merged, bound.arguments.get("custom_generate"))
        token = _options.set(options)
        try:
            return original(*bound.args, **bound.kwargs)
        finally:
            _options.reset(token)

    generate._flashmap = FlashMapDrafter  # type: ignore[attr-defined]
    return generate


def _wrap_assisted_decoding(original: Any) -> Any:
    @functools.wraps(original)
    def _assisted_decoding(
        self: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **kwargs: Any,
    ) -> Any:
        drafter = as_drafter(kwargs.get("assistant_model"))
        if drafter is None:
            return original(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        streamer, synced_gpus = kwargs.pop("streamer", None), kwargs.pop("synced_gpus", False)
        for name in ("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor"):
            kwargs.pop(name, None)
        batch_size, length = input_ids.shape
        compatibility.check_inputs(batch_size, length, synced_gpus, kwargs)
        obstacle = None
        if compatibility.has_guidance(logits_processor):
            obstacle = "guidance_scale runs the target twice per token"
        elif drafter.device.type == "meta":
            obstacle = "The drafter's weights are on the meta device (not loaded, or offloaded)"
        if obstacle is not None:
            warnings.warn(f"{obstacle}: decoding without the drafter.", stacklevel=3)
            result = self._sample(
                input_ids, logits_processor, stopping_criteria, generation_config, streamer=streamer, **kwargs
            )
            tokens = result if isinstance(result, torch.Tensor) else result.sequences
            steps = tokens.shape[1] - input_ids.shape[1]
            Recorder(self.device).add(calls=1, plain_calls=1, committed=steps, target_steps=steps)
            return result
        candidates = _candidates(drafter, self, generation_config, logits_processor)
        return generate_with_drafter(
            self, input_ids, candidates, logits_processor, stopping_criteria, generation_config, streamer, kwargs
        )

    return _assisted_decoding


def _wrap_get_candidate_generator(original: Any) -> Any:
    @functools.wraps(original)
    def _get_candidate_generator(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(self, *args, **kwargs).arguments
        drafter = as_drafter(bound.get("assistant_model"))
        if drafter is None:
            return original(self, *args, **kwargs)
        return _candidates(drafter, self, bound["generation_config"], bound["logits_processor"])

    return _get_candidate_generator


def _candidates(
    drafter: FlashMapDrafter, target: PreTrainedModel, generation_config: GenerationConfig, logits_processor: Any
) -> FlashMapCandidateGenerator:
    options = _options.get()
    if options is None:  # a decoding method was called without going through `generate`
        options = DraftOptions.resolve(
            {}, generation_config, None, drafter.generation_config, drafter.config.block_size, drafter.config.num_steps
        )
    return FlashMapCandidateGenerator(drafter, target, generation_config, logits_processor, options)
