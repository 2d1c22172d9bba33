"""Whether drafting changes what comes out: greedy outputs token by token, sampled ones by a two-sample test."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from scipy import stats
from transformers import PreTrainedModel

from flashmap_hf.compare import Spread, first_difference
from flashmap_hf.evaluation.bench_prompts import Item
from flashmap_hf.evaluation.methods import PLAIN, Inputs
from flashmap_hf.evaluation.paired import Measurement
from flashmap_hf.runs import Settings

Place = tuple[str, int]  # the id of a prompt, a turn of it
Prompts = Mapping[Place, tuple[Item, Inputs]]


def parted(
    target: PreTrainedModel,
    prompts: Prompts,
    settings: Settings,
    reference: Sequence[Measurement],
    others: Sequence[Measurement],
    scorer: PreTrainedModel,
) -> dict[str, Any]:
    """How many prompts have another greedy output among `others` than in `reference`, and what the outputs are worth.

    Args:
        target: gives the margin between its two best logits where outputs part, in its own dtype.
        scorer: gives the mean log-probability per token of both outputs, over the prompts that differ.
    """
    first = {r.place: r for r in reversed(reference)}
    compared: set[Place] = set()
    differences: dict[Place, dict[str, Any]] = {}
    scores: list[list[float]] = []
    for other in others:
        known = first.get(other.place)
        if known is None or other.place not in prompts:
            continue
        compared.add(other.place)
        if other.tokens == known.tokens or other.place in differences:
            continue
        ids = prompts[other.place][1]["input_ids"]
        found = first_difference(target, ids, known.tokens, other.tokens, settings)
        assert found is not None  # they are not equal
        differences[other.place] = {
            "id": other.id,
            "turn": other.turn,
            "position": found.position,
            "reference_token": found.plain_token,
            "token": found.flashmap_token,
            "margin": found.margin,
        }
        scores.append([log_probability(scorer, ids, r.tokens) for r in (known, other)])
    margins = [difference["margin"] for difference in differences.values()]
    return {
        "compared": len(compared),
        "differ": len(differences),
        "share": len(differences) / len(compared) if compared else None,
        "margin": asdict(Spread.of(margins)) if margins else None,
        "reference_log_probability": mean([pair[0] for pair in scores]),
        "log_probability": mean([pair[1] for pair in scores]),
        "differences": list(differences.values()),
    }


def greedy(
    target: PreTrainedModel, prompts: Prompts, settings: Settings, results: Sequence[Measurement]
) -> dict[str, dict[str, Any]]:
    """Per method: its greedy outputs against those of plain decoding in the same dtype. In float32 none may differ."""
    rows = by_method(results, 0.0, str(target.dtype).removeprefix("torch."))
    plain = rows.pop(PLAIN, [])
    return {name: parted(target, prompts, settings, plain, others, target) for name, others in rows.items()}


def low_precision(
    low: PreTrainedModel,
    high: PreTrainedModel,
    prompts: Prompts,
    settings: Settings,
    results: Sequence[Measurement],
) -> dict[str, Any]:
    """Of the target in bfloat16: who differs from its plain decoding, and how often that differs from float32's.

    Log-probabilities are float32's. A method that differs no more often than plain decoding does from float32 has
    rounding for an explanation.
    """
    dtype = str(low.dtype).removeprefix("torch.")
    plain_high = by_method(results, 0.0, str(high.dtype).removeprefix("torch.")).get(PLAIN, [])
    rows = by_method(results, 0.0, dtype)
    plain = rows.pop(PLAIN, [])
    return {
        "dtype": dtype,
        "plain_against_float32": parted(low, prompts, settings, plain_high, plain, high),
        "methods": {name: parted(low, prompts, settings, plain, others, high) for name, others in rows.items()},
    }


def by_method(results: Sequence[Measurement], temperature: float, dtype: str) -> dict[str, list[Measurement]]:
    rows: dict[str, list[Measurement]] = {}
    for result in results:
        if result.temperature == temperature and result.dtype == dtype:
            rows.setdefault(result.method, []).append(result)
    return rows


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# --- under the target's law -----------------------------------------------------------------------------------------


@torch.inference_mode()
def laws(target: PreTrainedModel, input_ids: torch.Tensor, tokens: Sequence[int], temperature: float) -> torch.Tensor:
    """Log-probabilities `[n, V]` of the law that each of `tokens` was chosen from, after `input_ids` `[1, T]`."""
    answer = input_ids.new_tensor(tokens)[None]
    model: Any = target
    logits = model(torch.cat([input_ids, answer], dim=1), use_cache=False).logits
    rows: torch.Tensor = logits[0, input_ids.shape[1] - 1 : -1].double()
    return (rows / temperature).log_softmax(-1)


def log_probability(target: PreTrainedModel, input_ids: torch.Tensor, tokens: Sequence[int]) -> float:
    """Mean over the tokens, at temperature 1."""
    rows = laws(target, input_ids, tokens, 1.0)
    return float(rows.gather(1, rows.new_tensor(tokens, dtype=torch.long)[:, None]).mean())


def ranks(rows: torch.Tensor, tokens: Sequence[int], noise: torch.Tensor) -> torch.Tensor:
    """Where each token lies in its law, `[n]` in [0, 1]: uniform and independent for tokens drawn from it.

    The law is ordered by probability, ties by id; u = mass before the token + noise * its own mass. rows: log-laws
    `[n, V]`; noise: `[n]`, uniform.
    """
    probs = rows.exp()
    chosen = torch.tensor(tokens, device=rows.device)[:, None]
    mass = probs.gather(1, chosen)
    ids = torch.arange(rows.shape[1], device=rows.device)
    before = (probs > mass) | ((probs == mass) & (ids < chosen))
    return (probs * before).sum(1) + noise.to(rows.device) * mass[:, 0]


def sampled(
    target: PreTrainedModel, prompts: Prompts, results: Sequence[Measurement], temperature: float, seed: int
) -> dict[str, Any]:
    """Sampled outputs: a two-sample Kolmogorov-Smirnov test of each method's tokens against plain decoding's.

    What is compared is each token's place in the target's law after what was before it (`ranks`); `p_uniform` is the
    one-sample test of the same numbers against the exact law.
    """
    rows = by_method(results, temperature, str(target.dtype).removeprefix("torch."))
    generator = torch.Generator().manual_seed(seed)
    places: dict[str, list[float]] = {}
    for name, members in rows.items():
        places[name] = []
        for row in members:
            if row.place in prompts:
                law = laws(target, prompts[row.place][1]["input_ids"], row.tokens, temperature)
                noise = torch.rand(len(row.tokens), generator=generator, dtype=torch.float64)
                places[name] += ranks(law, row.tokens, noise).clamp(0.0, 1.0).tolist()
    plain = places.get(PLAIN, [])
    tests = {}
    for name, values in places.items():
        if values and plain:
            two = stats.ks_2samp(plain, values) if name != PLAIN else None
            tests[name] = {
                "tokens": len(values),
                "statistic": float(two.statistic) if two else None,
                "p_value": float(two.pvalue) if two else None,
                "p_uniform": float(stats.kstest(values, "uniform").pvalue),
            }
    return {"temperature": temperature, "plain_tokens": len(plain), "methods": tests}
