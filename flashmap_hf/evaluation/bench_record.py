"""All measurements -> what `benchmark.json` says of them; docs/benchmark.md describes every field."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from transformers import PreTrainedModel

from flashmap_hf.evaluation import claims, cost_model, drift, memory
from flashmap_hf.evaluation.bench_prompts import Item
from flashmap_hf.evaluation.bench_summary import curve, summarise
from flashmap_hf.evaluation.methods import BASELINES, EQUAL, EQUAL_SMALL_TREE, FLASHMAP, PLAIN, Method
from flashmap_hf.evaluation.paired import Bench, Measurement, dtype_name
from flashmap_hf.runs import Settings

SCHEMA = 1  # of benchmark.json
SUFFIX = 6  # the position whose acceptance is set against that of the first


@dataclass(frozen=True)
class Measured:
    """A benchmark that has run. settings: one per temperature."""

    bench: Bench
    target: PreTrainedModel
    items: Sequence[Item]
    methods: Sequence[Method]
    settings: Sequence[Settings]
    seed: int

    @property
    def results(self) -> list[Measurement]:
        """In the target's dtype."""
        return [r for r in self.bench.results if r.dtype == dtype_name(self.target)]

    def at(self, temperature: float) -> list[Measurement]:
        return [r for r in self.results if r.temperature == temperature]

    @property
    def prompts(self) -> drift.Prompts:
        """The inputs of every turn that was measured."""
        new = self.settings[0].max_new_tokens
        inputs = {(item.id, item.turn): (item, self.bench.inputs(self.target, item, new)) for item in self.items}
        return {place: (item, ids) for place, (item, ids) in inputs.items() if ids is not None}


def build(measured: Measured, low: tuple[PreTrainedModel, PreTrainedModel] | None) -> dict[str, Any]:
    """The record. low: the target in bfloat16 and in float32, where greedy drift was asked for."""
    methods = [method for method in measured.methods if not method.once]
    names = [method.name for method in methods]
    temperatures = [settings.temperature for settings in measured.settings]
    summed = {t: summarise(measured.at(t), names) for t in temperatures}
    checks = {t: cost_model.check(measured.at(t), methods) for t in temperatures}
    target_bytes = memory.tensor_bytes(measured.target)
    prompts = measured.prompts
    greedy = Settings(measured.settings[0].max_new_tokens)
    drifts: dict[str, Any] = {"greedy": drift.greedy(measured.target, prompts, greedy, measured.results)}
    drifts["sampled"] = [
        drift.sampled(measured.target, prompts, measured.at(t), t, measured.seed) for t in temperatures if t > 0.0
    ]
    drifts["low_precision"] = low and drift.low_precision(*low, prompts, greedy, measured.bench.results)
    differing = {PLAIN: 0} | {name: group["differ"] for name, group in drifts["greedy"].items()}
    once = [m for m in measured.methods if m.once]
    sizes = {m.name: m.options["num_assistant_tokens"] for m in once if "num_assistant_tokens" in m.options}
    shapes = {name: name for name in (FLASHMAP, *(m.name for m in once if m.name not in sizes))}
    first_round = [r for r in measured.at(temperatures[0]) if r.round == 0]
    return {
        "seconds": sum(result.seconds for result in measured.bench.results),
        "sessions": len({result.session for result in measured.bench.results}),
        "turns": len(prompts),
        "turns_too_long": len(measured.bench.too_long),
        "target_weight_bytes": target_bytes,
        "target_state_bytes": [
            {"context": size, "bytes": memory.cache_bytes(measured.target.config, size, measured.target.dtype)}
            for size in memory.CONTEXTS
        ],
        "temperatures": [{"temperature": t, "methods": summed[t]} for t in temperatures],
        "against_baselines": [row for t in temperatures for row in against_baselines(t, summed[t], methods)],
        "suffix": [row for t in temperatures for row in suffixes(t, summed[t])],
        "k_curve": curve(first_round, "block_size", sizes),
        "variants": curve(first_round, "method", shapes) if len(shapes) > 1 else [],
        "drift": drifts,
        "cost_model": [{"temperature": t, "goal": cost_model.GOAL, "methods": checks[t]} for t in temperatures],
        "projections": [
            {"temperature": t, "methods": cost_model.projections(measured.at(t), methods, target_bytes)}
            for t in temperatures
        ],
        "claims": claims.compared(
            summed[temperatures[0]],
            [method.to_dict() for method in methods],
            differing,
            {PLAIN: 1.0} | {row["method"]: row["expected"] for row in checks[temperatures[0]]},
        ),
        "slower_than_plain": [row for t in temperatures for row in slower_than_plain(t, measured)],
    }


def against_baselines(
    temperature: float, summed: dict[str, dict[str, Any]], methods: Sequence[Method]
) -> list[dict[str, Any]]:
    """FlashMap, one step, beside each trained baseline: who is ahead in tokens per step, and by how much.

    It is the drafter that was trained with the baselines, where there is one, as a chain and as a tree of as many
    tokens; else the benchmark's own.
    """
    parameters = {method.name: method.footprint.parameters for method in methods}
    blocks = {method.name: method.details.get("drafter", {}).get("blocks") for method in methods}
    rows = []
    for own, name in product([EQUAL, EQUAL_SMALL_TREE] if EQUAL in summed else [FLASHMAP], BASELINES):
        if name not in summed:
            continue
        ours, theirs = (summed[n]["overall"]["tokens_per_step"] for n in (own, name))
        rows.append(
            {
                "temperature": temperature,
                "baseline": name,
                "flashmap": own,
                "flashmap_tokens_per_step": ours,
                "baseline_tokens_per_step": theirs,
                "ratio": ours / theirs,
                "parameter_ratio": parameters[own] / parameters[name],
                "flashmap_blocks": blocks[own],
                "baseline_blocks": blocks[name],
                "ahead": ours > theirs,
            }
        )
    return rows


def suffixes(temperature: float, summed: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Per method that drafts blocks: conditional acceptance at position 6, or the last one, over that at position 1."""
    rows = []
    for name, groups in summed.items():
        known = [p for p in groups["overall"]["positions"][:SUFFIX] if p["conditional"]]
        if len(known) > 1 and (name.startswith(FLASHMAP) or name in BASELINES):
            first, last = known[0]["conditional"], known[-1]["conditional"]
            place = {"temperature": temperature, "method": name, "position": known[-1]["position"]}
            rows.append(place | {"first": first, "last": last, "ratio": last / first})
    return rows


def slower_than_plain(temperature: float, measured: Measured) -> list[dict[str, Any]]:
    """Every turn on which a way of FlashMap was slower than plain decoding, in the median over the rounds."""
    rows = measured.at(temperature)
    found = []
    for item in measured.items:
        here = [r for r in rows if r.place == (item.id, item.turn)]
        for name, groups in summarise(here, [m.name for m in measured.methods if not m.once]).items():
            speedup = groups["overall"]["speedup"]
            if name.startswith(FLASHMAP) and speedup is not None and speedup["median"] < 1.0:
                place = {"temperature": temperature, "id": item.id, "turn": item.turn, "category": item.category}
                found.append(place | {"method": name, "speedup": speedup["median"]})
    return found
