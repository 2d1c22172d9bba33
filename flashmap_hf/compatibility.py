"""Does this drafter fit this target and this call? Asked before the first forward; one clear sentence if not."""

from typing import Any

from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import (
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from flashmap_hf.configuration_flashmap import FlashMapConfig
from flashmap_hf.fingerprints import chat_template_hash, vocabulary_hash

# It runs the target once more per token, over a cache of its own: a drafted block would save nothing.
GUIDANCE = UnbatchedClassifierFreeGuidanceLogitsProcessor
# The processors of transformers are functions of their arguments, but for these (a user's function, or state).
NOT_PURE = (GUIDANCE, PrefixConstrainedLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


def check_target(
    config: FlashMapConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Compare the target with the one that the drafter is bound to.

    Raises:
        ValueError: hidden size, layer count, vocabulary size or the tokenizer's vocabulary differ; names both models.
    """
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder; a FlashMap drafter needs a decoder-only target."
        )
    if target._is_stateful:
        raise ValueError(
            f"{type(target).__name__} has a recurrent state, which cannot be rolled back to the accepted tokens: "
            "generate without the drafter."
        )
    text = target.config.get_text_config()
    facts: list[tuple[str, Any, Any]] = [
        ("hidden size", config.target_hidden_size, text.hidden_size),
        ("number of layers", config.target_num_layers, text.num_hidden_layers),
        ("vocabulary size", config.vocab_size, text.vocab_size),
    ]
    if tokenizer is not None and config.tokenizer_hash is not None:
        facts.append(("vocabulary hash", config.tokenizer_hash, vocabulary_hash(tokenizer)))
    for name, expected, found in facts:
        if expected != found:
            raise ValueError(
                f"This drafter was made for {config.target_name or 'another target'} ({name} {expected}), not for "
                f"{target.config.name_or_path or type(target).__name__} ({name} {found}): use a drafter trained for it."
            )


def chat_template_differs(config: FlashMapConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the drafter was trained with another chat template; it still works, with a lower acceptance."""
    return config.chat_template_hash is not None and chat_template_hash(tokenizer) != config.chat_template_hash


def check_call(config: GenerationConfig, custom_generate: Any = None) -> None:
    """Refuse options of `generate` that block drafting does not support.

    Raises:
        ValueError: names the option and the way out.
    """
    if callable(custom_generate):
        raise ValueError(
            "custom_generate is a decoding loop of its own and would not use the drafter: drop it or the drafter."
        )
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={config.num_beams} cannot be combined with a drafter: drop num_beams or the drafter."
        )
    if config.use_cache is False:
        raise ValueError(
            "use_cache=False cannot be combined with a drafter: verification rolls the cache back; drop use_cache."
        )
    for name in (
        "penalty_alpha",
        "dola_layers",
        "constraints",
        "force_words_ids",
        "prompt_lookup_num_tokens",
        "assistant_early_exit",
        "use_mtp",
        "speculation_type",
    ):
        if getattr(config, name, None) not in (None, False):
            raise ValueError(f"{name} selects another decoding method: drop {name} or the drafter.")
    if config.assistant_ensemble_weight is not None:
        raise ValueError("assistant_ensemble_weight trades the target's law for speed; a drafter keeps it: drop it.")
    if config.cache_implementation == "paged":
        raise ValueError("cache_implementation='paged' decodes many prompts at once: drop it or the drafter.")


def check_inputs(batch_size: int, length: int, streamer: Any, synced_gpus: bool, model_kwargs: dict[str, Any]) -> None:
    """Refuse inputs that block drafting does not support.

    Raises:
        ValueError: names the input and the way out.
    """
    if batch_size > 1 and streamer is not None:
        raise ValueError(
            f"A streamer takes one sequence, not {batch_size}: drop streamer, or call generate once per row."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds cannot be combined with a drafter: pass input_ids alone.")
    if length == 0:
        raise ValueError("input_ids is empty: a drafter needs a prompt of at least one token.")
    if synced_gpus:
        raise ValueError(
            "synced_gpus=True cannot be combined with a drafter: ranks would accept different numbers of tokens."
        )
    cache = model_kwargs.get("cache")
    if cache is None:
        raise ValueError(
            "The target made no key-value cache that can be rolled back: it cannot be used with a drafter."
        )
    if cache.layers and (any(cache.is_linear) or not cache.is_croppable):
        raise ValueError(
            f"{type(cache).__name__} cannot be rolled back (recurrent state, quantised, or a static sliding window): "
            "use cache_implementation='dynamic', or generate without the drafter."
        )


def check_batch(
    batch_size: int, obstacle: str | None, processors: LogitsProcessorList, model_kwargs: dict[str, Any]
) -> None:
    """Refuse what only one sequence at a time supports. obstacle: why the target takes no mask of four dimensions.

    Raises:
        ValueError: names the input and the way out.
    """
    if batch_size == 1:
        return
    if obstacle is not None:
        raise ValueError(
            f"A batch of {batch_size} rows cannot be drafted for: {obstacle}. Call generate once per row, or without "
            "the drafter."
        )
    if model_kwargs["cache"].get_seq_length() > 0:
        raise ValueError("A cache of an earlier turn cannot be combined with a batch and a drafter: go on row by row.")
    foreign = [p for p in processors if not is_pure(p) and not isinstance(p, PrefixConstrainedLogitsProcessor)]
    if foreign:
        raise ValueError(
            f"{type(foreign[0]).__name__} may keep state of a whole batch, whose rows advance at their own speed here: "
            "call generate once per row, or without the drafter."
        )


def has_guidance(processors: LogitsProcessorList) -> bool:
    """Whether `guidance_scale` is at work; then plain decoding is the better choice."""
    return any(isinstance(p, GUIDANCE) for p in processors)


def has_virtual_tokens(target: PreTrainedModel) -> bool:
    """Whether peft's prompt learning (prompt, P- and prefix tuning) prepares the inputs of this call.

    It feeds one token after another, and with transformers 5.24 puts its virtual tokens before each.
    """
    owner = getattr(target.prepare_inputs_for_generation, "__self__", None)
    config = getattr(owner, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))


def is_pure(processor: LogitsProcessor) -> bool:
    """Whether a processor is a function of (input_ids, scores), so that any prefix may be asked about, in any order.

    A user's own object is not known to be one: it may keep state (a grammar does) or fail on prefixes that plain
    decoding never shows it.
    """
    return type(processor).__module__ == LogitsProcessor.__module__ and not isinstance(processor, NOT_PURE)
