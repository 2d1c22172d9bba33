"""Fingerprints of a tokenizer: they bind a drafter to the vocabulary and the chat template that it was trained with."""

import hashlib
import json

from transformers import PreTrainedTokenizerBase


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 (first 16 hex digits) of the token -> id table, added tokens included."""
    table = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(table, ensure_ascii=False).encode()).hexdigest()[:16]


def chat_template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """sha256 (first 16 hex digits) of the chat template; None without one."""
    template = tokenizer.chat_template
    if template is None:
        return None
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]
