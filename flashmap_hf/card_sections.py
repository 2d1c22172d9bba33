"""One function per JSON file: what the card shows of it, as tables and sentences. Every number is one of the file's."""

from collections.abc import Sequence

from flashmap_hf.evaluation import bench_table, bench_verdict
from flashmap_hf.markdown import Record, cell, how, number, percent, spread, table, where

# training.json: key -> label and how it is shown; a key that a run did not record is left out
TRAINING = {
    "answers": ("answers of the target", "{:,}"),
    "sampled_answers": ("of them sampled, not greedy", "{:,}"),
    "response_tokens": ("response tokens", "{:,}"),
    "blocks": ("blocks seen", "{:,}"),
    "steps": ("optimiser steps", "{:,}"),
    "epochs": ("passes over the answers, finished", "{:,}"),
    "minutes": ("minutes", "{:.0f}"),
    "parameters": ("parameters", "{:,}"),
    "held_out_answers": ("held-out answers", "{:,}"),
    "held_out_tokens_per_step": ("held-out tokens per target step, greedy, simulated", "{:.2f}"),
}


def verdict(speedup: float, what: str, slower: Sequence[str] = ()) -> str:
    """One sentence on who is faster, which does not hide who is not."""
    if speedup < 1.0:
        return (
            f"The drafter is **slower** than plain decoding on the machine measured: {what}. Decode without it there."
        )
    exceptions = f", but slower on {', '.join(map(cell, slower))}" if slower else ""
    return f"The drafter is faster than plain decoding on the machine measured: {what}{exceptions}."


def evaluate(record: Record) -> Record:
    """Of `flashmap evaluate`."""
    runs = record["temperatures"]
    timed = "speedup" in runs[0]["overall"]
    head = ["", "prompts"]
    for run in runs:
        head.append(f"tokens per target step, {how(run['temperature'])}")
        head += [f"speed-up, {how(run['temperature'])}"] if timed else []
    rows = []
    for name in [*runs[0]["categories"], "all"]:
        groups = [run["overall"] if name == "all" else run["categories"][name] for run in runs]
        row = [name, f"{groups[0]['prompts']:,}"]
        for group in groups:
            row.append(number(group["tokens_per_step"]))
            row += [spread(group["speedup"])] if timed else []
        rows.append(row)
    return {
        "headlines": [headline(run) for run in runs],
        "file": record["prompts"]["file"],
        "where": where(record),
        "how": f"{record['target_dtype']}, at most {record['options']['max_new_tokens']} new tokens"
        + (", each prompt once with the drafter and once without, in turn" if timed else "")
        + (". Speed-up: median (lowest to highest) over the prompts:" if timed else ":"),
        "categories": table(head, rows),
        "positions": position_table(runs),
        "times": time_table(runs, timed),
        "remarks": [line for run in runs if (line := identity(run["overall"]))],
    }


def headline(run: Record) -> str:
    """The first thing to know of a temperature."""
    group = run["overall"]
    line = f"{how(run['temperature']).capitalize()}: {number(group['tokens_per_step'])} tokens per target step"
    if "share_of_greedy" in group:
        line += f", {percent(group['share_of_greedy'])} of the greedy ones"
    line += "."
    if "speedup" in group:
        speedup = group["speedup"]["median"]
        slower = [name for name, part in run["categories"].items() if part["speedup"]["median"] < 1.0]
        line += " " + verdict(speedup, f"median speed-up {number(speedup)}x", slower)
    return line


def position_table(runs: Sequence[Record]) -> str:
    """Rows are positions, two columns per temperature."""
    head = ["position"]
    for run in runs:
        head += [f"{how(run['temperature'])}, given the earlier ones", f"{how(run['temperature'])}, joint"]
    most = max((run["overall"]["positions"] for run in runs), key=len)
    rows = []
    for k, place in enumerate(most):
        row = [str(place["position"])]
        for run in runs:
            known = run["overall"]["positions"][k : k + 1]
            row += [percent(known[0]["conditional"]), percent(known[0]["joint"])] if known else ["-", "-"]
        rows.append(row)
    return table(head, rows)


def time_table(runs: Sequence[Record], timed: bool) -> str:
    labels = {"drafter_ms": "drafter pass, ms", "verify_ms": "verification step, ms"}
    labels |= {"plain_step_ms": "plain step, ms"} if timed else {}
    rows = [[label, *(number(run["overall"][key], 1) for run in runs)] for key, label in labels.items()]
    return table(["", *(how(run["temperature"]) for run in runs)], rows)


