"""Expected speed-up from three measured things: acceptance, the cost of a verification, the cost of a draft.

A step commits the accepted tokens and one of the target's own. With joint acceptance a_k of position k and costs in
plain steps, the expected speed-up while decoding is (1 + sum a_k) / (verify + draft). Source: Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding" (2023), theorem 3.8, with measured acceptance for alpha.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from flashmap_hf.evaluation.acceptance_summary import grouped
from flashmap_hf.evaluation.claims import published_ratios
from flashmap_hf.evaluation.methods import PLAIN, Method
from flashmap_hf.evaluation.paired import Measurement

GOAL = 0.10  # how far expected and measured may lie apart


def expected_speedup(tokens_per_step: float, verify_ratio: float, draft_ratio: float) -> float:
    """Ratios are costs in plain steps."""
    return tokens_per_step / (verify_ratio + draft_ratio)


def tokens_expected(rows: Sequence[Measurement]) -> float:
    """1 + the sum over the positions of the share of steps that kept them; the prefill is no such step."""
    steps = sum(len(r.kept) - 1 for r in rows)
    return 1.0 + sum(sum(r.kept[1:]) for r in rows) / steps


def check(results: Sequence[Measurement], methods: Sequence[Method]) -> list[dict[str, Any]]:
    """Per method, of one temperature: expected and measured speed-up while decoding, and how far they lie apart.

    Measured: milliseconds per token after the first, of all calls together. The costs are means over all steps; a
    verification is the target's forward and what follows it up to the commit. A category is expected to have the costs
    that were measured on the other ones, and an acceptance of its own.
    """
    plain = {(r.place, r.round): r for r in decoding([r for r in results if r.method == PLAIN])}
    checks = []
    for method in methods:
        rows = [r for r in decoding([r for r in results if r.method == method.name]) if (r.place, r.round) in plain]
        if method.name == PLAIN or method.once or not rows:
            continue
        groups = []
        for category, members in grouped(rows).items():
            others = [r for r in rows if r not in members]
            if category and others:
                groups.append({"category": category, **compared(members, plain, others)})
        checks.append({"method": method.name, **compared(rows, plain, rows), "categories": groups})
    return checks


Plain = Mapping[tuple[Any, int], Measurement]  # by place and round


def compared(rows: Sequence[Measurement], plain: Plain, timed: Sequence[Measurement]) -> dict[str, Any]:
    """Of `rows`: the speed-up that their acceptance gives at the costs of the calls `timed`, and the one they had."""
    unit = mean_step([plain[r.place, r.round] for r in timed], "step_ms")
    draft = mean_step(timed, "draft_ms") / unit
    verify = mean_step(timed, "step_ms") / unit - draft
    tokens = tokens_expected(rows)
    expected = expected_speedup(tokens, verify, draft)
    measured = per_token([plain[r.place, r.round] for r in rows]) / per_token(rows)
    error = expected / measured - 1.0
    ratios = {"tokens_per_step": tokens, "verify_ratio": verify, "draft_ratio": draft}
    return ratios | {
        "expected": expected,
        "measured": measured,
        "error": error,
        "within_goal": abs(error) <= GOAL,
    }


def decoding(rows: Sequence[Measurement]) -> list[Measurement]:
    """Calls that have a step after the prefill."""
    return [r for r in rows if len(r.committed) > 1]


def mean_step(rows: Sequence[Measurement], name: str) -> float:
    return statistics.fmean(ms for r in rows for ms in getattr(r, name)[1:])


def per_token(rows: Sequence[Measurement]) -> float:
    """Milliseconds per token, the prefill and its token left out."""
    return sum(sum(r.step_ms[1:]) for r in rows) / sum(sum(r.committed[1:]) for r in rows)


# --- what the same acceptance would give elsewhere ------------------------------------------------------------------


def projections(results: Sequence[Measurement], methods: Sequence[Method], target_bytes: int) -> list[dict[str, Any]]:
    """PROJECTIONS, not measurements: the measured acceptance at cost ratios that were not measured here.

    memory_bound: time is bytes of weights read, so that a verification costs a plain step and a draft what it reads.
    published: the latencies of the published table, for the methods that it has.
    """
    found = []
    for method in methods:
        rows = decoding([r for r in results if r.method == method.name])
        if method.name == PLAIN or method.once or not rows:
            continue
        tokens = tokens_expected(rows)
        steps = sum(len(r.kept) - 1 for r in rows)
        passes = sum(sum(r.drafted_tokens[1:]) for r in rows) / steps if method.footprint.per_token else 1.0
        read = passes * method.footprint.read_bytes / target_bytes
        ratios = {"memory_bound": (1.0, read)}
        if (published := published_ratios(method.name)) is not None:
            ratios["published"] = published
        found += [
            {
                "method": method.name,
                "ratios_of": source,
                "tokens_per_step": tokens,
                "verify_ratio": verify,
                "draft_ratio": draft,
                "expected": expected_speedup(tokens, verify, draft),
            }
            for source, (verify, draft) in ratios.items()
        ]
    return found
