"""A prompt as the user types it -> the token ids that the target continues."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def encode(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[str]
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, `[1, T]` each, on the target's device.

    The prompt is one user turn of the tokenizer's chat template, and plain text where it has none; several texts are
    a conversation: user and assistant in turn, the user first and last.

    Raises:
        ValueError: the prompt, or the user's last turn, is empty.
    """
    texts = [prompt] if isinstance(prompt, str) else list(prompt)
    check_prompt(texts[-1])
    if tokenizer.chat_template is None:
        encoded = tokenizer("\n\n".join(texts), return_tensors="pt", verbose=False)
    else:
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        encoded = tokenizer.apply_chat_template(
            turns,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            tokenizer_kwargs={"verbose": False},  # what is too long is refused below, in one line
        )
    return {name: encoded[name].to(target.device) for name in ("input_ids", "attention_mask")}


def check_prompt(prompt: str) -> None:
    """Raise ValueError for a prompt without a visible character, or with bytes that are not text."""
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # what Python makes of undecodable bytes
        raise ValueError("the prompt holds bytes that are not text: give it in UTF-8")
    if not prompt.strip():
        raise ValueError("the prompt is empty: give the target some text to continue")


def check_length(target: PreTrainedModel, length: int, max_new_tokens: int) -> None:
    """Raise ValueError where `length` prompt tokens and `max_new_tokens` more exceed the target's positions."""
    positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return
    if length >= positions:
        raise ValueError(f"the prompt has {length} tokens, the target holds {positions} in all: shorten the prompt")
    if length + max_new_tokens > positions:
        raise ValueError(
            f"the prompt has {length} tokens and max_new_tokens is {max_new_tokens}, the target holds {positions} in "
            f"all: shorten the prompt, or ask for at most {positions - length} new tokens"
        )
