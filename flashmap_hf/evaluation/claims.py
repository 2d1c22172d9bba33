"""The table that the method's description publishes, quoted, with what was measured here beside each number.

The published numbers are claims about another target on another machine, and unverified; none of them is ours.
"""

from typing import Any

SOURCE = (
    '"FlashMap: Flow Map Speculative Decoding and the Mathematical Elimination of Suffix Decay", Abrar Akhunji: '
    "Qwen3-8B on one H100 SXM5 under vLLM"
)
POSITIONS = (1, 4, 6)  # whose acceptance the table states
# column -> the method here that stands beside it
COLUMNS = {"plain": "plain", "eagle3": "eagle", "dflash": "dflash", "flashmap": "flashmap"}
PUBLISHED: dict[str, dict[str, float]] = {
    "plain": {
        "block_size": 0, "draft_passes": 0, "draft_ms": 0.0, "verify_ms": 8.4, "tokens_per_step": 1.0,
        "token_gap_p50_ms": 8.40, "speedup_peak": 1.0, "speedup_code": 1.0, "drift": 0,
    },
    "eagle3": {
        "block_size": 6, "draft_passes": 6, "draft_ms": 14.8, "verify_ms": 11.2, "tokens_per_step": 3.24,
        "acceptance_1": 0.864, "acceptance_4": 0.642, "acceptance_6": 0.510,
        "token_gap_p50_ms": 3.45, "speedup_peak": 2.43, "speedup_code": 2.81, "drift": 0,
    },
    "dflash": {
        "block_size": 8, "draft_passes": 1, "draft_ms": 3.6, "verify_ms": 12.1, "tokens_per_step": 2.45,
        "acceptance_1": 0.881, "acceptance_4": 0.352, "acceptance_6": 0.184,
        "token_gap_p50_ms": 2.88, "speedup_peak": 3.12, "speedup_code": 3.40, "drift": 0,
    },
    "flashmap": {
        "block_size": 8, "draft_passes": 1, "draft_ms": 3.8, "verify_ms": 12.1, "tokens_per_step": 4.92,
        "acceptance_1": 0.934, "acceptance_4": 0.812, "acceptance_6": 0.725,
        "token_gap_p50_ms": 1.62, "speedup_peak": 5.18, "speedup_code": 6.12, "drift": 0,
    },
}  # fmt: skip
LABELS = {
    "block_size": "block size K",
    "draft_passes": "draft passes per block",
    "draft_ms": "draft, ms",
    "verify_ms": "verification, ms",
    "tokens_per_step": "tokens per target step",
    # the published table does not say which of the two it means
    **{f"acceptance_{k}": f"acceptance at position {k}; ours given the earlier ones" for k in POSITIONS},
    **{f"joint_{k}": f"acceptance at position {k}; ours of all up to it" for k in POSITIONS},
    "token_gap_p50_ms": "time between tokens, median, ms",
    "speedup_peak": "speed-up, best category",
    "speedup_code": "speed-up on code",
    "drift": "prompts whose greedy output differs",
    "own_figures": "speed-up that the column's own latencies and tokens give",
}
CODE = "coding"  # the category


def published_ratios(method: str) -> tuple[float, float] | None:
    """Verification and draft in plain steps, from the published latencies; None where the table lacks the method."""
    column = next((column for column, name in COLUMNS.items() if name == method and name != "plain"), None)
    if column is None:
        return None
    plain = PUBLISHED["plain"]["verify_ms"]
    return PUBLISHED[column]["verify_ms"] / plain, PUBLISHED[column]["draft_ms"] / plain


def compared(
    summed: dict[str, dict[str, Any]], methods: list[dict[str, Any]], drift: dict[str, int], own: dict[str, float]
) -> dict[str, Any]:
    """The published table and ours, row by row.

    Args:
        summed: of the first temperature, per method (`bench_summary.summarise`).
        methods: `Method.to_dict` of each.
        drift: prompts whose greedy output differs from plain decoding's, per method.
        own: the expected speed-up of the cost model, per method.
    """
    shapes = {method["name"]: method.get("drafter") for method in methods}
    rows = []
    for key, label in LABELS.items():
        claimed = {column: claim(column, key) for column in COLUMNS}
        measured = {
            column: ours(key, name, summed[name], shapes.get(name), drift, own) if name in summed else None
            for column, name in COLUMNS.items()
        }
        rows.append({"key": key, "measure": label, "claimed": claimed, "measured": measured})
    return {"source": SOURCE, "unverified": True, "positions": list(POSITIONS), "rows": rows}


def claim(column: str, key: str) -> float | None:
    """As published; `own_figures` follows from the column's other numbers."""
    if key != "own_figures":
        return PUBLISHED[column].get(key.replace("joint", "acceptance"))
    given, plain = PUBLISHED[column], PUBLISHED["plain"]["verify_ms"]
    return given["tokens_per_step"] * plain / (given["verify_ms"] + given["draft_ms"])


def ours(
    key: str,
    name: str,
    summed: dict[str, Any],
    shape: dict[str, Any] | None,
    drift: dict[str, int],
    own: dict[str, float],
) -> float | None:
    """The same quantity as measured; None where there is none."""
    overall, categories = summed["overall"], summed["categories"]
    kind, _, position = key.rpartition("_")
    if kind in ("acceptance", "joint"):
        rate = "conditional" if kind == "acceptance" else "joint"
        return next((p[rate] for p in overall["positions"] if p["position"] == int(position)), None)
    if key == "block_size":
        return 0 if name == "plain" else shape["block_size"] if shape else None
    if key == "draft_passes":
        return 0 if name == "plain" else shape["block_size"] if shape and name == "eagle" else 1
    if key in ("draft_ms", "verify_ms", "tokens_per_step"):
        return overall[key]
    if key == "token_gap_p50_ms":
        return overall["token_gap_ms"]["p50"]
    speedups = {c: group["speedup"]["median"] for c, group in categories.items() if group["speedup"]}
    if key == "speedup_peak":
        return max(speedups.values(), default=None)
    if key == "speedup_code":
        return speedups.get(CODE)
    if key == "drift":
        return drift.get(name)
    return own.get(name)
