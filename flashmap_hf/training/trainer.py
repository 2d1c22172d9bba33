"""FlashMapTrainer: steps, averaged weights, schedule, checkpoints and measurements, on one process or several."""

import time
from typing import Any

import torch
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from flashmap_hf.modeling_flashmap import FlashMapDrafter
from flashmap_hf.progress import ProgressLog
from flashmap_hf.training import checkpoint, run_log
from flashmap_hf.training.blocks import BlockBatch, draw, epoch_batches
from flashmap_hf.training.config import TrainConfig, learning_rate_scale
from flashmap_hf.training.held_out import compared
from flashmap_hf.training.losses import NAMES
from flashmap_hf.training.objective import BlockObjective
from flashmap_hf.training.optimisers import build_optimisers
from flashmap_hf.training.processes import agreed, build_accelerator, whole
from flashmap_hf.training.sources import FeatureSource, Part
from flashmap_hf.training.tied_transition import untie

COUNTERS = ("epoch", "batch_in_epoch", "step", "blocks", "seconds", "score", "best", "without_better")


class FlashMapTrainer:
    """Trains `drafter` in place on `source`; `embeddings` and `unembedding` are the target's `[V, D]` matrices.

    Every random number comes from a generator seeded by the step, so that a resumed run and any number of processes
    draw what one uninterrupted process would. Several processes: start with `accelerate launch`.

    Raises:
        ValueError: `source` is empty, or an option does not fit the drafter.
    """

    def __init__(
        self,
        drafter: FlashMapDrafter,
        embeddings: torch.Tensor,
        unembedding: torch.Tensor,
        source: FeatureSource,
        held_out: FeatureSource,
        config: TrainConfig,
    ):
        if not len(source):
            raise ValueError("source is empty: there is no answer to train on.")
        if config.patience and not len(held_out):
            raise ValueError(f"patience={config.patience}: no answer is held out to measure on; raise --held-out.")
        taps = drafter.config.tap_layers or [0]
        if config.kl and taps[-1] != drafter.config.target_num_layers:
            raise ValueError(f"kl={config.kl} needs the final layer among the taps, which are {taps}.")
        self.config, self.folder = config, config.out
        self.source, self.held_out = source, held_out
        count = min(len(source), len(held_out))
        self.seen = Part(source, [i * len(source) // count for i in range(count)])  # the gap to these: learnt by heart
        self.tracker = run_log.tracker(config.report_to)
        self.accelerator = build_accelerator(config, self.tracker)
        device = self.accelerator.device
        self.objective = self.build_objective(drafter.to(device), embeddings.to(device), unembedding.to(device))
        self.drafter = drafter
        self.named = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
        self.optimisers = build_optimisers(list(self.named.values()), config, device)
        self.module = self.accelerator.prepare_model(self.objective)
        self.weights = torch.tensor([config.cross_entropy, config.velocity, config.kl], device=device)
        self.average = {n: p.detach().clone() for n, p in self.named.items()}
        self.best_average: dict[str, torch.Tensor] = {}  # with patience only
        self.epoch = self.batch_in_epoch = self.step = self.blocks = self.without_better = 0
        self.seconds = self.score = self.best = 0.0

    # what is particular to FlashMap

    def build_objective(self, drafter: Any, embeddings: torch.Tensor, unembedding: torch.Tensor) -> BlockObjective:
        return BlockObjective(drafter, embeddings, unembedding, self.config.position_decay, self.config.kl > 0)

    @property
    def final_size(self) -> int:
        """D where the losses read the target's final hidden states, else 0."""
        return self.drafter.config.target_hidden_size if self.config.kl else 0

    # one step

    def losses(self, batch: BlockBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Forward this process's share of a batch.

        Returns:
            what to differentiate; the losses of the whole batch `[3]` in the order of `losses.NAMES`; correct `[B, K]`.
        """
        config, accelerator = self.config, self.accelerator
        model = self.drafter.config
        draws = draw(
            batch,
            torch.Generator().manual_seed(config.seed * 1_000_003 + self.step),
            hide_share=config.hide_share,
            # greedy labels are no draws of the law that a hidden noise asks for; with KL its law is there all the same
            hide_greedy=config.hide_share / 2 if config.kl else 0.0,
            start_share=config.start_share,
            noise_size=model.target_hidden_size if model.coupling == "independent" else 0,
            process=accelerator.process_index,
            processes=accelerator.num_processes,
        )
        device = accelerator.device
        found = self.module(batch.to(device), draws.to(device))  # under autocast, by accelerate
        weights = whole(found.weights).clamp_min(1e-9)
        # gradients are averaged over the processes: their sums are divided by the weight of the whole batch
        loss = (self.weights * found.sums / weights).sum() * accelerator.num_processes
        return loss, whole(found.sums.detach()) / weights, found.correct

    def train_step(self, batch: BlockBatch, scale: float) -> tuple[dict[str, float], torch.Tensor]:
        """One optimiser step at `scale` of the peak rates. Returns the losses by name, and correct `[B, K]`.

        Raises:
            FloatingPointError: the loss is not finite; the last checkpoint is untouched.
        """
        config = self.config
        loss, each, correct = self.losses(batch)
        if not bool((self.weights * each).sum().isfinite()):
            named = dict(zip(NAMES, each.tolist(), strict=True))
            raise FloatingPointError(
                f"The loss is not finite at step {self.step} ({named}): lower --muon-lr or --adam-lr and run again; "
                f"a checkpoint in {self.folder} is from before."
            )
        self.accelerator.backward(loss)
        adam = self.optimisers["adam"]
        torch.nn.utils.clip_grad_norm_([p for g in adam.param_groups for p in g["params"]], config.clip)
        for name, rate in (("muon", config.muon_lr), ("adam", config.adam_lr)):
            if name in self.optimisers:
                for group in self.optimisers[name].param_groups:
                    group["lr"] = rate * scale
                self.optimisers[name].step()
                self.optimisers[name].zero_grad(set_to_none=True)
        decay = min(config.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for name, parameter in self.named.items():
                self.average[name].lerp_(parameter, 1 - decay)
        self.step += 1
        self.batch_in_epoch += 1
        self.blocks += int(whole(batch.labels_mask.any(-1).sum().to(loss.device)))
        return dict(zip(NAMES, each.tolist(), strict=True)), correct

    # the run

    def run(self) -> None:
        """Train until the budget is spent or patience ends, resuming from the folder's checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.load_checkpoint() and self.accelerator.is_main_process:
            run_log.set_aside(self.folder)
        if self.tracker:
            self.accelerator.init_trackers("flashmap", config={k: str(v) for k, v in self.config.record().items()})
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with ProgressLog(*columns, disable=not self.accelerator.is_main_process) as progress:
            task = progress.add_task("training", total=1.0)
            progress.update(task, completed=self.progress())
            last, saved = time.monotonic(), self.seconds
            while self.progress() < 1.0 and not self.patience_ended():
                for batch in self.batches():
                    scale = learning_rate_scale(self.progress(), self.config.warmup, self.config.decay)
                    losses, correct = self.train_step(batch, scale)
                    now = time.monotonic()
                    self.seconds, last = agreed(self.accelerator, self.seconds + now - last), now
                    over = self.progress() >= 1.0
                    named = ", ".join(f"{name} {value:.3f}" for name, value in losses.items() if value)
                    progress.update(task, completed=self.progress(), description=f"step {self.step}: {named}")
                    if over or self.step % self.config.log_steps == 0:
                        self.log(batch, losses, correct, scale)
                    if over or self.seconds - saved > self.config.checkpoint_minutes * 60:
                        self.measure()
                        self.save_checkpoint()
                        last, saved = time.monotonic(), self.seconds
                        if over or self.patience_ended():
                            break
                else:
                    self.epoch, self.batch_in_epoch = self.epoch + 1, 0
        if self.tracker:
            self.accelerator.end_training()

    def batches(self) -> Any:
        """The rest of this epoch."""
        config, model = self.config, self.drafter.config
        return epoch_batches(
            self.source, epoch=self.epoch, seed=config.seed, runs=config.runs, run=config.run_length,
            window=model.window, block_size=model.block_size, skip=self.batch_in_epoch,
            hidden_size=self.final_size,
            process=self.accelerator.process_index, processes=self.accelerator.num_processes,
        )  # fmt: skip

    def progress(self) -> float:
        return self.config.progress(self.seconds, self.step)

    def patience_ended(self) -> bool:
        return 0 < self.config.patience <= self.without_better

    # what is reported

    def log(self, batch: BlockBatch, losses: dict[str, float], correct: torch.Tensor, scale: float) -> None:
        full = batch.labels_mask.flatten(0, 1).all(-1).to(correct.device)
        joint = correct.int().cumprod(-1)[full].float().mean(0) if bool(full.any()) else torch.empty(0)
        row = {"step": self.step, "epoch": self.epoch, "blocks": self.blocks, "minutes": round(self.seconds / 60, 2),
               "blocks_per_second": round(self.blocks / self.seconds, 1) if self.seconds else 0.0,
               "lr_scale": round(scale, 4)}  # fmt: skip
        row |= {name: round(value, 4) for name, value in losses.items()}
        if self.accelerator.is_main_process:
            run_log.write_row(self.folder, row | {"joint": [round(x, 3) for x in joint.tolist()]})
        self.accelerator.log({n: v for n, v in row.items() if n not in ("step", "epoch")}, step=self.step)

    def measure(self) -> dict[str, Any]:
        """Held-out tokens per step of the averaged weights, by a walk over known answers; kept when the best so far."""
        if not all(bool(p.isfinite().all()) for p in self.named.values()):
            raise FloatingPointError(
                f"The weights are not finite at step {self.step}: lower --muon-lr or --adam-lr and run again; "
                f"a checkpoint in {self.folder} is from before."
            )
        current = {n: p.detach().clone() for n, p in self.named.items()}
        self.assign(self.average)
        self.drafter.eval()
        row, score = compared(self.objective, self.held_out, self.seen, self.config.seed)
        self.drafter.train()
        self.assign(current)
        self.score = score = agreed(self.accelerator, score)
        self.without_better = 0 if score > self.best else self.without_better + 1
        if score > self.best and self.config.patience:
            self.best_average = {n: t.clone() for n, t in self.average.items()}
        self.best = max(self.best, score)
        row |= {"step": self.step, "blocks": self.blocks, "minutes": round(self.seconds / 60, 2)}
        if self.accelerator.is_main_process:
            run_log.write_row(self.folder, row)
        self.accelerator.log({n: v for n, v in row.items() if "tokens_per_step" in n and v}, step=self.step)
        return row

    @torch.no_grad()
    def assign(self, values: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.named.items():
            parameter.copy_(values[name])

    # state between runs

    def save_checkpoint(self) -> None:
        """Write everything that `run` needs to go on as if it had not stopped."""
        if self.accelerator.is_main_process:
            tensors = {f"model.{n}": t for n, t in self.drafter.state_dict().items()}
            tensors |= {f"average.{n}": t for n, t in self.average.items()}
            tensors |= {f"best.{n}": t for n, t in self.best_average.items()}
            for name, optimiser in self.optimisers.items():
                tensors |= checkpoint.optimiser_tensors(name, optimiser)
            counters = {n: getattr(self, n) for n in COUNTERS} | {"drafter": self.shape()}
            checkpoint.save(self.folder, self.step, tensors, counters)
        self.accelerator.wait_for_everyone()

    def load_checkpoint(self) -> bool:
        """Continue from the folder's last complete checkpoint; False when there is none."""
        found = checkpoint.load(self.folder)
        if found is None:
            return False
        tensors, counters = found
        checkpoint.check_shape(self.folder, counters.get("drafter", {}), self.shape())
        device = self.accelerator.device
        parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "average": {}, "best": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if part in parts:
                parts[part][rest] = tensor.to(device)
        if parts["model"].keys() != self.drafter.state_dict().keys():
            raise ValueError(
                f"{self.folder} holds a run of another version, which trained other tensors: use another folder, or "
                "go on from its drafter with --drafter."
            )
        if self.config.lora is not None:
            self.check_base(parts["model"])
        self.drafter.load_state_dict(parts["model"])
        self.objective.read_draft_vocabulary()  # a checkpoint may hold other ids than the drafter was built with
        self.average, self.best_average = parts["average"], parts["best"]
        for name, optimiser in self.optimisers.items():
            checkpoint.restore_optimiser(name, optimiser, tensors)
        for name in COUNTERS:
            setattr(self, name, counters.get(name, getattr(self, name)))
        return True

    def shape(self) -> dict[str, Any]:
        """What a resumed run must not change."""
        return checkpoint.shape(self.drafter.config) | {"lora": self.config.lora, "optimiser": self.config.optimiser}

    def check_base(self, trained: dict[str, torch.Tensor]) -> None:
        """Raise ValueError where an adapter was begun on another drafter: the weights beside it are not trained."""
        for name, parameter in self.drafter.named_parameters():
            if not parameter.requires_grad and not torch.equal(parameter, trained[name]):
                raise ValueError(
                    f"{self.folder} adapts another drafter than {self.config.drafter} ({name} differs): name that one, "
                    "or use another folder."
                )

    @property
    def saved_score(self) -> float | None:
        """Held-out tokens per step of what `load_average` gives; None where nothing was held out."""
        return (self.best if self.best_average else self.score) or None

    def load_average(self) -> FlashMapDrafter:
        """The drafter with the averaged weights (with patience: the best ones), to be saved or used. Ends training."""
        self.assign(self.best_average or self.average)
        untie(self.drafter.head)
        return self.drafter.eval()
