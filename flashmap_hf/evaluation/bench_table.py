"""`benchmark.json` as tables, each a head and rows of text, for a terminal and for Markdown alike."""

from collections.abc import Callable

from flashmap_hf.markdown import Record, how, number, percent, spread

Rows = tuple[list[str], list[list[str]]]  # the head of a table, its rows
PLAIN, FLASHMAP = "plain", "flashmap"  # names of methods
COLUMNS = {"plain": "plain", "eagle3": "EAGLE-3", "dflash": "DFlash", "flashmap": "FlashMap"}  # as published
NUMBERS: dict[str, Callable[[Record], str]] = {  # of one method: label -> cell
    "tokens per target step": lambda g: number(g["tokens_per_step"]),
    "draft, ms": lambda g: number(g["draft_ms"], 1),
    "verification, ms": lambda g: number(g["verify_ms"], 1),
    "between tokens, ms, p50": lambda g: number(g["token_gap_ms"]["p50"], 1),
    "p95": lambda g: number(g["token_gap_ms"]["p95"], 1),
    "tokens/s": lambda g: number(g["tokens_per_second"]["median"], 1),
    "speed-up, median (lowest to highest)": lambda g: "-" if g["speedup"] is None else spread(g["speedup"]),
}


def labels(record: Record) -> dict[str, str]:
    """Method -> how a reader knows it."""
    return {method["name"]: method["label"] for method in record["methods"]}


def results(record: Record, run: Record) -> Rows:
    """One row per method, over all prompts, at one temperature."""
    names = labels(record)
    rows = [
        [names[name], *(cell(groups["overall"]) for cell in NUMBERS.values())]
        for name, groups in run["methods"].items()
    ]
    return ["", *NUMBERS], rows


def summary(record: Record) -> Rows:
    """The short form: per method its tokens per step and speed-up at each temperature, and its greedy drift."""
    names, drift, runs = labels(record), record["drift"]["greedy"], record["temperatures"]
    head = [""]
    for run in runs:
        head += [f"tokens per target step, {how(run['temperature'])}", f"speed-up, {how(run['temperature'])}"]
    rows = []
    for name in runs[0]["methods"]:
        row = [names[name]]
        for run in runs:
            group = run["methods"][name]["overall"]
            row += [number(group["tokens_per_step"]), number((group["speedup"] or {}).get("median"))]
        found = drift.get(name)
        rows.append([*row, f"{found['differ']} of {found['compared']}" if found else "-"])
    return [*head, f"greedy outputs that differ, {record['dtype']}"], rows


def by_category(record: Record, run: Record, cell: Callable[[Record], float | None]) -> Rows:
    """One row per method, one column per category; the best of each column is bold."""
    names, methods = labels(record), run["methods"]
    categories = list(next(iter(methods.values()))["categories"])
    values = {
        name: [cell(groups["categories"][category]) for category in categories] for name, groups in methods.items()
    }
    best = [max((column[i] or 0.0 for column in values.values()), default=0.0) for i in range(len(categories))]
    rows = [
        [names[name], *(f"**{number(v)}**" if v and v == top else number(v) for v, top in zip(row, best, strict=True))]
        for name, row in values.items()
    ]
    return ["", *categories], rows


def speedup(group: Record) -> float | None:
    return group["speedup"]["median"] if group["speedup"] else None


def tokens_per_step(group: Record) -> float | None:
    value: float = group["tokens_per_step"]
    return value


def positions(record: Record, run: Record, rate: str) -> Rows:
    """Acceptance by position of every method that drafts. rate: `conditional` or `joint`."""
    names = labels(record)
    known = {name: groups["overall"]["positions"] for name, groups in run["methods"].items()}
    most = max((len(places) for places in known.values()), default=0)
    rows = [
        [names[name], *(percent(place[rate]) for place in places), *["-"] * (most - len(places))]
        for name, places in known.items()
        if places
    ]
    return ["", *(str(k + 1) for k in range(most))], rows


def memory(record: Record) -> Rows:
    """Bytes of each method beside the target, and of the target."""
    contexts = [str(state["context"]) for state in record["target_state_bytes"]]
    head = ["", "parameters", "weights, bytes", *(f"state at {c} positions" for c in contexts), "copied readout"]
    rows = []
    for method in record["methods"]:
        if not is_curve(method["name"]):
            states = [f"{state['bytes']:,}" for state in method["state_bytes"]]
            numbers = [f"{method[key]:,}" for key in ("parameters", "weight_bytes")]
            rows.append([method["label"], *numbers, *states, f"{method['readout_bytes']:,}"])
    own = [f"{state['bytes']:,}" for state in record["target_state_bytes"]]
    return head, [*rows, ["the target itself", "-", f"{record['target_weight_bytes']:,}", *own, "-"]]


def is_curve(name: str) -> bool:
    """Whether a method is a point of the curve over block sizes."""
    return name.startswith(f"{FLASHMAP}_k") and name.removeprefix(f"{FLASHMAP}_k").isdigit()


def k_curve(record: Record) -> Rows:
    """One row per block size; tokens per step and speed-up, then the speed-up of each category."""
    curve = record["k_curve"]
    categories = list(curve[0]["categories"]) if curve else []
    rows = [
        [
            str(point["block_size"]),
            number(point["tokens_per_step"]),
            number(point["tokens_per_second"]["median"], 1),
            number(speedup(point)),
            *(number(speedup(point["categories"][category])) for category in categories),
        ]
        for point in curve
    ]
    return ["K", "tokens per target step", "tokens/s", "speed-up", *categories], rows


