"""A transition while it is trained: projections of the target's own matrices in place of tables of its own.

A row for each token has only its own occurrences to learn from, which are few for most. Tied, A is E P and B is W_U Q:
rank * D numbers in P as in Q, which all tokens share, and no stage that fits tables before training. A drafter is saved
with the tables themselves, as generation reads them. docs/experiments.md, section 14, compares the two.
"""

from typing import Any

import torch
from torch import nn

from flashmap_hf.head import DraftHead, Transition


class TiedTransition(nn.Module):
    """`W_U Q silu(P e_(k-1) + C z_1_k)`, e being input embeddings of unit RMS. Starts at no bias at all: Q is zero."""

    embeddings: torch.Tensor  # [N, D], of the draft vocabulary
    rows: torch.Tensor  # [N, D], of the target's unembedding

    def __init__(self, width: int, rank: int, generator: torch.Generator | None = None):
        super().__init__()
        self.previous = nn.utils.skip_init(nn.Linear, width, rank, bias=False)
        self.endpoint = nn.utils.skip_init(nn.Linear, width, rank, bias=False)
        self.readout = nn.utils.skip_init(nn.Linear, rank, width, bias=False)
        self.outside = nn.Parameter(torch.zeros(rank))  # P e of every token outside of the draft vocabulary
        for weight in (self.previous.weight, self.endpoint.weight):
            nn.init.normal_(weight, std=width**-0.5, generator=generator)
        nn.init.zeros_(self.readout.weight)

    def bind(self, embeddings: torch.Tensor, rows: torch.Tensor) -> None:
        """Take the target's matrices, `[N, D]` each; plain attributes, that are neither saved nor broadcast."""
        self.embeddings = nn.functional.rms_norm(embeddings, embeddings.shape[-1:])
        self.rows = rows

    def forward(self, z_1: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:  # [..., D], [...] -> [..., N]
        return nn.functional.linear(self.shift(z_1, previous), self.rows)

    def shift(self, z_1: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:  # [..., D], [...] -> [..., D]
        """What, added to the scaled endpoint, biases its logits: both are read off by the target's rows."""
        size = len(self.embeddings)
        known = self.previous(self.embeddings[previous.clamp(max=size - 1)])
        before = torch.where((previous < size).unsqueeze(-1), known, self.outside)
        shift: torch.Tensor = self.readout(nn.functional.silu(before + self.endpoint(z_1)))
        return shift


def tie(head: DraftHead, seed: int) -> None:
    """Give a new drafter with a transition a tied one, drawn from a generator of its own."""
    if head.transition is not None:
        rank, width = head.transition.endpoint.weight.shape
        tied = TiedTransition(width, rank, torch.Generator().manual_seed(seed))
        head.transition = tied  # type: ignore[assignment]  # called like the tables, in training only


@torch.no_grad()
def tie_tables(head: DraftHead, embeddings: torch.Tensor, unembedding: torch.Tensor) -> None:
    """Tie a trained transition: the nearest one, by least squares. Tables that were tied before give the same again.

    embeddings, unembedding: the target's, `[V, D]` float32.
    """
    table = head.transition
    if table is None:
        return
    rank, width = table.endpoint.weight.shape
    tied = TiedTransition(width, rank)
    place, ids = table.endpoint.weight.device, head.ids.to(embeddings.device)  # a target may be on a GPU already
    tied.bind(embeddings[ids].to(place), unembedding[ids].to(place))
    tied.previous.weight.copy_(torch.linalg.lstsq(tied.embeddings, table.previous.weight[:-1]).solution.T)
    tied.readout.weight.copy_(torch.linalg.lstsq(tied.rows, table.readout.weight).solution)
    tied.endpoint.weight.copy_(table.endpoint.weight)
    tied.outside.copy_(table.previous.weight[-1])
    head.transition = tied  # type: ignore[assignment]  # as above


@torch.no_grad()
def untie(head: DraftHead) -> None:
    """Put the tables in place of a tied transition. Does nothing to another one."""
    tied: Any = head.transition
    if isinstance(tied, TiedTransition):
        rank, width = tied.endpoint.weight.shape
        table = Transition(width, rank, head.size).to(tied.endpoint.weight.device)
        table.previous.weight.copy_(torch.cat([tied.previous(tied.embeddings), tied.outside[None]]))
        table.endpoint.weight.copy_(tied.endpoint.weight)
        table.readout.weight.copy_(tied.rows @ tied.readout.weight)
        head.transition = table
