"""Tokens per target step on held-out answers, walked over what the target is known to say: no target forward needed."""

from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

import torch

from flashmap_hf.head import DraftHead
from flashmap_hf.training.blocks import BlockBatch, make_batch
from flashmap_hf.training.objective import BlockObjective, shared_context
from flashmap_hf.training.sources import FeatureSource


@dataclass
class Walk:
    """Steps over known answers. joint: how many blocks were right up to each position."""

    steps: int = 0
    tokens: int = 0
    joint: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def rate(self) -> float | None:
        """Tokens per step for the log; None where there was no such answer."""
        return round(self.tokens_per_step, 4) if self.steps else None

    def shares(self) -> list[float]:
        """Of the blocks, those that were right up to position 1, 2, ... K."""
        return [count / self.steps for count in self.joint] if self.steps else []


@singledispatch
def kept(objective: BlockObjective, batch: BlockBatch, generator: torch.Generator) -> torch.Tensor:
    """`[A, K]`: which drafts after the anchors of one run are kept, each given that those before it are.

    Under shared noise: those equal to what is known, with u = 0 in greedy answers and from each token's interval in
    sampled ones. Drafters that are verified by another rule register theirs.
    """
    config, device = objective.drafter.config, objective.rows.device
    spread = torch.rand(batch.f_left.shape, generator=generator).to(device)
    u = (batch.f_left + spread * (batch.f_right - batch.f_left))[0]
    noise = None
    if config.coupling != "quantile":
        noise = torch.randn(*u.shape, config.target_hidden_size, generator=generator).to(device)
    return draft_run(objective, batch, u, noise) == batch.labels[0]


@torch.inference_mode()
def walk_held_out(objective: BlockObjective, held_out: FeatureSource, seed: int) -> dict[bool, Walk]:
    """Greedy answers (False) and sampled ones (True)."""
    drafter = objective.drafter
    size, window, device = drafter.config.block_size, drafter.config.window, objective.rows.device
    walks = {sampled: Walk(joint=[0] * size) for sampled in (False, True)}
    generator = torch.Generator().manual_seed(seed)
    for index in range(len(held_out)):
        sequence = held_out[index]
        count = len(sequence.tokens) - sequence.first - 1
        batch = make_batch([sequence], [sequence.first], count, window, size).to(device)
        right = (kept(objective, batch, generator) & batch.labels_mask[0]).int().cumprod(-1).tolist()
        walk, place = walks[sequence.sampled], 0
        while place < count:
            accepted = sum(right[place])
            walk.joint = [a + b for a, b in zip(walk.joint, right[place], strict=True)]
            walk.steps, walk.tokens, place = walk.steps + 1, walk.tokens + accepted + 1, place + accepted + 1
    return walks


def compared(
    objective: BlockObjective, held_out: FeatureSource, seen: FeatureSource, seed: int
) -> tuple[dict[str, Any], float]:
    """The walks over held-out answers and over some that are trained on, as a row of the log; and the score.

    The score is that of held-out greedy answers, or of sampled ones where there are no others.
    """
    walks, trained = (walk_held_out(objective, source, seed) for source in (held_out, seen))
    row: dict[str, Any] = {}
    for sampled, suffix in ((False, ""), (True, "_sampled")):
        row["held_out_tokens_per_step" + suffix] = walks[sampled].rate()
        row["joint" + suffix] = [round(x, 4) for x in walks[sampled].shares()]
        row["trained_tokens_per_step" + suffix] = trained[sampled].rate()
    return row, walks[False].tokens_per_step or walks[True].tokens_per_step


def draft_run(
    objective: BlockObjective, batch: BlockBatch, u: torch.Tensor, noise: torch.Tensor | None = None
) -> torch.Tensor:  # [A, K], [A, K, D] -> [A, K] ids
    """What is drafted after each anchor of a batch of one run, at s = 0 with noise `u` (NaN: hidden) in one step."""
    return chain(objective, endpoints(objective, batch, u, noise), batch.anchors[0])


def endpoints(
    objective: BlockObjective, batch: BlockBatch, u: torch.Tensor, noise: torch.Tensor | None = None
) -> torch.Tensor:  # [A, K], [A, K, D] -> [A, K, D]
    """x_1 behind each anchor; as in `draft_run`."""
    drafter, (count, size) = objective.drafter, u.shape
    window = drafter.config.window
    context, mask = shared_context(drafter, batch, window)
    seen = u if drafter.config.coupling == "quantile" else None
    return drafter.endpoint(
        drafter.prior(u, noise, count, size), torch.zeros(count, device=u.device), seen,
        objective.embeddings[batch.anchors[0]], window + torch.arange(count, device=u.device), context, mask,
    )  # fmt: skip


def chain(objective: BlockObjective, endpoint: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """The most likely token at each position, given the one before it where there is a transition. -> `[B, K]` ids."""
    head: DraftHead = objective.drafter.head
    logits = head(endpoint, objective.rows)
    if objective.drafter.config.transition_rank is None:
        return head.target_ids(logits.argmax(-1))
    tokens: list[torch.Tensor] = []
    previous = anchors
    for k in range(logits.shape[1]):
        row = head.biased(logits[:, k], endpoint[:, k], head.draft_positions(previous))
        previous = head.target_ids(row.argmax(-1))
        tokens.append(previous)
    return torch.stack(tokens, dim=1)
