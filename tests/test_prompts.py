"""A prompt as the user types it -> token ids."""

import pytest
import torch
from conftest import tiny_target
from tiny_files import SPECIAL, byte_tokenizer
from transformers import BloomConfig, BloomForCausalLM

from flashmap_hf.prompts import check_length, check_prompt, encode


def text_of(tokenizer, encoded) -> str:
    return tokenizer.decode(encoded["input_ids"][0])


def test_a_chat_template_is_applied(tiny_llama):
    tokenizer = byte_tokenizer()
    encoded = encode(tiny_llama, tokenizer, "Hi 5!")
    assert text_of(tokenizer, encoded) == "<bos>user: Hi 5!\n"
    assert encoded.keys() == {"input_ids", "attention_mask"}
    assert encoded["input_ids"].shape == encoded["attention_mask"].shape
    assert torch.all(encoded["attention_mask"] == 1)


def test_text_is_taken_as_it_is_without_a_template(tiny_llama):
    tokenizer = byte_tokenizer(chat_template=None)
    assert text_of(tokenizer, encode(tiny_llama, tokenizer, " Hi 5!\n")) == " Hi 5!\n"


@pytest.mark.parametrize("prompt", ["", " ", "\n\t"])
def test_an_empty_prompt_is_refused(tiny_llama, prompt):
    with pytest.raises(ValueError, match="the prompt is empty"):
        check_prompt(prompt)
    with pytest.raises(ValueError, match="the prompt is empty"):
        encode(tiny_llama, byte_tokenizer(), prompt)


def test_the_target_must_hold_prompt_and_answer():
    target = tiny_target(max_position_embeddings=16)
    check_length(target, 10, 6)
    with pytest.raises(ValueError, match=r"10 tokens .* max_new_tokens is 7.* 16 in all.* at most 6 new tokens"):
        check_length(target, 10, 7)
    with pytest.raises(ValueError, match=r"has 16 tokens, the target holds 16 in all: shorten the prompt$"):
        check_length(target, 16, 1)


def test_positions_of_every_name_are_found():
    with pytest.raises(ValueError, match="holds 16"):
        check_length(tiny_target("gpt2", max_position_embeddings=16), 20, 1)


def test_a_target_without_a_limit_takes_any_length():
    config = BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2)  # biases attention by distance
    check_length(BloomForCausalLM(config), 10**6, 10**6)


def test_the_special_tokens_of_a_template_are_tokens(tiny_llama):
    assert encode(tiny_llama, byte_tokenizer(), "Hi")["input_ids"][0, 0] == SPECIAL.index("<bos>")
