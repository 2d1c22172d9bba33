"""Options of one `generate` call, and where each comes from."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import GenerationConfig

Verification = Literal["auto", "rejection", "one_hot", "shared_noise"]


class FlashMapGenerationConfig(GenerationConfig):
    """A `GenerationConfig` with FlashMap's own options.

    Args:
        verification: rule used when sampling: `shared_noise`, `rejection`, `one_hot`, or `auto` (shared noise for a
            drafter with the quantile coupling, else rejection). Greedy decoding needs no rule.
        num_steps: 1 (one Euler step) or 2 (midpoint); None: as the drafter was configured.

    Raises:
        ValueError: a value is not one of the above.
    """

    def __init__(self, verification: Verification = "auto", num_steps: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        if verification not in get_args(Verification):
            raise ValueError(f"verification={verification!r}: choose one of {', '.join(get_args(Verification))}.")
        if num_steps not in (None, 1, 2):
            raise ValueError(f"num_steps={num_steps!r}: 1 is one Euler step, 2 is the midpoint rule.")
        self.verification = verification
        self.num_steps = num_steps


@dataclass(frozen=True)
class DraftOptions:
    """What one call asks of the drafter, resolved.

    num_assistant_tokens: tokens per block at most; assistant_confidence_threshold: a block stops where the product of
    draft confidences falls below it (0: never).
    """

    num_assistant_tokens: int
    assistant_confidence_threshold: float
    verification: Verification
    num_steps: int

    @classmethod
    def resolve(
        cls,
        kwargs: dict[str, Any],
        call: GenerationConfig | None,
        target: GenerationConfig | None,
        drafter: GenerationConfig,
        block_size: int,
        num_steps: int,
    ) -> "DraftOptions":
        """The first that is set counts: keyword of `generate`, its generation config, the target's, the drafter's.

        `generate` merges library defaults (20 tokens, threshold 0.4, meant for autoregressive assistants) over what is
        unset; they are not the user's wish, so the sources are read before that.

        Raises:
            ValueError: a value is out of range; names the option.
        """

        def first(name: str, default: Any, unset: Any = None) -> Any:
            sources = [kwargs.get(name), *(getattr(c, name, None) for c in (call, target, drafter) if c is not None)]
            return next((value for value in sources if value is not None and value != unset), default)

        tokens = first("num_assistant_tokens", block_size)
        threshold = first("assistant_confidence_threshold", 0.0)
        if not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"num_assistant_tokens={tokens!r}: must be a positive integer.")
        if not isinstance(threshold, int | float) or not 0.0 <= threshold <= 1.0:
            raise ValueError(f"assistant_confidence_threshold={threshold!r}: must lie between 0 and 1.")
        checked = FlashMapGenerationConfig(
            verification=first("verification", "auto", unset="auto"),
            num_steps=first("num_steps", num_steps),
        )
        assert checked.num_steps is not None
        return cls(min(tokens, block_size), float(threshold), checked.verification, checked.num_steps)
