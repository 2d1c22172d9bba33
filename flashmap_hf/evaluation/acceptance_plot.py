"""`evaluate.json` as a picture: acceptance by position, and tokens per step by category."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from flashmap_hf.markdown import how

FILES = ("evaluate.png", "evaluate.svg")
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # Okabe and Ito: told apart by all eyes
MARKERS = "os^Dv*"
STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "flashmap"}


def plot(record: dict[str, Any], folder: Path) -> None:
    """Write `FILES` into `folder`; the same record gives the same bytes."""
    rows = len(record["temperatures"][0]["categories"]) + 1
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, max(3.2, 0.9 + 0.3 * rows)), layout="constrained")
        left, right = figure.subplots(1, 2)
        plot_positions(left, record["temperatures"])
        plot_categories(right, record["temperatures"])
        dtype, device, new = record["target_dtype"], record["device"], record["options"]["max_new_tokens"]
        figure.suptitle(f"{record['drafter']} for {record['target']}: {dtype} on {device}, at most {new} new tokens")
        for name in FILES:
            aside = folder / f"{Path(name).stem}.tmp{Path(name).suffix}"
            figure.savefig(aside, dpi=150, metadata={"Date": None} if name.endswith(".svg") else None)
            aside.replace(folder / name)


def plot_positions(axes: Axes, runs: list[dict[str, Any]]) -> None:
    """One line per temperature."""
    for run, colour, marker in zip(runs, COLOURS, MARKERS, strict=False):
        known = [p for p in run["overall"]["positions"] if p["conditional"] is not None]
        axes.plot(
            [p["position"] for p in known],
            [p["conditional"] for p in known],
            color=colour,
            marker=marker,
            label=how(run["temperature"]),
            clip_on=False,
        )
    axes.set(title="accepted, given that the earlier ones were", xlabel="position in the block", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)


def plot_categories(axes: Axes, runs: list[dict[str, Any]]) -> None:
    """One group of bars per category, all prompts last; plain decoding has one token per step."""
    names = [*runs[0]["categories"], "all"]
    height = 0.8 / len(runs)
    for i, (run, colour) in enumerate(zip(runs, COLOURS, strict=False)):
        groups = [*run["categories"].values(), run["overall"]]
        places = [place + (i - (len(runs) - 1) / 2) * height for place in range(len(names))]
        bars = axes.barh(places, [group["tokens_per_step"] for group in groups], height, color=colour)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set(title="tokens per target step (dashed: plain decoding)", yticks=range(len(names)), yticklabels=names)
    axes.invert_yaxis()
