"""A tiny random target with a tokenizer and a drafter for it, as folders that the commands load."""

from pathlib import Path

from conftest import tiny_drafter, tiny_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>"]
TEMPLATE = "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def byte_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte; 259 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL + alphabet)}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template, **names)


def write_target(folder: Path, **overrides: object) -> Path:
    """A random Llama with 512 positions and `byte_tokenizer`."""
    tiny_target("llama", vocab_size=len(byte_tokenizer()), **overrides).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_drafter(folder: Path, chat_template: str | None = TEMPLATE, **overrides: object) -> Path:
    """An untrained drafter for `write_target`'s, bound to `byte_tokenizer(chat_template)`."""
    tokenizer = byte_tokenizer(chat_template)
    target = tiny_target("llama", vocab_size=len(tokenizer))
    tiny_drafter(target, tokenizer=tokenizer, **overrides).save_pretrained(folder)
    return folder
