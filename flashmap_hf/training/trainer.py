"""The trainer: cross-entropy at the endpoint plus the velocity loss on on-policy blocks; Muon for the matrices."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from flashmap_hf.flow import interpolate
from flashmap_hf.modeling_flashmap import FlashMapDrafter, KeyValues
from flashmap_hf.training import checkpoint
from flashmap_hf.training.blocks import BlockBatch, draw_u, epoch_batches, make_batch
from flashmap_hf.training.config import TrainConfig, learning_rate_scale
from flashmap_hf.training.features import SequenceFeatures
from flashmap_hf.training.losses import BlockLoss, block_loss
from flashmap_hf.training.muon import Muon

COUNTERS = ("epoch", "batch_in_epoch", "step", "blocks", "seconds")


def shared_context(drafter: FlashMapDrafter, batch: BlockBatch, window: int) -> tuple[KeyValues, torch.Tensor]:
    """Context keys and values of all blocks, computed once per position of a run.

    Returns:
        per layer `[S * A, Hkv, W, head_dim]` twice, and the mask `[S * A, W]`.
    """
    span = batch.taps.shape[1]
    whole = drafter.context_keys_values(batch.taps, torch.arange(span)[None])

    def windows(x: torch.Tensor) -> torch.Tensor:  # [S, Hkv, span, h] -> [S * A, Hkv, W, h]
        return x.unfold(2, window, 1).permute(0, 2, 1, 4, 3).flatten(0, 1)

    return [(windows(k), windows(v)) for k, v in whole], batch.taps_mask.unfold(1, window, 1).flatten(0, 1)


class Trainer:
    """Trains `drafter` in place on `sequences`; `embeddings` and `unembedding` are the target's `[V, D]` matrices."""

    def __init__(
        self,
        drafter: FlashMapDrafter,
        embeddings: torch.Tensor,
        unembedding: torch.Tensor,
        sequences: Sequence[SequenceFeatures],
        held_out: Sequence[SequenceFeatures],
        config: TrainConfig,
        folder: Path,
    ):
        if not sequences:
            raise ValueError("sequences is empty: there is nothing to train on.")
        self.drafter, self.config, self.folder = drafter, config, folder
        self.sequences, self.held_out = sequences, held_out
        self.embeddings = embeddings
        self.unembedding = unembedding
        self.representations = unembedding * unembedding.square().mean(-1, keepdim=True).rsqrt()  # x_1 of each token
        self.read_draft_vocabulary()
        named = [(n, p) for n, p in drafter.named_parameters() if p.requires_grad]
        matrices = [p for _, p in named if p.ndim == 2 and min(p.shape) >= 16]  # the rest: AdamW
        chosen = {id(p) for p in matrices}
        self.muon = Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay, ns_steps=config.ns_steps)
        self.adam = torch.optim.AdamW(
            [p for _, p in named if id(p) not in chosen], lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.average = {n: p.detach().clone() for n, p in named}
        self.epoch = self.batch_in_epoch = self.step = self.blocks = 0
        self.seconds = 0.0

    def read_draft_vocabulary(self) -> None:
        """Rows of the readout and the place of each token in it, from the ids that the drafter holds now."""
        ids = self.drafter.head.ids
        self.rows = self.unembedding[ids].contiguous()
        self.to_draft = torch.full((self.unembedding.shape[0],), -100)
        self.to_draft[ids] = torch.arange(len(ids))

    # one step

    def loss(self, batch: BlockBatch, generator: torch.Generator) -> BlockLoss:
        """Forward one batch and compare with its labels."""
        config, drafter = self.config, self.drafter
        block_size = drafter.config.block_size
        context, mask = shared_context(drafter, batch, drafter.config.window)
        labels, exists = batch.labels.flatten(0, 1), batch.labels_mask.flatten(0, 1)
        u = draw_u(batch, config.hide_share, generator).flatten(0, 1)
        count = labels.shape[0]
        x_1 = self.representations[labels]
        noise = None
        if drafter.config.coupling == "independent":
            noise = torch.randn(count, block_size, drafter.config.target_hidden_size, generator=generator)
        z_0 = drafter.prior(u, noise, count, block_size)
        drawn = torch.rand(count, generator=generator) * 0.9
        s = torch.where(torch.rand(count, generator=generator) < config.start_share, torch.zeros(()), drawn)
        z = interpolate(z_0, x_1, s)
        span_anchors = batch.anchors.shape[1]
        positions = drafter.config.window + torch.arange(span_anchors).repeat(batch.anchors.shape[0])
        seen_u = u if drafter.config.coupling == "quantile" else None
        endpoint = drafter.endpoint(z, s, seen_u, self.embeddings[batch.anchors.flatten()], positions, context, mask)
        logits = drafter.head(endpoint, self.rows)
        draft_labels = self.to_draft[labels].masked_fill(~exists, -100)
        return block_loss(
            logits, endpoint, z, s, z_0, x_1, draft_labels, exists, config.position_decay, config.velocity_weight
        )

    def train_step(self, batch: BlockBatch, scale: float, generator: torch.Generator) -> BlockLoss:
        """One optimiser step at `scale` of the peak rates.

        Raises:
            FloatingPointError: the loss is not finite; the last checkpoint is untouched.
        """
        result = self.loss(batch, generator)
        if not math.isfinite(result.total.item()):
            raise FloatingPointError(
                f"The loss is {result.total.item()} at step {self.step}: lower muon_lr and resume."
            )
        result.total.backward()
        torch.nn.utils.clip_grad_norm_([p for g in self.adam.param_groups for p in g["params"]], self.config.clip)
        for optimiser, rate in ((self.muon, self.config.muon_lr), (self.adam, self.config.adam_lr)):
            optimiser.param_groups[0]["lr"] = rate * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for name, parameter in self.drafter.named_parameters():
                if name in self.average:
                    self.average[name].lerp_(parameter, 1 - decay)
        return result

    # the run

    def run(self) -> None:
        """Train until the budget is spent, resuming from the folder's checkpoint; `evaluate` measures the result."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.load_checkpoint()
        config, drafter = self.config, self.drafter
        budget = config.max_minutes * 60
        last, saved = time.monotonic(), self.seconds
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("training", total=budget, completed=int(self.seconds))
            while self.seconds < budget:
                batches = epoch_batches(
                    self.sequences, epoch=self.epoch, seed=config.seed, runs=config.runs, run=config.run_length,
                    window=drafter.config.window, block_size=drafter.config.block_size, skip=self.batch_in_epoch,
                )  # fmt: skip
                for batch in batches:
                    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
                    scale = learning_rate_scale(self.seconds / budget, config.warmup, config.decay)
                    result = self.train_step(batch, scale, generator)
                    self.step += 1
                    self.batch_in_epoch += 1
                    self.blocks += batch.anchors.numel()
                    now = time.monotonic()
                    self.seconds, last = self.seconds + now - last, now
                    if self.step % 20 == 0:
                        self.log(batch, result, scale)
                        progress.update(
                            task, completed=self.seconds, description=f"step {self.step} loss {result.total.item():.3f}"
                        )
                    if self.seconds - saved > config.checkpoint_minutes * 60 or self.seconds >= budget:
                        self.save_checkpoint()
                        saved = self.seconds
                        if self.seconds >= budget:
                            return
                        self.evaluate()
                        last = time.monotonic()
                self.epoch, self.batch_in_epoch = self.epoch + 1, 0

    def log(self, batch: BlockBatch, result: BlockLoss, scale: float) -> None:
        joint = result.correct.int().cumprod(-1)[batch.labels_mask.flatten(0, 1).all(-1)].float().mean(0)
        self.write_log(
            {
                "step": self.step, "epoch": self.epoch, "blocks": self.blocks, "minutes": round(self.seconds / 60, 2),
                "lr_scale": round(scale, 4), "cross_entropy": round(result.cross_entropy.item(), 4),
                "velocity": round(result.velocity.item(), 4), "joint": [round(x, 3) for x in joint.tolist()],
            }
        )  # fmt: skip

    def history(self) -> list[dict[str, Any]]:
        """The log's held-out rows, oldest first; one per step, since a resumed run may measure a step again."""
        rows = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        return list({row["step"]: row for row in rows if "held_out_tokens_per_step" in row}.values())

    def write_log(self, row: dict[str, object]) -> None:
        with (self.folder / "log.jsonl").open("a") as lines:
            lines.write(json.dumps(row) + "\n")

    # held-out tokens per step, walked over known answers

    @torch.inference_mode()
    def evaluate(self) -> float:
        """Simulated greedy tokens per target step of the averaged weights on held-out greedy answers (0.0 if none)."""
        greedy = [s for s in self.held_out if not bool((s.f_right > 0).any())]
        if not greedy:
            return 0.0
        current = {n: p.detach().clone() for n, p in self.drafter.named_parameters() if n in self.average}
        self.drafter.load_state_dict(self.average, strict=False)
        size, window = self.drafter.config.block_size, self.drafter.config.window
        steps = tokens = 0
        reached = torch.zeros(size)
        for sequence in greedy:
            count = len(sequence.tokens) - sequence.first - 1
            batch = make_batch([sequence], [sequence.first], count, window, size)
            context, mask = shared_context(self.drafter, batch, window)
            u = torch.zeros(count, size)
            z_0 = self.drafter.prior(u, torch.zeros(count, size, self.drafter.config.target_hidden_size), count, size)
            endpoint = self.drafter.endpoint(
                z_0,
                torch.zeros(count),
                u,
                self.embeddings[batch.anchors[0]],
                window + torch.arange(count),
                context,
                mask,
            )
            drafted = self.drafter.head.target_ids(self.drafter.head(endpoint, self.rows).argmax(-1))
            right = ((drafted == batch.labels[0]) & batch.labels_mask[0]).int().cumprod(-1)
            place = 0
            while place < count:
                accepted = int(right[place].sum())
                reached += right[place]
                steps, tokens, place = steps + 1, tokens + accepted + 1, place + accepted + 1
        self.drafter.load_state_dict(current, strict=False)
        result = tokens / steps
        row = {"held_out_tokens_per_step": round(result, 4), "joint": [round(x, 4) for x in (reached / steps).tolist()]}
        self.write_log(row | {"step": self.step, "blocks": self.blocks, "minutes": round(self.seconds / 60, 2)})
        return result

    # state between runs

    def save_checkpoint(self) -> None:
        """Write everything that `run` needs to go on as if it had not stopped."""
        tensors = {f"model.{n}": t for n, t in self.drafter.state_dict().items()}
        tensors |= {f"average.{n}": t for n, t in self.average.items()}
        tensors |= checkpoint.optimiser_tensors("muon", self.muon) | checkpoint.optimiser_tensors("adam", self.adam)
        counters = {n: getattr(self, n) for n in COUNTERS} | {"drafter": checkpoint.shape(self.drafter.config)}
        checkpoint.save(self.folder, self.step, tensors, counters)

    def load_checkpoint(self) -> bool:
        """Continue from the folder's last complete checkpoint; False when there is none."""
        found = checkpoint.load(self.folder)
        if found is None:
            return False
        tensors, counters = found
        checkpoint.check_shape(self.folder, counters.get("drafter", {}), checkpoint.shape(self.drafter.config))
        self.drafter.load_state_dict({n[6:]: t for n, t in tensors.items() if n.startswith("model.")})
        self.read_draft_vocabulary()  # a checkpoint may hold other ids than the drafter was built with
        self.average = {n[8:]: t for n, t in tensors.items() if n.startswith("average.")}
        checkpoint.restore_optimiser("muon", self.muon, tensors)
        checkpoint.restore_optimiser("adam", self.adam, tensors)
        for name in COUNTERS:
            setattr(self, name, counters[name])
        return True

    def averaged_drafter(self) -> FlashMapDrafter:
        """A copy of the drafter with the averaged weights."""
        copy = FlashMapDrafter(self.drafter.config)
        copy.load_state_dict(self.drafter.state_dict() | self.average)
        return copy.eval()
