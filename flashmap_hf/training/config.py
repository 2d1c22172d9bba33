"""TrainConfig: every option of a training run, which is also its command line; and the schedule that it describes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainConfig:
    """Options of a run.

    max_minutes: wall-clock budget over all resumes; the learning rate decays to zero at its end.
    runs, run_length: a batch is `runs` runs of `run_length` consecutive anchors.
    muon_lr, adam_lr: peak rates for matrices and for everything else; warmup, decay: shares of the budget.
    ns_steps: Newton-Schulz steps of Muon; clip: gradient norm of what AdamW moves (Muon does not see the norm).
    position_decay, velocity_weight: weights of the losses, see `losses.block_loss`.
    start_share: share of blocks at time s = 0; the rest draw s from U[0, 0.9).
    hide_share: share of the sampled blocks whose noise u is hidden.
    ema: decay of the averaged weights per step; checkpoint_minutes: time between checkpoints.

    Raises:
        ValueError: a value is out of range; names it.
    """

    max_minutes: float = 60.0
    runs: int = 24
    run_length: int = 16
    muon_lr: float = 0.02
    adam_lr: float = 1e-3
    weight_decay: float = 0.01
    ns_steps: int = 3
    warmup: float = 0.02
    decay: float = 0.4
    clip: float = 1.0
    position_decay: float = 0.85
    velocity_weight: float = 0.1
    start_share: float = 0.85
    hide_share: float = 0.2
    ema: float = 0.995
    checkpoint_minutes: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "max_minutes",
            "runs",
            "run_length",
            "muon_lr",
            "adam_lr",
            "ns_steps",
            "clip",
            "checkpoint_minutes",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be greater than 0.")
        for name in ("warmup", "decay", "start_share", "hide_share", "ema", "position_decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)}: must lie between 0 and 1.")


def learning_rate_scale(progress: float, warmup: float, decay: float) -> float:
    """Trapezoid over the budget: up, flat, then linearly down to zero."""
    return max(0.0, min(1.0, progress / warmup if warmup else 1.0, (1 - progress) / decay if decay else 1.0))
