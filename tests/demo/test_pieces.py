"""Tokens one by one: joined, their pieces are the decoded text."""

import pytest
from tiny_files import byte_tokenizer

from flashmap_hf import targets
from flashmap_hf.demo.pieces import Pieces

TEXTS = ["plain words", "Zoë säße, größer: 東京 🙂 e\u0301", " \n\n  indented\n", "```python\nprint('<b>')\n```", ""]


def all_pieces(tokenizer, tokens: list[int]) -> list[str]:
    pieces = Pieces(tokenizer)
    return [*pieces.add(tokens), pieces.rest()]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_join_to_the_text(text):
    tokenizer = byte_tokenizer()
    tokens = tokenizer(text)["input_ids"]
    found = all_pieces(tokenizer, tokens)
    assert "".join(found) == text
    assert len(found) == len(tokens) + 1
    assert found[-1] == ""


@pytest.mark.parametrize("text", TEXTS)
def test_words_of_the_embedded_target_join_to_the_text(text):
    _, tokenizer = targets.load(targets.SMOLLM2.name)
    assert "".join(all_pieces(tokenizer, tokenizer(text)["input_ids"])) == text


def test_a_character_of_several_tokens_comes_with_the_last():
    tokenizer = byte_tokenizer()
    assert all_pieces(tokenizer, tokenizer("aé!")["input_ids"]) == ["a", "", "é", "!", ""]


def test_an_unfinished_character_at_the_end_is_shown_as_one():
    tokenizer = byte_tokenizer()
    assert all_pieces(tokenizer, tokenizer("aé")["input_ids"][:-1]) == ["a", "", "\ufffd"]


def test_special_tokens_are_left_out():
    tokenizer = byte_tokenizer()
    a, b = tokenizer("ab")["input_ids"]
    assert all_pieces(tokenizer, [a, tokenizer.eos_token_id, b]) == ["a", "", "b", ""]
