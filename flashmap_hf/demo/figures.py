"""The numbers of a race so far, and the sentences that say honestly what they mean."""

from dataclasses import dataclass

from flashmap_hf.compare import Difference
from flashmap_hf.demo.job import Job
from flashmap_hf.demo.race import Commit, Race, Side


@dataclass(frozen=True)
class SideFigures:
    """tokens_per_second: of the side's own share of the device, prefill included; None before the first step."""

    tokens: int
    seconds: float
    tokens_per_second: float | None
    step_ms: float | None  # of the steps after the prefill


@dataclass(frozen=True)
class Figures:
    """Of both sides. None: there is nothing to divide by yet."""

    plain: SideFigures
    flashmap: SideFigures
    speedup: float | None  # to two digits: what rounds to 1 is no difference
    tokens_per_step: float | None  # plain decoding has exactly 1
    drafter_ms: float | None  # per block
    target_ms: float | None  # per verification
    step_cost: float | None  # of a step after the prefill, drafter included, in plain steps
    step_yield: float | None  # tokens of such a step
    accepted: int
    identical: int  # tokens from the start that are the same on both sides
    compared: int  # tokens that both sides have written


def figures(race: Race) -> Figures:
    """Of a race that may still run: the two lists grow meanwhile, so each is read once."""
    plain_commits, commits = list(race.plain.commits), list(race.flashmap.commits)
    plain, flashmap = side_figures(plain_commits), side_figures(commits)
    steps = len(commits)
    last = commits[-1] if commits else None
    drafter_ms = 1e3 * last.seconds_drafter / last.blocks if last and last.blocks else None
    target_ms = 1e3 * last.seconds_target / (steps - 1) if last and steps > 1 else None
    rates = flashmap.tokens_per_second, plain.tokens_per_second
    started = flashmap.step_ms and plain.step_ms  # two prefills alone compare nothing
    tokens = [[token for commit in side for token in commit.tokens] for side in (plain_commits, commits)]
    compared = min(map(len, tokens))
    identical = next((i for i in range(compared) if tokens[0][i] != tokens[1][i]), compared)
    return Figures(
        plain=plain,
        flashmap=flashmap,
        speedup=round(rates[0] / rates[1], 2) if started and rates[0] and rates[1] else None,
        tokens_per_step=flashmap.tokens / steps if steps else None,
        drafter_ms=drafter_ms,
        target_ms=target_ms,
        step_cost=flashmap.step_ms / plain.step_ms if flashmap.step_ms and plain.step_ms else None,
        step_yield=(flashmap.tokens - len(commits[0].tokens)) / (steps - 1) if steps > 1 else None,
        accepted=sum(commit.accepted for commit in commits),
        identical=identical,
        compared=compared,
    )


def side_figures(commits: list[Commit]) -> SideFigures:
    tokens = sum(len(commit.tokens) for commit in commits)
    seconds = commits[-1].seconds if commits else 0.0
    later = len(commits) - 1
    return SideFigures(
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else None,
        step_ms=1e3 * (seconds - commits[0].seconds) / later if later > 0 else None,
    )


def acceptance(side: Side) -> list[tuple[int, int]]:
    """Per position: blocks accepted up to it, blocks that reached it."""
    return list(zip(side.stats.accepted_by_position, side.stats.drafted_by_position, strict=True))


# --- sentences ------------------------------------------------------------------------------------------------------


def verdict(found: Figures) -> str:
    """Who is faster, by how much, and why."""
    if found.speedup is None:
        return "Too few tokens to compare the two."
    if found.speedup == 1.0:
        text = "The two are equally fast here."
    elif found.speedup > 1.0:
        text = f"FlashMap is {found.speedup:.2f} times as fast as plain decoding here."
    else:
        text = f"FlashMap is slower here: {found.speedup:.2f} times the speed of plain decoding."
    if found.step_cost is None or found.step_yield is None:
        return text
    return (
        f"{text} A FlashMap step costs {found.step_cost:.2f} plain steps and yields {found.step_yield:.2f} tokens; "
        "it pays where it yields more than it costs."
    )


def sameness(job: Job, found: Figures) -> tuple[str, str]:
    """Whether the outputs are the same: a word or two, and a sentence."""
    if job.controls.temperature > 0.0:
        return "by law", "Sampled texts differ from call to call; both sides draw from the target's own law."
    dtype = str(job.pair.target.dtype).removeprefix("torch.") if job.pair else ""
    if found.identical == found.compared and job.difference is None:
        running = "" if job.phase == "done" and not job.stopped else " so far"
        return "identical", f"The first {found.compared} tokens are the same on both sides{running}, in {dtype}."
    return "differ", f"The outputs part at token {found.identical + 1}. {cause(job.difference, dtype)}"


def cause(difference: Difference | None, dtype: str) -> str:
    """Why two greedy outputs part; known once both are there."""
    if difference is None:
        return f"Both are in {dtype}; the reason is looked up after the run."
    margin = f"There the target's two best tokens are {difference.margin:.2g} apart"
    if dtype == "float32":
        return f"{margin}, in float32: where that is not a tie, please report it."
    return f"{margin}: in {dtype}, checking several tokens at once rounds differently from checking one."
