"""`benchmark.json` as pictures, PNG and SVG; the same record gives the same bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from flashmap_hf.evaluation import bench_table
from flashmap_hf.evaluation.acceptance_plot import COLOURS, MARKERS, STYLE
from flashmap_hf.evaluation.bench_table import FLASHMAP, PLAIN
from flashmap_hf.markdown import Record, how

FORMATS = (".png", ".svg")
LINES = ("-", "--", ":")


def plot(record: Record, folder: Path) -> None:
    """Write `benchmark_<name>.png` and `.svg` for each of `PICTURES` that the record has numbers for."""
    with matplotlib.rc_context(STYLE):
        for name, (draw, wanted) in PICTURES.items():
            if wanted(record):
                figure = draw(record)
                where = f"{record['drafter']} for {record['target']}: {record['dtype']} on {record['device']}"
                figure.suptitle(f"{where}, at most {record['options']['max_new_tokens']} new tokens")
                for ending in FORMATS:
                    aside = folder / f"benchmark_{name}.tmp{ending}"
                    figure.savefig(aside, dpi=150, metadata={"Date": None} if ending == ".svg" else None)
                    aside.replace(folder / f"benchmark_{name}{ending}")


def styles(record: Record) -> dict[str, dict[str, Any]]:
    """Method -> its colour, marker, line and label, the same in every picture."""
    names = [m["name"] for m in record["methods"] if not bench_table.is_curve(m["name"])]
    labels = bench_table.labels(record)
    return {
        name: {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[(i + i // len(COLOURS)) % len(MARKERS)],  # another one when the colours begin again
            "linestyle": LINES[i // len(COLOURS) % len(LINES)],
            "label": labels[name],
        }
        for i, name in enumerate(names)
    }


def per_temperature(record: Record, height: float) -> tuple[Figure, list[tuple[Axes, Record]]]:
    """One axes beside the other for each temperature, with what was measured there."""
    runs = record["temperatures"]
    figure = Figure(figsize=(5.2 * len(runs) + 0.6, height), layout="constrained")
    panels = list(zip(figure.subplots(1, len(runs), squeeze=False)[0], runs, strict=True))
    for axes, run in panels:
        axes.set_title(how(run["temperature"]))
    return figure, panels


def legend(figure: Figure) -> Figure:
    """Below all axes, which show the same methods."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_positions(record: Record) -> Figure:
    """Acceptance by position, given the earlier ones; one line per method that drafts."""
    look = styles(record)
    figure, panels = per_temperature(record, 4.4)
    for axes, run in panels:
        for name, groups in run["methods"].items():
            known = [p for p in groups["overall"]["positions"] if p["conditional"] is not None]
            if known:
                places = [p["position"] for p in known]
                axes.plot(places, [p["conditional"] for p in known], markersize=4, clip_on=False, **look[name])
        axes.set(xlabel="position in the block", ylabel="accepted, given the earlier ones", ylim=(0, 1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        axes.grid(axis="y", alpha=0.3)
    return legend(figure)


def draw_speedup(record: Record) -> Figure:
    """Speed-up by category: one point per method, all prompts in the last row."""
    look = styles(record)
    rows = len(next(iter(record["temperatures"][0]["methods"].values()))["categories"]) + 1
    figure, panels = per_temperature(record, 2.0 + 0.36 * rows)
    for axes, run in panels:
        names: list[str] = []
        for name, groups in run["methods"].items():
            parts = groups["categories"] | {"all": groups["overall"]}
            names = list(parts)
            if name == PLAIN:  # the dashed line
                continue
            known = [(y, value) for y, part in enumerate(parts.values()) if (value := bench_table.speedup(part))]
            style = look[name] | {"linestyle": ""}
            axes.plot([value for _, value in known], [y for y, _ in known], alpha=0.85, **style)
        axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
        axes.set(xlabel="speed-up against plain decoding, median", yticks=range(len(names)), yticklabels=names)
        axes.grid(axis="y", alpha=0.3)
        axes.invert_yaxis()
    return legend(figure)


def draw_times(record: Record) -> Figure:
    """Where a step's time goes: drafting and the target's forward, medians over the steps."""
    labels = bench_table.labels(record)
    parts = {"draft": "draft_ms", "verification": "verify_ms"}
    figure, panels = per_temperature(record, 1.6 + 0.32 * len(record["temperatures"][0]["methods"]))
    for axes, run in panels:
        groups = {name: g["overall"] for name, g in run["methods"].items() if g["overall"]["verify_ms"] is not None}
        left = [0.0] * len(groups)
        for colour, (label, key) in zip(COLOURS, parts.items(), strict=False):
            widths = [group[key] for group in groups.values()]
            axes.barh(range(len(groups)), widths, left=left, color=colour, label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set(xlabel="ms per step", yticks=range(len(groups)), yticklabels=[labels[name] for name in groups])
        axes.invert_yaxis()
    return legend(figure)


def draw_k(record: Record) -> Figure:
    """Speed against the block size: tokens per second over all prompts, speed-up by category."""
    curve = record["k_curve"]
    sizes = [point["block_size"] for point in curve]
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(sizes, [point["tokens_per_second"]["median"] for point in curve], color=COLOURS[0], marker="o")
    plain = record["temperatures"][0]["methods"][PLAIN]["overall"]["tokens_per_second"]["median"]
    left.axhline(plain, color="black", linestyle="--", linewidth=1, label="plain")
    left.set(xlabel="block size K", ylabel="tokens/s, median", ylim=(0, None))
    left.legend(frameon=False)
    for i, category in enumerate(curve[0]["categories"]):
        points = [bench_table.speedup(point["categories"][category]) for point in curve]
        style = {"marker": MARKERS[i % len(MARKERS)], "linestyle": LINES[i // len(COLOURS) % len(LINES)]}
        right.plot(sizes, points, color=COLOURS[i % len(COLOURS)], markersize=4, label=category, **style)
    right.axhline(1.0, color="black", linestyle="--", linewidth=1)
    right.set(xlabel="block size K", ylabel="speed-up, median")
    right.legend(frameon=False, fontsize=7, ncols=2)
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def drafts(record: Record) -> bool:
    return any(FLASHMAP in run["methods"] for run in record["temperatures"])


# name -> how it is drawn, whether the record has the numbers
PICTURES: dict[str, tuple[Callable[[Record], Figure], Callable[[Record], bool]]] = {
    "positions": (draw_positions, drafts),
    "speedup": (draw_speedup, drafts),
    "times": (draw_times, drafts),
    "k": (draw_k, lambda record: len(record["k_curve"]) > 0),
}
