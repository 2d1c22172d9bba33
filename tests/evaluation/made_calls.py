"""Measurements made up for the tests of what is computed from them."""

from collections.abc import Sequence
from typing import Any

from flashmap_hf.evaluation.paired import Measurement


def call(
    method: str = "plain",
    kept: Sequence[int] = (0, 0, 0, 0),  # per step, the prefill first
    drafted: int = 0,  # per step after the prefill
    draft: float = 0.0,  # ms of each step after the prefill
    verify: float = 10.0,
    **fields: Any,
) -> Measurement:
    """A call whose steps commit what they kept and one token more; the prefill takes 30 ms."""
    steps = len(kept)
    committed = [count + 1 for count in kept]
    given = {
        "id": "p",
        "category": "",
        "turn": 0,
        "method": method,
        "dtype": "float32",
        "temperature": 0.0,
        "round": 0,
        "session": 1,
        "prompt_tokens": 7,
        "tokens": list(range(sum(committed))),
        "seconds": (30.0 + (steps - 1) * (draft + verify)) / 1e3,
        "drafted_tokens": [0] + [drafted] * (steps - 1),
        "kept": list(kept),
        "committed": committed,
        "forwards": [1] * steps,
        "draft_ms": [0.0] + [draft] * (steps - 1),
        "verify_ms": [30.0] + [verify] * (steps - 1),
        "commit_ms": [0.0] * steps,
    }
    return Measurement(**(given | fields))
