"""`benchmark.json` in sentences that say where FlashMap loses; and the tables on a terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flashmap_hf.evaluation import bench_table
from flashmap_hf.markdown import Record, how, number

WIDTH = 150  # what the tables need


def verdicts(record: Record) -> list[str]:
    """What a reader should know first, losses included."""
    names = bench_table.labels(record)
    lines = []
    for run in record["temperatures"]:
        fastest = max(run["methods"], key=lambda name: bench_table.speedup(run["methods"][name]["overall"]) or 0.0)
        group, best = (run["methods"][name]["overall"] for name in (bench_table.FLASHMAP, fastest))
        ours, theirs = (number(bench_table.speedup(g)) for g in (group, best))
        line = f"{how(run['temperature']).capitalize()}: FlashMap, one step, makes {number(group['tokens_per_step'])} "
        line += f"tokens per target step, with a median speed-up of {ours}x; "
        found = f"the fastest method is {names[fastest]} with {theirs}x."
        line += "no method beats plain decoding." if fastest == bench_table.PLAIN else found
        parts = run["methods"][bench_table.FLASHMAP]["categories"].items()
        slow = [category for category, part in parts if (bench_table.speedup(part) or 1.0) < 1.0]
        lines.append(line + (f" FlashMap is **slower** than plain decoding on {', '.join(slow)}." if slow else ""))
    behind = [row for row in record["against_baselines"] if not row["ahead"]]
    for row in behind:
        where = f"{how(row['temperature'])}, {number(row['ratio'])} of its tokens per target step"
        lines.append(f"{compared(row, names)} is **behind** {names[row['baseline']]}: {where}.")
    for who in dict.fromkeys(compared(row, names) for row in record["against_baselines"]):
        if who not in {compared(row, names) for row in behind}:
            lines.append(f"{who} is ahead of every trained baseline in tokens per target step.")
    if record["against_baselines"]:
        lines += training_of(record["against_baselines"])
    differ = [names[name] for name, group in record["drift"]["greedy"].items() if group["differ"]]
    if differ:
        fault = "which must not be" if record["dtype"] == "float32" else "which rounding can explain"
        lines.append(f"Greedy outputs that **differ** from plain decoding's, {fault}: {', '.join(differ)}.")
    else:
        lines.append("Every greedy output is token for token that of plain decoding.")
    return lines


def compared(row: Record, names: dict[str, str]) -> str:
    """Which FlashMap drafter a row sets against a baseline."""
    return "FlashMap" if row.get("flashmap") in (None, bench_table.FLASHMAP) else names[row["flashmap"]]


def training_of(rows: list[Record]) -> list[str]:
    """A sentence where the drafter and the baselines were not, or not knowingly, trained alike."""
    pairs: set[tuple[Any, Any]] = {(row.get("flashmap_blocks"), row.get("baseline_blocks")) for row in rows}
    if any(ours is None or theirs is None for ours, theirs in pairs):
        return ["How long each was trained is not in the record: this compares drafters, not methods."]
    if all(0.9 * theirs <= ours <= 1.1 * theirs for ours, theirs in pairs):
        return []
    ours, least = max(ours for ours, _ in pairs), min(theirs for _, theirs in pairs)
    return [
        f"They were **not trained equally**: the drafter saw {ours:,} blocks in its last run, a baseline {least:,}; "
        "this compares drafters, not methods."
    ]


# --- on a terminal --------------------------------------------------------------------------------------------------


def print_benchmark(record: Record) -> None:
    """The results at each temperature, the published table beside ours, and the sentences."""
    console = Console(width=max(Console().width, WIDTH))  # a narrow terminal breaks lines, not cells
    where = f"{record['drafter']} for {record['target']}, {record['dtype']} on {record['device']}"
    for run in record["temperatures"]:
        show(console, f"{where}, {how(run['temperature'])}", bench_table.results(record, run))
    show(console, "Published claims (another target and machine, unverified) and ours", bench_table.claims(record))
    for line in verdicts(record):
        console.print(line.replace("**", ""), markup=False, soft_wrap=True)


def show(console: Console, title: str, table: bench_table.Rows) -> None:
    head, rows = table
    shown = Table(box=box.SIMPLE)
    for i, label in enumerate(head):
        shown.add_column(label, justify="right" if i else "left")
    for row in rows:
        shown.add_row(*row)
    console.print(title, markup=False, soft_wrap=True)
    console.print(shown)
