"""Does this drafter fit this target and this call? Asked before the first forward; one clear sentence where it does not."""

from typing import Any

from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor

from flashmap_hf.configuration_flashmap import FlashMapConfig
from flashmap_hf.fingerprints import chat_template_hash, vocabulary_hash

# They keep state between calls (a cache of their own), so they cannot be asked about drafted prefixes.
STATEFUL_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor,)


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
    text = target.config.get_text_config()
    facts = [
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


def check_call(config: GenerationConfig, target: PreTrainedModel) -> None:
    """Refuse options of `generate` that block drafting does not support.

    Raises:
        ValueError: names the option and the way out.
    """
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={config.num_beams} cannot be combined with a drafter: drop num_beams or assistant_model."
        )
    if (config.num_return_sequences or 1) > 1:
        raise ValueError(
            f"num_return_sequences={config.num_return_sequences} cannot be combined with a drafter: call generate once per sequence."
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
    ):
        if getattr(config, name, None) is not None:
            raise ValueError(f"{name} selects another decoding method: drop {name} or assistant_model.")
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder; a FlashMap drafter needs a decoder-only target."
        )


def check_inputs(batch_size: int, length: int, synced_gpus: bool, model_kwargs: dict[str, Any]) -> None:
    """Refuse inputs that block drafting does not support.

    Raises:
        ValueError: names the input and the way out.
    """
    if batch_size > 1:
        raise ValueError(
            f"input_ids has batch size {batch_size}: a drafter speeds up one sequence at a time; call generate per row."
        )
    if length == 0:
        raise ValueError("inputs_embeds without input_ids cannot be combined with a drafter: pass input_ids.")
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
            "use cache_implementation='dynamic', or generate without assistant_model."
        )


def has_stateful_processor(processors: LogitsProcessorList) -> bool:
    """Whether a processor keeps state between calls; then only plain decoding is right."""
    return any(isinstance(p, STATEFUL_PROCESSORS) for p in processors)
