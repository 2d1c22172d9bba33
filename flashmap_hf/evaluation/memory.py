"""What a method asks for beside the target: bytes of weights, bytes of state per request, bytes read per pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from flashmap_hf import FlashMapDrafter
from flashmap_hf.conditioning import ContextWindow
from flashmap_hf.evaluation.baselines import Baseline
from flashmap_hf.head import DraftHead

CONTEXTS = (512, 4096)  # positions of a request at which its state is stated


@dataclass(frozen=True)
class Footprint:
    """Of one method.

    state_bytes: kept from step to step for one request of that many positions. read_bytes: weights that one drafting
    pass reads, those shared with the target included. per_token: one pass drafts one token (else a block).
    latent_bytes: of the block's latent inside a pass; None: there is none. readout_bytes: of the copy of some of the
    target's unembedding rows that a call makes for its draft vocabulary.
    """

    parameters: int = 0
    weight_bytes: int = 0
    read_bytes: int = 0
    per_token: bool = False
    state_bytes: Callable[[int], int] = lambda context: 0
    latent_bytes: int | None = None
    readout_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "read_bytes": self.read_bytes,
            "per_token": self.per_token,
            "state_bytes": [{"context": size, "bytes": self.state_bytes(size)} for size in CONTEXTS],
            "latent_bytes": self.latent_bytes,
            "readout_bytes": self.readout_bytes,
        }


def tensor_bytes(module: nn.Module) -> int:
    """Of all parameters and buffers; one that is shared counts once."""
    return sum(t.numel() * t.element_size() for t in [*module.parameters(), *module.buffers()])


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def cache_bytes(config: PreTrainedConfig, context: int, dtype: torch.dtype, layers: int | None = None) -> int:
    """Keys and values of a full cache with `context` positions, in the first `layers` layers (None: in all)."""
    text: Any = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * (layers or text.num_hidden_layers) * heads * size * context * dtype.itemsize


def unembedding_bytes(target: PreTrainedModel, rows: int | None = None) -> int:
    """Of `rows` rows of the target's unembedding (None: all)."""
    embeddings: Any = target.get_output_embeddings()
    count: int = embeddings.weight.shape[0] if rows is None else rows
    return count * target.config.get_text_config().hidden_size * target.dtype.itemsize


def readout(head: DraftHead, target: PreTrainedModel) -> tuple[int, int]:
    """Bytes of the target's unembedding that a drafting pass reads, and that a call copies beforehand."""
    if head.low_rank:
        return 0, 0
    shared = unembedding_bytes(target, head.size)
    return shared, shared if head.restricted else 0


def of_language_model(model: PreTrainedModel) -> Footprint:
    """A small language model as the assistant."""
    return Footprint(
        parameters=parameter_count(model),
        weight_bytes=tensor_bytes(model),
        read_bytes=tensor_bytes(model),
        per_token=True,
        state_bytes=lambda context: cache_bytes(model.config, context, model.dtype),
    )


def of_early_exit(target: PreTrainedModel, layers: int) -> Footprint:
    """The target's own first `layers` layers: no weights of their own, but a cache of their own."""
    share = layers / target.config.get_text_config().num_hidden_layers
    unembedding = unembedding_bytes(target)
    tied = target.config.get_text_config().tie_word_embeddings
    blocks = tensor_bytes(target) - unembedding * (1 if tied else 2)
    return Footprint(
        read_bytes=round(share * blocks) + unembedding,
        per_token=True,
        state_bytes=lambda context: cache_bytes(target.config, context, target.dtype, layers),
    )


def of_drafter(drafter: FlashMapDrafter, target: PreTrainedModel, num_steps: int) -> Footprint:
    """A FlashMap drafter: its state is a window of the target's hidden states."""
    config = drafter.config
    shared, copied = readout(drafter.head, target)
    width = len(config.tap_layers or []) * config.target_hidden_size

    def state_bytes(context: int) -> int:
        window = ContextWindow(config.window)
        window.append(torch.empty(1, context, width, dtype=target.dtype, device="meta"))
        assert window.taps is not None
        return window.taps.numel() * window.taps.element_size()

    return Footprint(
        parameters=parameter_count(drafter),
        weight_bytes=tensor_bytes(drafter),
        read_bytes=num_steps * tensor_bytes(drafter) + shared,
        state_bytes=state_bytes,
        latent_bytes=config.block_size * config.target_hidden_size * drafter.dtype.itemsize,
        readout_bytes=copied,
    )


def of_baseline(baseline: Baseline, target: PreTrainedModel) -> Footprint:
    """One of the trained baselines; the one that drafts token by token reads its weights as often."""
    shared, copied = readout(baseline.drafter.head, target)
    return Footprint(
        parameters=baseline.parameters,
        weight_bytes=baseline.weight_bytes,
        read_bytes=baseline.weight_bytes + shared,
        per_token=baseline.name == "eagle",
        state_bytes=baseline.state_bytes,
        readout_bytes=copied,
    )
