"""FlashMapConfig: the shape of a drafter and the target that it is bound to."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class FlashMapConfig(PreTrainedConfig):
    """Configuration of a `FlashMapDrafter`.

    The target that the drafter is bound to:

    Args:
        target_name: Hub id (or folder name) of the target.
        target_revision: commit of the target's repository, when known.
        target_hidden_size: D, the target's final hidden size; latents and endpoints live in it.
        target_num_layers: number of layers of the target.
        vocab_size: rows of the target's unembedding (it may be padded beyond the tokenizer).
        tokenizer_size: ids that the tokenizer has; larger ids are never proposed. None: not known, all of `vocab_size`.
        tokenizer_hash: hash of the tokenizer's vocabulary (`fingerprints.vocabulary_hash`).
        chat_template_hash: hash of the chat template used in training (`fingerprints.chat_template_hash`).
        bos_token_id, eos_token_id, pad_token_id: the target's; `pipeline(assistant_model=...)` compares them.

    What it sees and proposes:

        tap_layers: indices into the target's `hidden_states` (0 = embedding, `target_num_layers` = final, normed).
        window: W, committed positions that condition a block.
        block_size: K, tokens proposed in one pass.
        coupling: `quantile` (the prior carries the target's sampling noise u, design of the quantile transport) or
            `independent` (z_0 is Gaussian noise, the literal flow-matching objective).
        num_steps: 1 (one Euler step) or 2 (midpoint).
        anchored_slots: every slot starts from the anchor and the newest context position, beside its latent; otherwise
            attention alone brings them there (drafters of older versions).

    The velocity network (pre-norm transformer over [anchor, z_1..z_K]) and the readout:

        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
        rms_norm_eps, rope_theta, initializer_range: as in any decoder.
        head: `shared` (the target's unembedding, nothing stored) or `low_rank` (own D -> head_rank -> vocabulary).
        head_rank: rank of the low-rank head.
        draft_vocab_size: restrict the readout to this many ids, stored with the weights; None: the whole vocabulary.
        transition_rank: rank of a bias on each position's logits by the token drafted before it; None: no such bias.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    model_type = "flashmap"

    target_name: str = ""
    target_revision: str | None = None
    target_hidden_size: int = 576
    target_num_layers: int = 30
    vocab_size: int = 49152
    tokenizer_size: int | None = None
    tokenizer_hash: str | None = None
    chat_template_hash: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    tap_layers: list[int] | None = None
    window: int = 16
    block_size: int = 5
    coupling: str = "quantile"
    num_steps: int = 1
    anchored_slots: bool = False

    hidden_size: int = 576
    intermediate_size: int = 1536
    num_hidden_layers: int = 4
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    head: str = "shared"
    head_rank: int | None = None
    draft_vocab_size: int | None = None
    transition_rank: int | None = None

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """As in `PreTrainedConfig`, which only warns where the files are those of another kind of model.

        Raises:
            OSError: config.json is not a drafter's.
        """
        fields, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not fields:
            raise OSError(f"{pretrained_model_name_or_path} has no config.json: pass a drafter's folder or Hub id.")
        if fields.get("model_type") != cls.model_type:
            raise OSError(
                f"{pretrained_model_name_or_path} holds a model of type {fields.get('model_type')!r}, not a FlashMap "
                "drafter: is this the target? Pass the drafter's folder or Hub id."
            )
        return fields, kwargs

    def __post_init__(self, **kwargs: Any) -> None:
        if self.tap_layers is None:
            self.tap_layers = [self.target_num_layers]
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        # not a `validate_*` method: `@strict` wraps what those raise in an error class of its own
        for name, choices in (
            ("coupling", ("quantile", "independent")),
            ("num_steps", (1, 2)),
            ("head", ("shared", "low_rank")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(map(str, choices))}.")
        for name in ("block_size", "window", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary positions need an even number.")
        taps = self.tap_layers or []
        if not taps or any(not 0 <= i <= self.target_num_layers for i in taps) or sorted(set(taps)) != taps:
            raise ValueError(
                f"tap_layers={taps}: needs increasing indices into the target's hidden_states, "
                f"0 to target_num_layers={self.target_num_layers}."
            )
        if (self.head == "low_rank") != (self.head_rank is not None):
            raise ValueError(
                f"head={self.head!r} with head_rank={self.head_rank}: a rank belongs to the low_rank head only."
            )
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.num_proposable:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size}: must be between 1 and {self.num_proposable}.")
        if self.transition_rank is not None and self.transition_rank < 1:
            raise ValueError(f"transition_rank={self.transition_rank}: must be at least 1, or None for no transition.")

    @property
    def num_proposable(self) -> int:
        """Ids below this exist in both the tokenizer and the target's unembedding."""
        return self.vocab_size if self.tokenizer_size is None else min(self.vocab_size, self.tokenizer_size)
