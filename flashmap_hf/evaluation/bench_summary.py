"""Measurements -> the numbers of a method, over all prompts and by category, beside those of plain decoding."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flashmap_hf.compare import Spread
from flashmap_hf.evaluation.acceptance_summary import grouped, positions
from flashmap_hf.evaluation.methods import PLAIN
from flashmap_hf.evaluation.paired import Measurement

Place = tuple[str, int]  # the id of a prompt, a turn of it


def summarise(results: Sequence[Measurement], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of one temperature: per method `overall`, and `categories` in the order of appearance."""
    baseline = {(r.place, r.round): r for r in results if r.method == PLAIN}
    summed: dict[str, dict[str, Any]] = {}
    for name in methods:
        rows = [result for result in results if result.method == name]
        if rows:
            groups = {category: summary(members, baseline) for category, members in grouped(rows).items()}
            summed[name] = {"overall": groups.pop(""), "categories": groups}
    return summed


def summary(rows: Sequence[Measurement], plain: dict[tuple[Place, int], Measurement]) -> dict[str, Any]:
    """Counts are sums over all calls and rates their ratios.

    Times of a step are medians over the steps after the prefill. The time between two tokens is a step's time, shared
    evenly by its tokens. A prompt's speed-up is the median of its rounds' own ratios to the plain call of that round.
    """
    new_tokens, target_steps = sum(len(r.tokens) for r in rows), sum(sum(r.forwards) for r in rows)
    pairs = [(r, plain[r.place, r.round]) for r in rows if (r.place, r.round) in plain]
    ratios: dict[Place, list[float]] = {}
    for r, beside in pairs:
        ratios.setdefault(r.place, []).append(r.tokens_per_second / beside.tokens_per_second)
    gaps = sorted(gap for r in rows for gap in token_gaps(r))
    return {
        "prompts": len({r.place for r in rows}),
        "calls": len(rows),
        "new_tokens": new_tokens,
        "target_steps": target_steps,
        "tokens_per_step": new_tokens / target_steps,
        "positions": positions(rows),
        "draft_ms": median(ms for r in rows for ms in r.draft_ms[1:]),
        "verify_ms": median(ms for r in rows for ms in r.verify_ms[1:]),
        "step_ms": median(ms for r in rows for ms in r.step_ms[1:]),
        "first_token_ms": median(r.step_ms[0] for r in rows),
        "token_gap_ms": {"p50": quantile(gaps, 0.50), "p95": quantile(gaps, 0.95)},
        "tokens_per_second": asdict(Spread.of([r.tokens_per_second for r in rows])),
        "speedup": asdict(Spread.of([statistics.median(values) for values in ratios.values()])) if ratios else None,
        # how far the rounds of one prompt lie apart: the noise of the clock
        "speedup_noise": median((max(v) - min(v)) / statistics.median(v) for v in ratios.values() if len(v) > 1),
        "pairs": len(pairs),
        "pairs_of_two_sessions": sum(r.session != beside.session for r, beside in pairs),
    }


def token_gaps(row: Measurement) -> list[float]:
    """Milliseconds between each token and the one before it, the first one left out."""
    steps = zip(row.step_ms[1:], row.committed[1:], strict=True)
    return [ms / count for ms, count in steps for _ in range(count)]


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the sorted values do not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else None


def median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def curve(results: Sequence[Measurement], label: str, points: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Speed and acceptance of each method in `points` (name -> what its row has as `label`), by category, too."""
    summed = summarise(results, [PLAIN, *points])
    names = ("tokens_per_step", "tokens_per_second", "speedup")
    return [
        {
            label: point,
            **{key: summed[name]["overall"][key] for key in names},
            "positions": summed[name]["overall"]["positions"],
            "categories": {c: {k: group[k] for k in names} for c, group in summed[name]["categories"].items()},
        }
        for name, point in points.items()
        if name in summed
    ]
