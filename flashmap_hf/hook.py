"""The one place that touches `GenerationMixin`: from then on `generate(..., assistant_model=drafter)` uses FlashMap.

Four methods are wrapped. For any other `assistant_model` each calls the original with the same arguments.
"""

import copy
import functools
import inspect
from contextvars import ContextVar
from typing import Any

from transformers import GenerationConfig
from transformers.generation import GenerationMixin

from flashmap_hf import compatibility
from flashmap_hf.candidates import FlashMapCandidateGenerator
from flashmap_hf.doors import as_drafter, decode
from flashmap_hf.generation_config import OWN_OPTIONS, DraftOptions
from flashmap_hf.modeling_flashmap import FlashMapDrafter

_options: ContextVar[DraftOptions | None] = ContextVar("flashmap_options", default=None)


def install() -> None:
    """Wrap `GenerationMixin`; a second call changes nothing, a second copy of the package adds its own class."""
    if getattr(GenerationMixin.generate, "_flashmap", None) is FlashMapDrafter:
        return
    mixin: Any = GenerationMixin
    mixin.generate = _wrap_generate(mixin.generate)
    mixin._assisted_decoding = _wrap_assisted_decoding(mixin._assisted_decoding)
    mixin._get_candidate_generator = _wrap_get_candidate_generator(mixin._get_candidate_generator)
    mixin._validate_generation_mode = _wrap_validate_generation_mode(mixin._validate_generation_mode)


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
        # those of ours are read; `generate` would take them for typing errors
        keywords = {name: value for name, value in keywords.items() if name not in OWN_OPTIONS}
        bound.arguments["kwargs"] = keywords
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
        for name in ("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor"):
            kwargs.pop(name, None)
        options = _call_options(drafter, generation_config)
        return decode(
            self, drafter, options, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
        )

    return _assisted_decoding


def _wrap_get_candidate_generator(original: Any) -> Any:
    @functools.wraps(original)
    def _get_candidate_generator(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(self, *args, **kwargs).arguments
        drafter = as_drafter(bound.get("assistant_model"))
        if drafter is None:
            return original(self, *args, **kwargs)
        config = bound["generation_config"]
        options = _call_options(drafter, config)
        return FlashMapCandidateGenerator(drafter, self, config, bound["logits_processor"], options)

    return _get_candidate_generator


def _wrap_validate_generation_mode(original: Any) -> Any:
    @functools.wraps(original)
    def _validate_generation_mode(self: Any, generation_mode: Any, generation_config: Any, kwargs: Any) -> Any:
        if (
            as_drafter(kwargs.get("assistant_model")) is not None
        ):  # transformers' own loop takes one sequence, ours many
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1
        return original(self, generation_mode, generation_config, kwargs)

    return _validate_generation_mode


def _call_options(drafter: FlashMapDrafter, generation_config: GenerationConfig) -> DraftOptions:
    options = _options.get()
    if options is None:  # a decoding method was called without going through `generate`
        options = DraftOptions.resolve(
            {}, generation_config, None, drafter.generation_config, drafter.config.block_size, drafter.config.num_steps
        )
    return options
