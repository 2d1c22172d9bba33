"""Options of one `generate` call, and where each comes from."""

from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, get_args

from transformers import GenerationConfig

MAX_NODES = 64  # of a tree: beyond that its bookkeeping in Python costs more than it can win
Verification = Literal["auto", "rejection", "one_hot", "shared_noise"]


class FlashMapGenerationConfig(GenerationConfig):
    """A `GenerationConfig` with FlashMap's own options.

    Args:
        verification: rule used when sampling: `shared_noise`, `rejection`, `one_hot`, or `auto` (shared noise for a
            drafter with the quantile coupling, else rejection). Greedy decoding needs no rule.
        num_steps: 1 (one Euler step) or 2 (midpoint); None: as the drafter was configured.
        adaptive: choose per step how many tokens to verify, and whether to draft at all, from the measured cost of
            the target and the confidence of the drafter. None: on, unless `num_assistant_tokens` or `tree_size` says
            how many. Decisions depend on the tokens and on one calibration per process, never on a clock.
        tree_size: tokens of a tree, the anchor not counted, verified per step (at most 64). None: a chain, or as many
            as pay where `adaptive` is on.
        num_drafts: a tree of as many tokens as so many blocks have, where `tree_size` does not say. None: 1, a chain.
        draft_temperature: the drafter's logits are divided by it before the call's own processors, under rejection;
            the output's law does not depend on it. Below 1 drafts are sharper, which the overlap with a law that knows
            more gains by. None: 1, or what `flashmap train` found best on held-out answers.
        draft_ngrams: also propose what followed earlier occurrences of the last two or three tokens; needs no drafter
            pass. None: as `adaptive`.
        seed: the call draws from generators of its own with this seed; None: from torch's global one.

    Raises:
        ValueError: a value is not one of the above; names the option.
    """

    def __init__(
        self,
        verification: Verification = "auto",
        num_steps: int | None = None,
        adaptive: bool | None = None,
        tree_size: int | None = None,
        num_drafts: int | None = None,
        draft_temperature: float | None = None,
        draft_ngrams: bool | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if verification not in get_args(Verification):
            raise ValueError(f"verification={verification!r}: choose one of {', '.join(get_args(Verification))}.")
        if num_steps not in (None, 1, 2):
            raise ValueError(f"num_steps={num_steps!r}: 1 is one Euler step, 2 is the midpoint rule.")
        for name, value, most in (
            ("tree_size", tree_size, MAX_NODES), ("num_drafts", num_drafts, MAX_NODES), ("seed", seed, 2**63 - 1),
        ):  # fmt: skip
            lowest = 0 if name == "seed" else 1
            if value is not None and (type(value) is not int or not lowest <= value <= most):
                raise ValueError(f"{name}={value!r}: must be an integer from {lowest} to {most}.")
        heat = draft_temperature
        if heat is not None and not (type(heat) in (int, float) and 0.01 <= heat <= 100):
            raise ValueError(f"draft_temperature={heat!r}: must be a number from 0.01 to 100.")
        for name, flag in (("adaptive", adaptive), ("draft_ngrams", draft_ngrams)):
            if flag not in (None, True, False):
                raise ValueError(f"{name}={flag!r}: must be True or False.")
        self.verification = verification
        self.num_steps = num_steps
        self.adaptive = adaptive
        self.tree_size = tree_size
        self.num_drafts = num_drafts
        self.draft_temperature = draft_temperature
        self.draft_ngrams = draft_ngrams
        self.seed = seed


# What `generate(assistant_model=drafter)` also takes as keywords; the others of `DraftOptions` it knows itself.
OWN_OPTIONS = tuple(name for name in signature(FlashMapGenerationConfig).parameters if name != "kwargs")


@dataclass(frozen=True)
class DraftOptions:
    """What one call asks of the drafter, resolved.

    num_assistant_tokens: tokens per block at most; assistant_confidence_threshold: a block stops where the product of
    draft confidences falls below it (0: never). The others as in `FlashMapGenerationConfig`.
    """

    num_assistant_tokens: int
    assistant_confidence_threshold: float
    verification: Verification
    num_steps: int
    adaptive: bool = False
    tree_size: int | None = None
    num_drafts: int = 1
    draft_temperature: float = 1.0
    draft_ngrams: bool = False
    seed: int | None = None

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
            **{
                name: first(name, None)
                for name in ("adaptive", "tree_size", "num_drafts", "draft_temperature", "draft_ngrams", "seed")
            },
        )
        assert checked.num_steps is not None
        sized = first("num_assistant_tokens", None) is not None or checked.tree_size is not None
        adaptive = not (sized or threshold) if checked.adaptive is None else checked.adaptive
        return cls(
            min(tokens, block_size),
            float(threshold),
            checked.verification,
            checked.num_steps,
            adaptive,
            checked.tree_size,
            checked.num_drafts or 1,
            float(checked.draft_temperature or 1.0),
            adaptive if checked.draft_ngrams is None else checked.draft_ngrams,
            checked.seed,
        )
