"""What to verify next for one sequence: the drafter's lattice as a tree, sampled drafts, n-grams; and how much pays."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from flashmap_hf.candidates import NOTHING, Draft, FlashMapCandidateGenerator
from flashmap_hf.generation_config import MAX_NODES
from flashmap_hf.ngrams import NGramIndex
from flashmap_hf.pace import Pace, choose_rows, wants_draft_rows
from flashmap_hf.sampled_tree import WIDTH, LawLevel, Shares, expected, floor_for, grow
from flashmap_hf.tree import Level, TokenTree, best_first, merge

ADAPTIVE_NODES = 16  # what a tree may have where the pace cuts it
NGRAM_BRANCHES, NGRAM_LENGTH = 2, 10
# By length of the match: a first guess that the first token is right, and each further one given those before it. The
# pace corrects it by what is accepted.
NGRAM_TRUST = {3: (0.75, 0.87), 2: (0.55, 0.67)}
NGRAM_SECOND = 0.5  # of the trust that the first branch leaves: the second can only be right where that is not


class Proposals:
    """Drafts for one sequence of one call.

    Args:
        candidates: its candidate generator.
        pace: decides how much to verify; None: as much as the options say.
        trees: whether the target can verify a tree; else the most probable branch is taken.
    """

    def __init__(self, candidates: FlashMapCandidateGenerator, pace: Pace | None, trees: bool):
        self.candidates, self.pace, self.trees = candidates, pace, trees
        self.options = candidates.options
        self.ngrams: NGramIndex | None = NGramIndex() if self.options.draft_ngrams else None
        self.branches: list[tuple[list[int], list[float]]] = []
        self.drafted = False  # whether a drafter pass was made for this step, for this sequence or others
        self.room = 0  # tokens that a pass may draft
        self.size = 0  # rejection: nodes to draw
        self.typical: Shares | None = None  # rejection, a tree: of the laws along the likeliest path

    def see(self, tokens: Sequence[int]) -> None:
        """Newly committed tokens, the prompt first."""
        if self.ngrams is not None:
            self.ngrams.extend(tokens)

    def look_up(self, input_ids: torch.Tensor) -> None:  # [1, T]
        """Before each proposal: what n-grams say, which is free, and how much room there is for a drafter pass."""
        self.branches = self._ngram_branches(self._length(input_ids))
        self.drafted = False
        self.room = self.candidates.room(input_ids)
        self.size, self.typical = 0, None

    def _length(self, input_ids: torch.Tensor) -> int:  # the target adds one token of its own
        return max(0, self.candidates.max_length - input_ids.shape[1] - 1)

    def claims(self) -> list[float]:
        """What the branches claim, in descending order."""
        return sorted((p for _, joint in self.branches for p in joint), reverse=True)

    def _ngram_branches(self, length: int) -> list[tuple[list[int], list[float]]]:
        if self.ngrams is None:
            return []
        branches: list[tuple[list[int], list[float]]] = []
        for tokens, match in self.ngrams.continuations(NGRAM_BRANCHES, min(NGRAM_LENGTH, length)):
            first, lasting = NGRAM_TRUST[match]
            first *= NGRAM_SECOND ** len(branches)
            branches.append((tokens, [first * lasting**i for i in range(len(tokens))]))
        return branches

    def propose(self, input_ids: torch.Tensor, output: Any | None) -> Draft:
        """The draft after `input_ids` `[1, T]`; output: the drafter's for it, None where there was no pass."""
        draft = NOTHING
        size = self.room
        if output is not None and size > 0:
            if self.candidates.rule == "rejection":
                draft = self._sampled(input_ids, output) if self.size else NOTHING
            elif self._whole_tree:
                draft = Draft(self._lattice(input_ids, output, size))
            else:
                draft = self.candidates.read(input_ids, output, size)
        if not self.branches:
            return draft
        if not self.trees:
            return self._likelier(draft)
        return self._merged(draft)

    @property
    def _whole_tree(self) -> bool:
        """Whether the lattice is read as a tree; processors that change an argmax are walked along one chain only."""
        plain = no_lattice(self.candidates) is None
        asked = self.options.tree_size is not None or self.options.num_drafts > 1
        return plain and self.trees and (asked or self.options.adaptive)

    def _lattice(self, input_ids: torch.Tensor, output: Any, size: int) -> TokenTree:
        logits = output.logits[0, :size].float()
        if not self.candidates.finite(logits):
            return NOTHING.tree
        return best_first(self._level(int(input_ids[0, -1]), logits, output.z_1), size, self._nodes(size))

    def _nodes(self, size: int) -> int:
        """How many a tree within `size` tokens of the anchor may have, before the pace has its say."""
        several = min(size * self.options.num_drafts, MAX_NODES)
        return self.options.tree_size or (several if self.options.num_drafts > 1 else ADAPTIVE_NODES)

    def _level(self, anchor: int, logits: torch.Tensor, z_1: torch.Tensor | None) -> Level:  # [k, N], [1, K, D]
        head = self.candidates.drafter.head
        width = min(WIDTH, logits.shape[-1])

        def level(k: int, parents: list[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
            rows = logits[k : k + 1]
            if head.transition is not None:
                assert z_1 is not None
                previous = self.candidates.draft_positions[[anchor] if parents is None else parents]
                rows = head.biased(rows, z_1[0, k : k + 1], previous)
            best = rows.log_softmax(-1).topk(width)
            return best.values, head.target_ids(best.indices)

        return level

    def draft_claims(self, input_ids: torch.Tensor, output: Any | None) -> list[float]:
        """Rejection: what each node claims, the first ones first, before any of its tokens is drawn."""
        if output is None or self.room < 1:
            return []
        logits = output.logits[0, : self.room].float()
        if not self.candidates.finite(logits):
            return []
        if self._whole_tree:  # nothing of it is drawn, so it may decide how much will be
            likeliest = self.candidates.followed(input_ids[0, -1], logits, output.z_1)
            if not self.candidates.finite(likeliest):
                return []
            self.typical = Shares.of(self.candidates.laws(input_ids.expand(len(logits), -1), likeliest))
            return expected(self.typical, self._nodes(self.room))
        modes: list[float] = self.candidates.sharpened(logits).softmax(-1).amax(-1).cumprod(0).tolist()
        return modes

    def _sampled(self, input_ids: torch.Tensor, output: Any) -> Draft:
        """A tree or a chain of `size` drawn tokens, as `plan` says."""
        if self.typical is None:
            return self.candidates.read(input_ids, output, self.size)
        floor = floor_for(self.typical, self.size)
        logits = output.logits[0, : self.room].float()
        level = self._law_level(input_ids, logits, output.z_1)
        return Draft(*grow(level, self.room, self.size, floor, lambda laws, _: self.candidates.drawn(laws)))

    def _law_level(self, input_ids: torch.Tensor, logits: torch.Tensor, z_1: torch.Tensor | None) -> LawLevel:
        head = self.candidates.drafter.head

        def level(k: int, paths: list[list[int]]) -> torch.Tensor | None:
            prefixes = torch.cat([input_ids.expand(len(paths), -1), input_ids.new_tensor(paths).view(len(paths), k)], 1)
            rows = logits[k : k + 1].expand(len(paths), -1)
            if head.transition is not None:
                assert z_1 is not None
                previous = self.candidates.draft_positions[prefixes[:, -1].to(rows.device)]
                rows = head.biased(rows, z_1[0, k : k + 1], previous)
                if not self.candidates.finite(rows):
                    return None
            return self.candidates.laws(prefixes, rows)

        return level

    def _merged(self, draft: Draft) -> Draft:
        """With the n-gram branches. Under rejection a branch's token is offered last, as certain."""
        old = len(draft.tree)
        if self.candidates.rule != "rejection":
            return Draft(merge(draft.tree, self.branches))
        tree = merge(draft.tree, self.branches)
        offers = [*(draft.offers or [[]]), *([] for _ in range(len(tree) - old))]
        for node in range(old, len(tree)):
            offers[tree.parents[node] + 1].append((node, None))
        return Draft(tree, offers)

    def _likelier(self, draft: Draft) -> Draft:
        """One chain: the drafter's, or the first branch where that promises more tokens."""
        tokens, joint = self.branches[0]
        if sum(draft.tree.joint) >= sum(joint):
            return draft
        laws = None
        if self.candidates.rule == "rejection":
            laws = F.one_hot(torch.tensor(tokens), self.candidates.vocab_size).float()
        return Draft.of_chain(torch.tensor(tokens), laws, joint)

    def accept(self, draft: Draft, accepted: int, rows: int, width: int) -> None:
        """Tell the pace what came of a step over `rows` sequences with `width` drafted places each."""
        if self.pace is not None:
            self.pace.observe(sorted(draft.tree.joint, reverse=True), accepted, self.drafted, rows, width)


def no_lattice(candidates: FlashMapCandidateGenerator) -> str | None:
    """Why a tree that was asked for would be one chain; None where it is a tree."""
    if candidates.options.assistant_confidence_threshold:
        return "assistant_confidence_threshold ends one path"
    if candidates.rule == "rejection":
        return None  # each law is processed on its own path
    for processor in candidates.argmax_processors:
        return f"{type(processor).__name__} is applied along one path"
    return None


def wanting(proposals: Sequence[Proposals]) -> list[int]:
    """Which sequences take part in a drafter pass now: those that have room, if it is worth its time."""
    able = [i for i, p in enumerate(proposals) if p.room > 0]
    paces = [pace for i in able if (pace := proposals[i].pace) is not None]
    if paces and not wants_draft_rows(paces, [proposals[i].claims() for i in able], len(proposals)):
        return []
    return able


def plan(proposals: Sequence[Proposals], inputs: Sequence[torch.Tensor], outputs: Sequence[Any | None]) -> None:
    """Rejection: how much of each draft and branch to verify, before a token is drawn: a choice that knew the tokens
    would condition them on having been kept, and bias the law.

    inputs: `[1, T]` each; outputs: the drafter's for each, None without a pass.
    """
    if proposals[0].candidates.rule != "rejection":
        return
    sources: list[list[list[float]]] = []
    for p, input_ids, output in zip(proposals, inputs, outputs, strict=True):
        claims, branches = p.draft_claims(input_ids, output), [joint for _, joint in p.branches]
        if not p.trees and branches:  # one chain: the more promising one
            better = sum(claims) >= sum(branches[0])
            claims, branches = (claims, []) if better else ([], branches[:1])
        p.branches = p.branches[: len(branches)]
        sources.append([claims, *branches])
    paces = [p.pace for p in proposals if p.pace is not None]
    most = proposals[0].options.tree_size or MAX_NODES
    ranked = [sorted(((c, -k) for k, joint in enumerate(of_row) for c in joint), reverse=True) for of_row in sources]
    counts = [len(row) for row in ranked]
    if paces:
        counts = choose_rows(paces, [[c for c, _ in row] for row in ranked], any(p.drafted for p in proposals))
    for p, row, count in zip(proposals, ranked, counts, strict=True):
        # claims never rise within a source: what is kept of one is its beginning
        kept = [-k for _, k in row[: min(count, most)]]
        p.size = kept.count(0)
        lengths = [kept.count(k + 1) for k in range(len(p.branches))]
        p.branches = [(t[:n], j[:n]) for (t, j), n in zip(p.branches, lengths, strict=True) if n]


def cut(proposals: Sequence[Proposals], drafts: Sequence[Draft]) -> list[Draft]:
    """The part of each draft that is worth verifying, where the call adapts; sampled drafts have been cut before."""
    paces, size = [p.pace for p in proposals], proposals[0].options.tree_size
    if proposals[0].candidates.rule == "rejection":
        return list(drafts)
    if size is not None:
        drafts = [Draft(draft.tree.best(size)) for draft in drafts]
    if any(pace is None for pace in paces):
        return list(drafts)
    claims = [sorted(draft.tree.joint, reverse=True) for draft in drafts]
    sizes = choose_rows([pace for pace in paces if pace is not None], claims, any(p.drafted for p in proposals))
    return [Draft(draft.tree.best(size)) for draft, size in zip(drafts, sizes, strict=True)]