def variants(record: Record) -> Rows:
    """FlashMap drafters of other shapes, the benchmark's own first; the last columns are tokens per target step."""
    methods, points = {m["name"]: m for m in record["methods"]}, record["variants"]
    keys = {
        "num_hidden_layers": "layers",
        "head": "head",
        "block_size": "K",
        "window": "window",
        "blocks": "blocks seen",
    }
    categories = list(points[0]["categories"]) if points else []
    rows = []
    for point in points:
        shape = methods[point["method"]]["drafter"]
        shown = [labels(record)[point["method"]], *("-" if shape[key] is None else str(shape[key]) for key in keys)]
        shown += [number(tokens_per_step(point)), number(speedup(point))]
        rows.append(shown + [number(tokens_per_step(point["categories"][category])) for category in categories])
    return ["", *keys.values(), "tokens per target step", "speed-up", *categories], rows


def against_baselines(record: Record) -> Rows:
    names = labels(record)
    rows = [
        [
            how(row["temperature"]),
            names[row.get("flashmap") or FLASHMAP],
            names[row["baseline"]],
            number(row["baseline_tokens_per_step"]),
            number(row["flashmap_tokens_per_step"]),
            number(row["ratio"]),
            number(row["parameter_ratio"]),
            "yes" if row["ahead"] else "**no**",
        ]
        for row in record["against_baselines"]
    ]
    head = [
        "",
        "",
        "baseline",
        "its tokens per target step",
        "FlashMap's",
        "ratio",
        "parameters, ratio",
        "FlashMap ahead",
    ]
    return head, rows


def suffix(record: Record) -> Rows:
    names = labels(record)
    rows = [
        [
            how(row["temperature"]),
            names[row["method"]],
            str(row["position"]),
            percent(row["first"]),
            percent(row["last"]),
            number(row["ratio"]),
        ]
        for row in record["suffix"]
    ]
    return ["", "", "last position", "accepted at the first", "at the last, given the earlier ones", "ratio"], rows


def cost_model(record: Record) -> Rows:
    names = labels(record)
    rows = [
        [
            how(run["temperature"]),
            names[row["method"]],
            *(number(row[key]) for key in ("tokens_per_step", "verify_ratio", "draft_ratio", "expected", "measured")),
            off(row),
            off(max(row["categories"], key=lambda group: abs(group["error"]), default=row)),
        ]
        for run in record["cost_model"]
        for row in run["methods"]
    ]
    head = ["", "", "tokens per step", "verification, in plain steps", "draft", "expected", "measured", "error"]
    return [*head, "error, worst category"], rows


def off(group: Record) -> str:
    """The error of the cost model; in bold beyond the goal."""
    return percent(group["error"]) if group["within_goal"] else f"**{percent(group['error'])}**"


def projections(record: Record, source: str) -> Rows:
    """source: `memory_bound` or `published`."""
    names = labels(record)
    rows = [
        [
            how(run["temperature"]),
            names[row["method"]],
            *(number(row[key]) for key in ("tokens_per_step", "verify_ratio", "draft_ratio", "expected")),
        ]
        for run in record["projections"]
        for row in run["methods"]
        if row["ratios_of"] == source
    ]
    return ["", "", "tokens per step, measured", "verification, assumed", "draft, assumed", "speed-up, PROJECTED"], rows


def claims(record: Record) -> Rows:
    """The published table; beside each claimed number the one measured here."""
    head = [""]
    for label in COLUMNS.values():
        head += [f"{label}, claimed", "ours"]
    rows = []
    for row in record["claims"]["rows"]:
        shown = percent if row["key"].startswith(("acceptance", "joint")) else whole_or_number
        pairs = ((row["claimed"][column], row["measured"][column]) for column in COLUMNS)
        rows.append([row["measure"], *(shown(value) for pair in pairs for value in pair)])
    return head, rows


def whole_or_number(value: int | float | None) -> str:
    """Counts as they are."""
    return str(value) if isinstance(value, int) else number(value)


def greedy_drift(groups: dict[str, Record], names: dict[str, str]) -> Rows:
    """Of outputs that part: the margin between the target's two best logits, and what both outputs are worth."""
    rows = [
        [
            names[name],
            f"{group['differ']} of {group['compared']}",
            "-" if group["margin"] is None else spread(group["margin"]),
            number(group["reference_log_probability"], 3),
            number(group["log_probability"], 3),
        ]
        for name, group in groups.items()
    ]
    head = ["", "outputs that differ", "margin there, median (lowest to highest)"]
    return [*head, "log-probability per token, reference", "of the other output"], rows


def sampled_drift(test: Record, names: dict[str, str]) -> Rows:
    rows = [
        [
            names[name],
            f"{group['tokens']:,}",
            number(group["statistic"], 3),
            number(group["p_value"], 3),
            number(group["p_uniform"], 3),
        ]
        for name, group in test["methods"].items()
    ]
    return ["", "tokens", "distance from plain's", "p, same law as plain's", "p, the target's exact law"], rows
