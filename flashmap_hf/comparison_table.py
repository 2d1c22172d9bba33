"""A comparison on a terminal: the warm-up's text as it comes, then the table."""

from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase, TextStreamer

from flashmap_hf.compare import Comparison, Difference, PromptComparison, Show, Spread


def show_text(tokenizer: PreTrainedTokenizerBase) -> Show:
    """For `compare(show=...)`: print each warm-up under a heading."""

    def show(name: str, side: str) -> TextStreamer:
        print(f"\n--- {name}, {side} ---", flush=True)
        return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    return show


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """The table with one column per prompt, and the verdict under it."""
    console = console or Console()
    console.print()
    console.print(comparison_table(comparison))
    console.print(comparison.verdict(), markup=False)


def comparison_table(comparison: Comparison) -> Table:
    """One column per prompt, one row per number; three prompts fit into 80 columns."""
    how = "greedy" if comparison.settings.temperature == 0.0 else f"temperature {comparison.settings.temperature:g}"
    table = Table(
        title=f"{comparison.target}, {comparison.target_dtype} on {comparison.device}, {how}",
        caption=f"Median (lowest-highest) of {comparison.rounds} interleaved rounds. Accepted: the share of "
        "blocks that kept their first 1, 2, ... tokens. Step: one forward of the target.",
        box=box.SIMPLE,
    )
    table.add_column("", no_wrap=True)  # long numbers wrap, labels do not
    for prompt in comparison.prompts:
        table.add_column(prompt.name)
    for label, cell in ROWS.items():
        table.add_row(label, *(cell(prompt) for prompt in comparison.prompts))
    if any(prompt.difference for prompt in comparison.prompts):
        table.add_row("margin there", *(margin(prompt.difference) for prompt in comparison.prompts))
    return table


def spread(value: Spread, digits: int = 1) -> str:
    """median (lowest-highest); large numbers without decimals."""
    digits = 0 if value.highest >= 1000 else digits
    return f"{value.median:.{digits}f} ({value.lowest:.{digits}f}-{value.highest:.{digits}f})"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def identity(identical: bool | None, difference: Difference | None) -> str:
    """ "yes", or the new token, counted from 1, at which the outputs part."""
    if difference is not None:
        return f"no, token {difference.position + 1}"
    return "not compared" if identical is None else "yes"


def margin(difference: Difference | None) -> str:
    """Between the target's two best logits: how near it was to deciding otherwise."""
    return "" if difference is None else f"{difference.margin:.2g}"


ROWS: dict[str, Callable[[PromptComparison], str]] = {
    "new tokens": lambda p: f"{p.flashmap_new_tokens}",
    "plain, tokens/s": lambda p: spread(p.plain_tokens_per_second),
    "FlashMap, tokens/s": lambda p: spread(p.flashmap_tokens_per_second),
    "speed-up": lambda p: spread(p.speedup, 2),
    "tokens/target step": lambda p: number(p.tokens_per_step),
    "  by prompt lookup": lambda p: number(p.prompt_lookup_tokens_per_step),
    "accepted, %": lambda p: " ".join(f"{100 * rate:.0f}" for rate in p.acceptance_by_position) or "-",
    "plain step, ms": lambda p: number(p.plain_step_ms, 1),
    "verify step, ms": lambda p: number(p.verify_step_ms, 1),
    "drafter pass, ms": lambda p: number(p.drafter_ms, 1),
    "  of a plain step": lambda p: share(p.drafter_share),
    "identical": lambda p: identity(p.identical, p.difference),
}
