"""A real model that answers one prompt with a text of our choice: its position decides the token, nothing else does."""

from pathlib import Path

import torch
from conftest import tiny_drafter
from tiny_files import byte_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from flashmap_hf.prompts import encode

POSITIONS = 512


@torch.no_grad()
def scripted(prompt: str, text: str) -> GPT2LMHeadModel:
    """Greedy decoding of `prompt`, with `byte_tokenizer`, yields the bytes of `text` and the end token."""
    tokenizer = byte_tokenizer()
    sizes = {"n_positions": POSITIONS, "n_embd": POSITIONS, "n_layer": 3, "n_head": 1, "n_inner": 4}
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), tie_word_embeddings=False, **sizes, **special))
    for block in model.transformer.h:  # the residual stream passes untouched
        for layer in (block.attn.c_proj, block.mlp.c_proj):
            layer.weight.zero_()
            layer.bias.zero_()
    model.transformer.wte.weight.zero_()
    model.transformer.wpe.weight.copy_(torch.eye(POSITIONS))
    start = encode(model, tokenizer, prompt)["input_ids"].shape[1]
    answer = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert start + len(answer) <= POSITIONS
    model.lm_head.weight.zero_()
    for place, token in enumerate(answer, start=start - 1):  # the state at a position chooses the next token
        model.lm_head.weight[token, place] = 1.0
    return model.eval()


def write_scripted(folder: Path, prompt: str, text: str) -> tuple[Path, Path]:
    """The folders of `scripted(prompt, text)` and of an untrained drafter for it."""
    model, tokenizer = scripted(prompt, text), byte_tokenizer()
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    tiny_drafter(model, tokenizer=tokenizer).save_pretrained(folder / "drafter")
    return folder / "target", folder / "drafter"
