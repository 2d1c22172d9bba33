"""Held-out answers under token trees of a given size, greedy and rejection sampling: what `tree_size` will give."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from flashmap_hf.sampled_tree import WIDTH, Shares, floor_for, grow
from flashmap_hf.training.blocks import BlockBatch, make_batch
from flashmap_hf.training.held_out import Walk, endpoints
from flashmap_hf.training.rejection import HiddenNoiseObjective
from flashmap_hf.training.sources import FeatureSource
from flashmap_hf.tree import TokenTree, best_first, walk_choices
from flashmap_hf.verification import draw


@torch.inference_mode()
def walk_trees(objective: HiddenNoiseObjective, held_out: FeatureSource, size: int, seed: int) -> dict[bool, Walk]:
    """Walks over greedy answers (False) and sampled ones (True) with trees of at most `size` tokens.

    Trees are made as `generate` makes them, in draft positions: `best_first` with u = 0, and `sampled_tree.grow` with
    the noise hidden. Sampled answers must be of temperature 1; the target's final states must be among the taps.
    """
    drafter = objective.drafter
    config, device = drafter.config, objective.rows.device
    walks = {sampled: Walk(joint=[0] * config.block_size) for sampled in (False, True)}
    generator = torch.Generator().manual_seed(seed)
    for index in range(len(held_out)):
        sequence = held_out[index]
        count = len(sequence.tokens) - sequence.first - 1
        batch = make_batch(
            [sequence], [sequence.first], count, config.window, config.block_size, config.target_hidden_size
        ).to(device)
        answer = _Answer(objective, batch, sequence.sampled, generator)
        walk, place = walks[sequence.sampled], 0
        while place < count:
            accepted = answer.accepted(place, size)
            walk.joint = [total + (k < accepted) for k, total in enumerate(walk.joint)]
            walk.steps, walk.tokens, place = walk.steps + 1, walk.tokens + accepted + 1, place + accepted + 1
    return walks


def tree_facts(objective: HiddenNoiseObjective, held_out: FeatureSource, sizes: list[int], seed: int) -> dict[str, Any]:
    """`{"trees": {size: {"greedy": ..., "sampled": ...}}}` for `training.json`, in tokens per step; else nothing.

    Nothing is walked where the final states are not among the taps, or the noise is independent.
    """
    config = objective.drafter.config
    if config.coupling != "quantile" or list(config.tap_layers or [])[-1:] != [config.target_num_layers]:
        return {}
    trees = {}
    for size in sizes:
        walks = walk_trees(objective, held_out, size, seed)
        trees[str(size)] = {"greedy": walks[False].rate(), "sampled": walks[True].rate()}
    return {"trees": trees}


class _Answer:
    """One answer, its blocks drafted after every anchor at once."""

    def __init__(self, objective: HiddenNoiseObjective, batch: BlockBatch, sampled: bool, generator: torch.Generator):
        self.objective, self.head, self.sampled, self.generator = objective, objective.drafter.head, sampled, generator
        anchors = batch.anchors[0]
        u = torch.full(batch.labels.shape[1:], torch.nan if sampled else 0.0, device=anchors.device)
        self.z_1 = endpoints(objective, batch, u)
        self.logits = self.head(self.z_1, objective.rows).float()
        self.before = self.head.draft_positions(anchors)
        lengths = batch.labels_mask[0].sum(-1).tolist()
        self.known = [
            row[:length] for row, length in zip(objective.to_draft[batch.labels[0]].tolist(), lengths, strict=True)
        ]
        if sampled:
            self.final = batch.final[0]  # [A + K - 1, D]: row a + k is what position k of block a was drawn from
            self.total = linear(self.final, objective.unembedding).logsumexp(-1)
            self.mass = (batch.f_right - batch.f_left)[0].tolist()  # of the known tokens
        self.place, self.paths = 0, list[list[int]]()

    def accepted(self, place: int, size: int) -> int:
        """How many known tokens after anchor `place` a tree of `size` nodes holds and verification keeps."""
        self.place = place
        known = self.known[place]
        tree = self._sampled_tree(size) if self.sampled else best_first(self._candidates, len(known), size)
        ends = [*known, -1]
        return len(walk_choices(tree, [ends[depth] for depth in (0, *tree.depths)]))

    def _rows(self, k: int, previous: Tensor) -> Tensor:  # [M] -> [M, N]
        logits, z_1 = self.logits[self.place, k].expand(len(previous), -1), self.z_1[self.place, k]
        rows = self.head.biased(logits, z_1.expand(len(previous), -1), previous)
        return rows / self.objective.draft_temperature if self.sampled else rows

    def _previous(self, tokens: list[int] | None) -> Tensor:
        return self.before[self.place, None] if tokens is None else self.before.new_tensor(tokens)

    def _candidates(self, k: int, parents: list[int] | None) -> tuple[Tensor, Tensor]:
        best = self._rows(k, self._previous(parents)).log_softmax(-1).topk(min(WIDTH, len(self.objective.rows)))
        return best.values, best.indices

    def _laws(self, k: int, paths: list[list[int]]) -> Tensor:
        self.paths = paths
        self.laws = self._rows(k, self._previous([path[-1] for path in paths] if k else None)).softmax(-1)
        return self.laws

    def _sampled_tree(self, size: int) -> TokenTree:
        likeliest, previous = [], self._previous(None)
        for k in range(self.logits.shape[1]):
            likeliest.append(self._rows(k, previous))
            previous = likeliest[-1].argmax(-1)
        floor = floor_for(Shares.of(torch.cat(likeliest).softmax(-1)), size)
        return grow(self._laws, len(self.known[self.place]), size, floor, self._draw)[0]

    def _draw(self, laws: Tensor, nodes: list[int]) -> Tensor:  # [R, N] -> [R]
        """Draws; behind the known text, from the law that a draw has given that the known token is what is emitted.

        There, with p and q what both laws leave behind the tokens taken for certain, the token is drawn and kept with
        min(1, q / p), as in `rejection`; else it is refused, and the walk is over: which other one it was is all the
        same. If the known token is among the certain ones, the walk goes on there.
        """
        u = torch.rand(len(nodes), dtype=torch.float64, generator=self.generator).to(laws.device)
        tokens, known = draw(laws, u), self.known[self.place]
        for row, node in enumerate(nodes):
            k = len(self.paths[node])
            if self.paths[node] != known[:k]:
                continue
            certain = ((laws[row] == 0) & (self.laws[node] > 0)).nonzero().flatten()
            kept = -1
            if known[k] not in certain.tolist():
                mass = self.mass[self.place][k]
                left = mass / max(1 - self._target_mass(self.place + k, certain), mass)  # rounding
                q = float(laws[row, known[k]]) if known[k] >= 0 else 0.0
                kept = known[k] if float(torch.rand((), generator=self.generator)) * left < q else -1
            others = laws[row].index_fill(0, tokens.new_tensor(max(known[k], 0)), 0.0)
            tokens[row] = kept if kept >= 0 else int(others.argmax())
        return tokens

    def _target_mass(self, place: int, tokens: Tensor) -> float:
        """Of draft positions `tokens`, in the law of which the text has drawn."""
        return float((linear(self.final[place], self.objective.rows[tokens]) - self.total[place]).exp().sum())
