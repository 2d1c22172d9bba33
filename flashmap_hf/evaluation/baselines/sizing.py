"""Baselines of the size of a FlashMap drafter: as many parameters, the same draft vocabulary, window and block."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from flashmap_hf.configuration_flashmap import FlashMapConfig
from flashmap_hf.evaluation.baselines.configuration import KINDS, BaselineConfig
from flashmap_hf.evaluation.baselines.dflash import FactorisedDrafter
from flashmap_hf.evaluation.baselines.eagle import FeatureDrafter
from flashmap_hf.evaluation.baselines.medusa import ParallelHeads
from flashmap_hf.evaluation.baselines.modeling import BaselineDrafter
from flashmap_hf.modeling_flashmap import FlashMapDrafter

CLASSES: Mapping[str, type[BaselineDrafter]] = {
    "dflash": FactorisedDrafter,
    "eagle": FeatureDrafter,
    "medusa": ParallelHeads,
}
LIKE_FIELDS = (
    "target_name", "target_revision", "target_hidden_size", "target_num_layers", "vocab_size", "tokenizer_size",
    "tokenizer_hash", "chat_template_hash", "tap_layers", "window", "block_size", "hidden_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "initializer_range",
    "draft_vocab_size",
)  # fmt: skip
TOLERANCE = 0.1  # of the parameters
MULTIPLE = 8  # the inner width is one of it, where that is fine enough


def count_parameters(model_class: type[PreTrainedModel], config: FlashMapConfig) -> int:
    """Without making them."""
    with torch.device("meta"):
        return sum(p.numel() for p in model_class(config).parameters())


def sized_like(kind: str, like: FlashMapConfig) -> BaselineConfig:
    """A baseline of `kind` with as many parameters as a FlashMap drafter of `like`, by the width of its MLPs.

    Raises:
        ValueError: the kind is unknown, or cannot be made within 10 % of that size.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: choose one of {', '.join(KINDS)}.")
    fields = {name: getattr(like, name) for name in LIKE_FIELDS}
    fields |= {"kind": kind, "mask_token_id": like.vocab_size - 1}
    if kind == "eagle":
        fields["num_hidden_layers"] = 1  # as published
    wanted = count_parameters(FlashMapDrafter, like)

    def found(inner: int) -> int:
        return count_parameters(CLASSES[kind], BaselineConfig(**fields, intermediate_size=inner))

    fewest, each = found(1), found(2) - found(1)
    inner = 1 + max(0, round((wanted - fewest) / each))
    if inner > 8 * MULTIPLE:
        inner = round(inner / MULTIPLE) * MULTIPLE
    if abs(found(inner) / wanted - 1) > TOLERANCE:
        raise ValueError(
            f"A baseline of kind {kind!r} has {found(inner)} parameters or more, the drafter it shall match {wanted}: "
            "compare with a larger one."
        )
    return BaselineConfig(**fields, intermediate_size=inner)
