"""How many drafted tokens to verify, and whether to draft at all: never more than 3 % slower than plain decoding.

Everything is decided from claimed probabilities, accepted tokens and a fixed table of costs, never from a running
clock: with the same table, the same seed gives the same output. Time is counted in plain steps: 1.0 is what one target
forward over one token per row costs.

Sizes by the machine's cost of n tokens: Chen et al. 2024 (arXiv:2402.12374), here step by step from the claims at hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

from flashmap_hf.costs import StepCost

_SETTLED = 64  # tokens of an answer from which the promise holds
_FIRST_GAP, _LAST_GAP = 2, 64  # plain steps before a probe: doubled after each one that failed
_MEMORY = 0.1  # weight of the newest step in the running means
_SURE = 0.98  # claims above it say no more than it: a power must be able to correct them


class _Calibration:
    """What claimed probabilities are worth: p = claim ** exp(x), so that errors compound along a path as they do.

    x is tracked by an extended Kalman filter whose state drifts back to "claims are right", N(0, 3).
    """

    spread = 3.0  # variance before anything was seen
    drift = 0.002  # towards that, per step
    doubt = 0.02  # variance that each use adds: texts change

    def __init__(self) -> None:
        self.x, self.variance = 0.0, self.spread

    def __call__(self, joint: Sequence[float]) -> list[float]:
        power = math.exp(self.x)
        return [min(p, _SURE) ** power for p in joint]

    def update(self, joint: Sequence[float], accepted: int) -> None:
        probs = self(joint)
        expected = sum(probs)
        slope = sum(p * math.log(p) for p in probs if p > 0)  # of `expected` in x
        noise = max(expected * (1 + expected), 0.1)  # variance of a geometric count
        gain = self.variance * slope / (slope * slope * self.variance + noise)
        self.x = min(max(self.x + gain * (accepted - expected), -4.0), 4.0)
        self.variance = min(self.variance * (1 - gain * slope) + self.doubt, self.spread)

    def fade(self) -> None:
        self.x *= 1 - self.drift
        self.variance += 2 * self.drift * (self.spread - self.variance)


class _Source:
    """Where drafts come from: what its claims are worth, whether it pays, when to try it again."""

    def __init__(self) -> None:
        self.calibration = _Calibration()
        self.tokens, self.price = 0.5, 0.0  # of a use, beyond a plain step: running means that begin hopeful
        self.gap, self.idle = _FIRST_GAP, 0

    @property
    def due(self) -> bool:
        """Whether it was left alone for so long that it deserves a probe."""
        return self.idle >= self.gap

    @property
    def rate(self) -> float:
        """Tokens per plain step when it is used."""
        return (1 + self.tokens) / (1 + self.price)

    def used(self, joint: Sequence[float], accepted: int, price: float) -> None:
        """price: what the step cost beyond a plain one, in plain steps."""
        expected = sum(self.calibration(joint))  # a second estimate of what is accepted, with less noise
        if joint:
            self.calibration.update(joint, accepted)
        if accepted > price:
            self.gap = _FIRST_GAP
        elif self.due:
            self.gap = min(2 * self.gap, _LAST_GAP)
        self.tokens += _MEMORY * ((accepted + expected) / 2 - self.tokens)
        self.price += _MEMORY * (price - self.price)
        self.idle = 0

    def unused(self) -> None:
        self.idle += 1
        self.calibration.fade()


class Pace:
    """Decides for one sequence of one `generate` call: `wants_draft`, `choose`, `observe`, once per step each.

    The ledger: time lost against plain decoding stays within `budget` times the plain time of the tokens emitted, or of
    64 tokens while there are fewer. A step is taken only if that holds even when nothing is accepted. So, by the table,
    an answer of 64 tokens or more never takes more than 1 + budget times as long as plain decoding.

    Args:
        expected_tokens: what the answer may have at most; where that is below 64, so much less is put at stake.
    """

    def __init__(self, cost: StepCost, expected_tokens: int = _SETTLED, budget: float = 0.03) -> None:
        self.cost, self.budget = cost, budget
        self.settled = min(expected_tokens, _SETTLED)
        self.tokens, self.time = 0, 0.0  # emitted; spent, in plain steps
        self.drafter, self.ngrams = _Source(), _Source()

    def wants_draft(self, free: Sequence[float] = (), rows: int = 1) -> bool:
        """Whether a drafter pass is worth its time now.

        free: claimed probabilities, in descending order, of nodes that can be verified without it (n-grams).
        rows: how many sequences share a forward; `wants_draft_rows` decides for all of them together.
        """
        return wants_draft_rows([self], [free], rows)

    def choose(self, joint: Sequence[float], drafter_used: bool = True) -> int:
        """How many of the nodes to verify, 0 allowed. joint: claimed probabilities, in descending order.

        drafter_used: the drafter made some of them in this step, and its time is spent; else they came free.
        """
        return choose_rows([self], [joint], drafter_used)[0]

    def observe(
        self, drafted: Sequence[float], accepted: int, drafter_used: bool, rows: int = 1, width: int | None = None
    ) -> None:
        """What came of a step.

        drafted: claimed probabilities of what was verified; accepted: how many tokens stood, the target's own one not
        counted; drafter_used: a drafter pass was made; width: nodes per row, padding included (default: len(drafted)).
        """
        price = self.cost.price(rows, len(drafted) if width is None else width)
        price += self.cost.draft_price if drafter_used else 0.0
        used = self.drafter if drafter_used else self.ngrams if drafted else None
        for source in (self.drafter, self.ngrams):
            if source is used:
                source.used(drafted, accepted, price)
            else:
                source.unused()
        self.tokens += 1 + accepted
        self.time += 1 + price

    @property
    def stake(self) -> float:
        """Plain steps that may still be lost."""
        return self.budget * max(self.tokens + 1, self.settled) - (self.time - self.tokens)


def wants_draft_rows(paces: Sequence[Pace], free: Sequence[Sequence[float]], rows: int | None = None) -> bool:
    """`Pace.wants_draft` for rows that share each forward (and the drafter pass): all draft, or none."""
    cost, rows = paces[0].cost, rows or len(paces)
    if cost.draft_price + cost.price(rows, 1) > min(pace.stake for pace in paces):
        return False
    if any(pace.drafter.due for pace in paces):
        return True
    _, without = _best(paces, free, [pace.ngrams for pace in paces], 0.0, rows)
    return sum(pace.drafter.rate for pace in paces) / len(paces) > without


def choose_rows(paces: Sequence[Pace], joints: Sequence[Sequence[float]], drafter_used: bool = True) -> list[int]:
    """`Pace.choose` for rows that share each forward: the longest row sets the width that all are padded to."""
    sources = [pace.drafter if drafter_used else pace.ngrams for pace in paces]
    count, _ = _best(paces, joints, sources, paces[0].cost.draft_price if drafter_used else 0.0, len(paces))
    return [min(count, len(joint)) for joint in joints]


def _best(
    paces: Sequence[Pace], joints: Sequence[Sequence[float]], sources: Sequence[_Source], spent: float, rows: int
) -> tuple[int, float]:
    """How many nodes at most to verify in each row, and the tokens per plain step and row that this promises."""
    cost = paces[0].cost
    claims = [source.calibration(joint) for source, joint in zip(sources, joints, strict=True)]
    limit = min(pace.stake for pace in paces) - spent
    best, rate, accepted = 0, 1.0, 0.0
    for n, column in enumerate(zip_longest(*claims, fillvalue=0.0), start=1):
        price = cost.price(rows, n)
        if price > limit:
            break
        accepted += sum(column) / len(claims)
        if (1 + accepted) / (1 + price) > rate:
            best, rate = n, (1 + accepted) / (1 + price)
    due = any(source.due and claim for source, claim in zip(sources, claims, strict=True))
    return (1 if due and not best and cost.price(rows, 1) <= limit else best), rate