def identity(group: Record) -> str | None:
    """How many greedy outputs equal those of plain decoding."""
    if "identical" not in group:
        return None
    line = "Greedy output identical to plain decoding: {prompts} of {compared}.".format(**group["identical"])
    if group["differences"]:
        widest = max(difference["margin"] for difference in group["differences"])
        line += f" Where they part, the target's two best logits are at most {number(widest)} apart."
    return line


def demo(record: Record) -> Record:
    """Of `examples/demo.py`: one column per prompt."""
    prompts = record["prompts"]
    settings = record["settings"]
    rows = [
        ["plain, tokens/s", *(number(p["plain_tokens_per_second"]["median"], 1) for p in prompts)],
        ["FlashMap, tokens/s", *(number(p["flashmap_tokens_per_second"]["median"], 1) for p in prompts)],
        ["speed-up, median (lowest to highest)", *(spread(p["speedup"]) for p in prompts)],
        ["tokens per target step", *(number(p["tokens_per_step"]) for p in prompts)],
        ["the same with prompt lookup", *(number(p["prompt_lookup_tokens_per_step"]) for p in prompts)],
        [
            "accepted up to the first, second, ... position",
            *(", ".join(map(percent, p["acceptance_by_position"])) or "-" for p in prompts),
        ],
        ["plain step, ms", *(number(p["plain_step_ms"], 0) for p in prompts)],
        ["verification step, ms", *(number(p["verify_step_ms"], 0) for p in prompts)],
        ["drafter pass, ms", *(number(p["drafter_ms"], 0) for p in prompts)],
        ["drafter pass, share of a plain step", *(percent(p["drafter_share"]) for p in prompts)],
        ["output identical to plain", *(same(p) for p in prompts)],
    ]
    slower = [p["name"] for p in prompts if p["speedup"]["median"] < 1.0]
    return {
        "where": where(record),
        "how": f"{record['target_dtype']}, {how(settings['temperature'])}, at most {settings['max_new_tokens']} new "
        f"tokens, median of {record['rounds']} rounds:",
        "table": table(["", *(p["name"] for p in prompts)], rows),
        "verdict": verdict(
            record["speedup"], f"mean speed-up over the prompts of the demo {number(record['speedup'])}x", slower
        ),
    }


def same(prompt: Record) -> str:
    if prompt["identical"] is None:
        return "not compared"
    if prompt["identical"]:
        return "yes"
    return f"no: margin {number(prompt['difference']['margin'])} between the target's two best logits"


def step_cost(record: Record) -> Record:
    """Of `flashmap_hf.evaluation.step_cost`: per dtype one row for torch's own products and one for the engine's."""
    counts = sorted({row["tokens"] for result in record["results"] for row in result["rows"]})
    rows = []
    for result in record["results"]:
        for key, label in (("plain_steps", ""), ("engine_plain_steps", ", in the engine")):
            cost = {row["tokens"]: row[key] for row in result["rows"] if key in row}
            if cost:
                rows.append([result["dtype"] + label, *(number(cost.get(count)) for count in counts)])
    head = ["dtype", *(f"{count} token{'s' if count > 1 else ''}" for count in counts)]
    return {"where": where(record), "table": table(head, rows)}


def training(record: Record) -> Record:
    """Of `flashmap train`."""
    rows = [
        [label, shown.format(record[key])] for key, (label, shown) in TRAINING.items() if record.get(key) is not None
    ]
    return {"where": where(record), "table": table(["", ""], rows)}


def benchmark(record: Record) -> Record:
    """Of `flashmap bench`: the sentences, and the short table of all methods."""
    lines, rows = bench_verdict.verdicts(record), bench_table.summary(record)
    return {"where": where(record), "lines": lines, "table": table(*rows)}


def metrics(records: dict[str, Record]) -> list[str]:
    """Names of what was measured through `generate`, for the front matter."""
    timed = {"benchmark.json", "demo.json"} & records.keys()
    evaluated = records.get("evaluate.json")
    if evaluated is None and not timed:
        return []
    speed = timed or (evaluated and "speedup" in evaluated["temperatures"][0]["overall"])
    return ["tokens_per_step", "acceptance_by_position", *(["speedup"] if speed else [])]


def sources(records: dict[str, Record]) -> str:
    """Which command, at which commit, wrote each file."""
    rows = []
    for name, record in records.items():
        source = record["provenance"]
        commit = source["commit"] or f"flashmap-hf {source['versions']['flashmap-hf']}"
        short = commit if " " in commit else commit[:12] + ("+" if commit.endswith("+") else "")
        rows.append([f"`{name}`", source["time"][:10], short, f"`{source['command']}`"])
    return table(["file", "date", "commit", "command"], rows) if rows else ""
