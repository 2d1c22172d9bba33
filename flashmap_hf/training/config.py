"""TrainConfig: every option of a training run, which is also its command line; and the schedule that it describes."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from flashmap_hf.options import option

# of the drafter
SHAPE = ("layers", "hidden_size", "block_size", "window", "draft_vocab", "coupling", "head_rank", "transition_rank")


@dataclass(frozen=True)
class TrainConfig:
    """Options of a run. What each is for stands beside it, and in `flashmap train --help`.

    Raises:
        ValueError: a value is out of range, or two options exclude each other; names them.
    """

    out: Path = option(Path(), "folder of the run: checkpoints, log and drafter; a run in it is resumed")
    target: str = option("smollm2-135m-instruct", "an embedded target, a folder or a Hub id")
    # data: one of the two
    features: list[Path] = option(factory=list, help="folders of `flashmap features`")
    answers: Path | None = option(None, "with --online: answers to make features of while training")
    online: bool = option(False, "no feature files: one target forward per answer and epoch, where disk is short")
    held_out: int = option(64, "greedy answers to measure on, and half as many sampled ones; no block comes from them")
    # the drafter: its shape, a file that describes it, or one to start from
    config: Path | None = option(None, "a drafter's config.json, or its folder: train one of this shape")
    drafter: str | None = option(None, "start from this drafter's weights (folder or Hub id), and keep its shape")
    lora: int | None = option(None, "adapt --drafter by low-rank adapters of this rank, with peft")
    merge: bool = option(False, "with --lora: also write the drafter with the adapter merged in")
    layers: int = option(4, "layers of the velocity network")
    hidden_size: int | None = option(None, "its width (default: the target's)")
    block_size: int = option(5, "K, tokens drafted in one pass")
    window: int = option(16, "W, committed positions that condition a block")
    draft_vocab: int = option(8192, "tokens that the drafter can propose, the most frequent ones; 0, or too many: all")
    coupling: Literal["quantile", "independent"] = option("quantile", "what z_0 is: the target's own noise, or another")
    head_rank: int | None = option(None, "a low-rank head of its own of this rank (default: the target's unembedding)")
    transition_rank: int | None = option(None, "rank of the bias from the previously drafted token (default: none)")
    # budget
    max_minutes: float | None = option(None, "wall-clock budget over all resumes (default: 60, without --max-steps)")
    max_steps: int | None = option(None, "budget in steps; with both, what is spent first ends the run")
    patience: int = option(0, "stop after so many measurements without a better one, keep the best; 0: never")
    checkpoint_minutes: float = option(5.0, "time between checkpoints, with a measurement each")
    # batches
    runs: int = option(24, "a batch is so many runs of consecutive anchors, on each process")
    run_length: int = option(2, "anchors of a run; they share the context, which is computed once")
    hide_share: float = option(
        0.2,
        "share of the sampled blocks with hidden noise u; with --kl of half as many greedy ones",
    )
    start_share: float = option(0.85, "share of the blocks at time s = 0; the others draw s from U[0, 0.9)")
    # losses
    cross_entropy: float = option(1.0, "weight of the cross-entropy at the endpoint")
    velocity: float = option(0.1, "weight of the flow-matching velocity loss")
    kl: float = option(0.0, "weight of KL(target at temperature 1 || drafter), where the noise is hidden or zero")
    position_decay: float = option(0.85, "position k weighs this to the power k - 1, in every loss")
    # optimisers
    optimiser: Literal["adamw", "muon"] = option("adamw", "for matrices; everything else has AdamW")
    muon_lr: float = option(0.02, "peak rate of Muon")
    adam_lr: float = option(5e-4, "peak rate of AdamW")
    weight_decay: float = option(0.01, "of the matrices")
    ns_steps: int = option(3, "Newton-Schulz steps of Muon")
    clip: float = option(1.0, "gradient norm of what AdamW moves (Muon does not see the norm)")
    warmup: float = option(0.02, "share of the budget in which the rates rise")
    decay: float = option(0.4, "share of the budget in which they fall to zero, at its end")
    ema: float = option(0.995, "decay of the averaged weights per step; they are what is measured and saved")
    precision: Literal["auto", "no", "bf16"] = option("auto", "autocast; auto: bf16 where it is native")
    # report
    log_steps: int = option(20, "steps between two lines of log.jsonl")
    report_to: Literal["auto", "none", "trackio", "tensorboard"] = option("auto", "auto: the first that is installed")
    seed: int = option(0, "of weights, order and noise")
    # what a run would take; nothing is loaded or trained
    dry_run: bool = option(False, "print parameters, memory, FLOP and hours; with --out also write dry_run.json there")
    tokens: int = option(100_000_000, "with --dry-run: tokens of the answers; each is the anchor of a block")
    gpu: str | None = option(None, "with --dry-run: a GPU that it knows, such as 'RTX 4090'")
    gpu_tflops: float | None = option(None, "with --dry-run: dense bfloat16 peak of another one, in 10^12 FLOP/s")
    gpu_gib: float | None = option(None, "with --dry-run: its memory")
    utilisation: float = option(0.3, "with --dry-run: share of the peak that is assumed to be reached")

    def __post_init__(self) -> None:
        self._check_purpose()
        if (self.lora is not None and self.drafter is None) or (self.merge and self.lora is None):
            raise ValueError("--lora adapts a drafter: name it with --drafter. --merge goes with --lora.")
        for name in ("max_minutes", "max_steps", "runs", "run_length", "muon_lr", "adam_lr", "ns_steps", "clip",
                     "checkpoint_minutes", "log_steps", "lora", "layers", "hidden_size", "block_size", "window",
                     "head_rank", "transition_rank", "tokens", "gpu_tflops", "gpu_gib", "utilisation"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value}: must be a finite number greater than 0.")
        most = {"muon_lr": 10, "adam_lr": 10, "run_length": 4096, "block_size": 256, "seed": 2**32}
        for name, highest in most.items():
            if getattr(self, name) > highest:
                raise ValueError(f"{name}={getattr(self, name)}: must be at most {highest}.")
        for name in ("warmup", "decay", "start_share", "hide_share", "ema", "position_decay", "utilisation"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)}: must lie between 0 and 1.")
        for name in ("cross_entropy", "velocity", "kl", "weight_decay", "held_out", "patience", "draft_vocab", "seed"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: must be a finite number, 0 or greater.")
        if self.cross_entropy == self.velocity == self.kl == 0.0:
            raise ValueError("cross_entropy, velocity and kl are all 0: there is no loss to train with.")

    def _check_purpose(self) -> None:
        """A run needs a folder and answers, a dry run a GPU; the drafter's shape comes from one place."""
        described = self.gpu_tflops is not None and self.gpu_gib is not None
        if self.dry_run:
            if self.lora is not None:
                raise ValueError("--dry-run reckons with whole drafters: leave out --lora.")
            if (self.gpu is not None) == described or (self.gpu_tflops is None) != (self.gpu_gib is None):
                raise ValueError("--dry-run: name a GPU with --gpu, or describe one with --gpu-tflops and --gpu-gib.")
        elif self.gpu is not None or self.gpu_tflops is not None or self.gpu_gib is not None:
            raise ValueError("--gpu, --gpu-tflops and --gpu-gib go with --dry-run.")
        elif self.out == Path():
            raise ValueError("--out FOLDER: name the folder of the run; one in it is resumed.")
        elif self.online != (self.answers is not None) or self.online == bool(self.features):
            raise ValueError("Train on --features FOLDER, or on --answers FILE with --online.")
        if self.config is not None:
            defaults = {field.name: field.default for field in fields(self)}
            given = [name for name in (*SHAPE, "drafter") if getattr(self, name) != defaults[name]]
            if given:
                raise ValueError(f"--config describes the drafter: leave out --{given[0].replace('_', '-')}.")

    @property
    def minutes(self) -> float | None:
        """The budget in minutes, None where steps alone decide."""
        return 60.0 if self.max_minutes is None and self.max_steps is None else self.max_minutes

    def progress(self, seconds: float, step: int) -> float:
        """The share of the budget that is spent; 1 or more: the run is over."""
        shares = [
            seconds / (60 * self.minutes) if self.minutes else 0.0,
            step / self.max_steps if self.max_steps else 0.0,
        ]
        return max(shares)

    def record(self) -> dict[str, Any]:
        """JSON-ready, without the paths of this machine."""

        def plain(value: Any) -> Any:
            if isinstance(value, list):
                return [plain(item) for item in value]
            return value.name if isinstance(value, Path) else value

        values = {field.name: plain(getattr(self, field.name)) for field in fields(self)}
        return values | {name: Path(values[name]).name for name in ("target", "drafter") if is_folder(values[name])}


def is_folder(name: str | None) -> bool:
    return name is not None and Path(name).is_dir()


def learning_rate_scale(progress: float, warmup: float, decay: float) -> float:
    """Trapezoid over the budget: up, flat, then linearly down to zero."""
    return max(0.0, min(1.0, progress / warmup if warmup else 1.0, (1 - progress) / decay if decay else 1.0))
