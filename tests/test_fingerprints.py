"""Fingerprints change with the vocabulary and the template, and with nothing else."""

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from flashmap_hf.fingerprints import chat_template_hash, vocabulary_hash


def make(vocabulary: dict[str, int], template: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")))
    tokenizer.chat_template = template
    return tokenizer


def test_vocabulary_hash() -> None:
    first = vocabulary_hash(make({"a": 0, "b": 1}))
    assert first == vocabulary_hash(make({"b": 1, "a": 0}, template="x"))
    assert first != vocabulary_hash(make({"a": 1, "b": 0}))
    assert first != vocabulary_hash(make({"a": 0, "b": 1, "c": 2}))


def test_added_tokens_count() -> None:
    tokenizer = make({"a": 0, "b": 1})
    before = vocabulary_hash(tokenizer)
    tokenizer.add_tokens(["<new>"])
    assert vocabulary_hash(tokenizer) != before


def test_chat_template_hash() -> None:
    assert chat_template_hash(make({"a": 0})) is None
    assert chat_template_hash(make({"a": 0}, "x")) != chat_template_hash(make({"a": 0}, "y"))
