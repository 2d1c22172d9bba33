"""A drafter that knows the future: it proposes the text it was taught, spoilt at chosen places."""

import functools
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

import flashmap_hf
from flashmap_hf import FlashMapConfig, FlashMapDrafter, Statistics
from flashmap_hf.modeling_flashmap import FlashMapOutput

CHARACTERS = [chr(i) for i in range(ord("!"), ord("~") + 1)]
PAIRS = [first + second for first in "abcdefghij" for second in "klmnop"]
VOCABULARY = CHARACTERS + PAIRS  # token = its text, so that a stop string may begin and end inside tokens
BLOCK = 4  # K
PROMPT = torch.tensor([[5, 17, 33, 80, 2, 9]])
PLAIN: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def tiny_target(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> LlamaForCausalLM:
    """A random Llama over `VOCABULARY`, its logits far from ties."""
    fields = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**(fields | overrides))).to(dtype).eval()


@functools.cache
def scene() -> tuple[LlamaForCausalLM, torch.Tensor]:
    """A target and its greedy text, `[1, T]`; its first 12 tokens are all different. Tests change neither."""
    target = tiny_target(31)
    text = target.generate(PROMPT, max_new_tokens=24, **PLAIN)
    assert len(set(text[0, PROMPT.shape[1] :][:12].tolist())) == 12
    return target, text


def continuation() -> list[int]:
    """What follows the prompt in the text of `scene`."""
    return scene()[1][0, PROMPT.shape[1] :].tolist()


def tiny_drafter(target: PreTrainedModel, **overrides: Any) -> FlashMapDrafter:
    """An untrained drafter: next to nothing of what it proposes is accepted."""
    return make(FlashMapDrafter, target, **overrides)


def make(cls: type[FlashMapDrafter], target: PreTrainedModel, **overrides: Any) -> Any:
    fields = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "block_size": BLOCK, "window": 4}
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return fixed(cls.from_target(target, **(fields | overrides)))


def fixed(drafter: Any) -> Any:
    """In eval mode, drafting a whole block at every step: what a tiny target's forwards cost says nothing."""
    drafter.generation_config.adaptive = False
    return drafter.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is `VOCABULARY[i]`."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.BPE(vocabulary, merges=[(pair[0], pair[1]) for pair in PAIRS]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


class Oracle(FlashMapDrafter):
    """Proposes the text that it was taught, but for the positions in `wrong`.

    It finds its place by the newest hidden state in its context, so a wrong context makes wrong drafts.
    """

    def __init__(self, config: FlashMapConfig):
        super().__init__(config)
        self.passes = 0
        self.confidence = 50.0  # the drafted token's logit; the others have 0
        self.states = self.text = torch.empty(0)
        self.wrong: frozenset[int] = frozenset()

    @torch.no_grad()
    def teach(self, target: PreTrainedModel, text: torch.Tensor, wrong: Sequence[int] = (), **inputs: Any) -> None:
        """text: `[1, T]`, prompt included; wrong: positions in it; inputs: what the target is given beside it."""
        self.states = target(text, output_hidden_states=True, **inputs).hidden_states[-1][0].float()
        self.text, self.wrong = text[0], frozenset(wrong)

    def forward(self, taps: torch.Tensor, *args: Any, **kwargs: Any) -> FlashMapOutput:  # type: ignore[override]
        self.passes += 1
        newest = taps[0, -1, -self.config.target_hidden_size :].float()
        first = int((self.states - newest).square().sum(-1).argmin()) + 2  # the anchor, in between, is committed
        logits = torch.zeros(1, self.config.block_size, self.head.size)
        for slot, position in enumerate(range(first, min(first + self.config.block_size, len(self.text)))):
            token = (int(self.text[position]) + (position in self.wrong)) % self.head.size
            logits[0, slot, token] = self.confidence
        return FlashMapOutput(logits=logits)


def make_oracle(target: PreTrainedModel, **overrides: Any) -> Oracle:
    return make(Oracle, target, **overrides)


def taught(target: PreTrainedModel, text: torch.Tensor, wrong: Sequence[int] = (), **overrides: Any) -> Oracle:
    oracle = make_oracle(target, **overrides)
    oracle.teach(target, text, wrong)
    return oracle


def run(target: PreTrainedModel, drafter: Any, prompt: torch.Tensor = PROMPT, **kwargs: Any) -> tuple[Any, Statistics]:
    """`generate` with the drafter: its result and what happened."""
    with flashmap_hf.record() as stats:
        found = target.generate(prompt, assistant_model=drafter, **(PLAIN | kwargs))
    return found, stats


@contextmanager
def complaints() -> Iterator[list[str]]:
    """Everything that warns inside: Python warnings, and what transformers logs as warnings or worse."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = transformers_logging.get_logger("transformers")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
        found.extend(str(warning.message) for warning in caught)
    finally:
        logger.removeHandler(handler)
