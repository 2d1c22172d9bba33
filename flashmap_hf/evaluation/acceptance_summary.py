"""The results of single prompts -> what `evaluate.json` says of all of them and of each category; and as a table."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from flashmap_hf.compare import Spread, median_or_none
from flashmap_hf.markdown import how


class Counted(Protocol):
    """Blocks that had each position of a block, that were judged there, that kept it; and what they belong to."""

    @property
    def category(self) -> str: ...
    @property
    def drafted(self) -> list[int]: ...
    @property
    def judged(self) -> list[int]: ...
    @property
    def accepted(self) -> list[int]: ...


Categorised = TypeVar("Categorised", bound=Counted)


@dataclass(frozen=True)
class PromptResult:
    """One prompt at one temperature.

    drafted, judged, accepted: one count per position of the block. Blocks that had the position; blocks in which the
    target judged it, the earlier ones being accepted and none of them the end of the text; blocks that kept it.
    seconds: of the whole call. drafter_ms, verify_ms: mean of a pass, of a target forward after the prefill.
    plain_*, identical, difference: of plain decoding beside it, where that was timed; the last two only when greedy.
    """

    id: str
    category: str
    temperature: float
    prompt_tokens: int
    new_tokens: int
    target_steps: int
    blocks: int
    plain_calls: int
    drafted: list[int]
    judged: list[int]
    accepted: list[int]
    seconds: float
    drafter_ms: float | None
    verify_ms: float | None
    plain_new_tokens: int | None = None
    plain_seconds: float | None = None
    plain_step_ms: float | None = None
    identical: bool | None = None
    difference: dict[str, Any] | None = None


def summarise(results: Sequence[PromptResult], temperatures: Sequence[float]) -> list[dict[str, Any]]:
    """Per temperature: `overall`, and `categories` in the order of appearance, `a/b` also as a part of `a`.

    A sampled group knows `share_of_greedy`, its tokens per step over the greedy ones, where both were measured.
    """
    summaries = [by_category([r for r in results if r.temperature == temperature]) for temperature in temperatures]
    greedy = dict(zip(temperatures, summaries, strict=True)).get(0.0)
    for temperature, groups in zip(temperatures, summaries, strict=True):
        for name, group in groups.items():
            if temperature > 0.0 and greedy is not None:
                group["share_of_greedy"] = group["tokens_per_step"] / greedy[name]["tokens_per_step"]
    return [
        {"temperature": temperature, "overall": groups.pop(""), "categories": groups}
        for temperature, groups in zip(temperatures, summaries, strict=True)
    ]


def by_category(results: Sequence[PromptResult]) -> dict[str, dict[str, Any]]:
    """The summary of each category; under "" that of all results."""
    return {name: summary(rows) for name, rows in grouped(results).items()}


def grouped(results: Sequence[Categorised]) -> dict[str, list[Categorised]]:
    """The results of each category, `a/b` also as a part of `a`; under "" all of them."""
    members: dict[str, list[Categorised]] = {"": list(results)}
    for result in results:
        parts = result.category.split("/") if result.category else []
        for depth in range(1, len(parts) + 1):
            members.setdefault("/".join(parts[:depth]), []).append(result)
    return members


def summary(results: Sequence[PromptResult]) -> dict[str, Any]:
    """Counts are sums, rates their ratios; times are medians over the prompts' own means."""
    new_tokens, target_steps = sum(r.new_tokens for r in results), sum(r.target_steps for r in results)
    record: dict[str, Any] = {
        "prompts": len(results),
        "new_tokens": new_tokens,
        "target_steps": target_steps,
        "tokens_per_step": new_tokens / target_steps,
        "blocks": sum(r.blocks for r in results),
        "plain_calls": sum(r.plain_calls for r in results),
        "positions": positions(results),
        "drafter_ms": median_or_none([r.drafter_ms for r in results]),
        "verify_ms": median_or_none([r.verify_ms for r in results]),
    }
    timed = [(r, r.plain_new_tokens / r.plain_seconds) for r in results if r.plain_new_tokens and r.plain_seconds]
    if timed:
        record |= {
            "plain_step_ms": median_or_none([r.plain_step_ms for r in results]),
            "plain_tokens_per_second": statistics.median(plain for _, plain in timed),
            "flashmap_tokens_per_second": statistics.median(r.new_tokens / r.seconds for r, _ in timed),
            "speedup": asdict(Spread.of([r.new_tokens / r.seconds / plain for r, plain in timed])),
        }
    compared = [r for r in results if r.identical is not None]
    if compared:
        record["identical"] = {"prompts": sum(bool(r.identical) for r in compared), "compared": len(compared)}
        record["differences"] = [{"id": r.id, **r.difference} for r in compared if r.difference is not None]
    return record


def positions(results: Sequence[Counted]) -> list[dict[str, Any]]:
    """joint: of the blocks that had the position, those that kept all up to it. conditional: of those judged there."""
    drafted, judged, accepted = (added(getattr(r, name) for r in results) for name in ("drafted", "judged", "accepted"))
    return [
        {"position": k, "drafted": d, "judged": j, "accepted": a, "joint": a / d, "conditional": a / j if j else None}
        for k, (d, j, a) in enumerate(zip(drafted, judged, accepted, strict=True), start=1)
    ]


def added(counts: Iterable[Sequence[int]]) -> list[int]:
    """Entry by entry; a shorter one has zeros behind its end."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


# --- on a terminal --------------------------------------------------------------------------------------------------


def print_summary(record: dict[str, Any], console: Console) -> None:
    """One row per category, all prompts last; then what concerns all of them."""
    runs = record["temperatures"]
    title = f"{record['drafter']} for {record['target']}, {record['target_dtype']} on {record['device']}"
    table = Table(box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    table.add_column("\nprompts", justify="right")
    for run in runs:
        short = f"T={run['temperature']:g}" if run["temperature"] else "greedy"
        table.add_column(f"{short}\ntokens/step", justify="right", no_wrap=True)
        if "speedup" in run["overall"]:
            table.add_column(f"{short}\nspeed-up", justify="right", no_wrap=True)
    for name in [*runs[0]["categories"], None]:
        groups = [run["overall"] if name is None else run["categories"][name] for run in runs]
        cells = []
        for group in groups:
            cells.append(f"{group['tokens_per_step']:.2f}")
            if "speedup" in group:
                cells.append(f"{group['speedup']['median']:.2f}")
        table.add_row("all" if name is None else name, str(groups[0]["prompts"]), *cells)
    console.print(title, markup=False, soft_wrap=True)
    console.print(table)
    for run in runs:
        console.print(f"{how(run['temperature'])}: {remarks(run['overall'])}", markup=False, soft_wrap=True)


def remarks(group: dict[str, Any]) -> str:
    """Acceptance, times and what was compared, in one line."""
    rates = " ".join("-" if p["conditional"] is None else f"{p['conditional']:.0%}" for p in group["positions"])
    parts = [f"accepted, given the earlier ones: {rates or '-'}"]
    times = (("drafter", "drafter_ms"), ("verification", "verify_ms"), ("plain step", "plain_step_ms"))
    parts += [f"{label} {group[key]:.0f} ms" for label, key in times if group.get(key) is not None]
    if "share_of_greedy" in group:
        parts.append(f"{group['share_of_greedy']:.0%} of the greedy tokens/step")
    if "identical" in group:
        parts.append("identical to plain: {prompts} of {compared}".format(**group["identical"]))
    if group["plain_calls"]:
        parts.append(f"{group['plain_calls']} calls went on WITHOUT the drafter")
    return "; ".join(parts)
