"""After a race: acceptance by position as bars in a table, the timeline as an SVG; drawn here, so both work offline."""

from flashmap_hf.demo.figures import acceptance
from flashmap_hf.demo.panes import colour
from flashmap_hf.demo.race import Commit, Race, Side

WIDTH, HEIGHT = 520, 310  # of the drawing's own units; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 14, 34
LANE, GAP = 13, 20  # a row of steps under the curves, and the words above it


def report(race: Race) -> str:
    """Both charts; empty where no step was made."""
    if not race.flashmap.commits or not race.plain.commits:
        return ""
    return f'<div class="fm-report">{acceptance_chart(race.flashmap)}{timeline(race)}</div>'


def acceptance_chart(side: Side) -> str:
    """How often a block was accepted up to each position."""
    rows = "".join(bar(k, *counts) for k, counts in enumerate(acceptance(side), start=1))
    if not rows:
        return '<section class="fm-chart"><h3>Acceptance by position</h3><p>No block was drafted.</p></section>'
    return (
        '<section class="fm-chart"><h3>Acceptance by position</h3>'
        '<p class="fm-note">Of the blocks that reached a position, those accepted up to it.</p>'
        '<table class="fm-bars"><thead class="fm-sr"><tr><th>Position</th><th>Share</th><th>Blocks</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></section>"
    )


def bar(position: int, accepted: int, reached: int) -> str:
    share = 100 * accepted / reached
    return (
        f'<tr class="{colour(position)}"><th scope="row">{position}</th>'
        f'<td class="fm-track"><i style="width:{share:.1f}%"></i></td>'
        f"<td>{share:.0f} % <small>{accepted} of {reached}</small></td></tr>"
    )


# --- timeline -------------------------------------------------------------------------------------------------------


def timeline(race: Race) -> str:
    """Tokens over each side's own seconds on the device, and its steps beneath."""
    plain, flashmap = list(race.plain.commits), list(race.flashmap.commits)
    seconds = max(plain[-1].seconds, flashmap[-1].seconds)
    tokens = max(count(plain), count(flashmap))
    floor = HEIGHT - BOTTOM - 2 * (LANE + GAP)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / seconds

    def y(value: float) -> float:
        return floor - (floor - TOP) * value / tokens

    def curve(commits: list[Commit]) -> str:
        path, total = f"M{x(0):.1f} {y(0):.1f}", 0
        for commit in commits:
            total += len(commit.tokens)
            path += f"H{x(commit.seconds):.1f}V{y(total):.1f}"
        return path

    def lane(commits: list[Commit], top: float, name: str) -> str:
        starts = [0.0, *(commit.seconds for commit in commits)]
        cells = "".join(
            f'<rect class="fm-step {look(commit)}" x="{x(start):.1f}" y="{top:.0f}" height="{LANE}" '
            f'width="{max(x(commit.seconds) - x(start) - 0.6, 0.6):.1f}">'
            f"<title>{name}: {len(commit.tokens)} token(s), {1e3 * (commit.seconds - start):.0f} ms</title></rect>"
            for start, commit in zip(starts, commits, strict=False)
        )
        return f'<text class="fm-label" x="{LEFT}" y="{top - 4:.0f}">{name}, step by step</text>{cells}'

    grid = "".join(
        f'<path class="fm-grid" d="M{LEFT} {y(t):.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="fm-tick" text-anchor="end" x="{LEFT - 6}" y="{y(t) + 4:.1f}">{t:g}</text>'
        for t in ticks(tokens)
    ) + "".join(
        f'<text class="fm-tick" text-anchor="middle" x="{x(t):.1f}" y="{HEIGHT - BOTTOM + 15}">{t:g}</text>'
        for t in ticks(seconds)
    )
    words = (
        f"Plain: {count(plain)} tokens in {plain[-1].seconds:.1f} s and {len(plain)} steps. "
        f"FlashMap: {count(flashmap)} tokens in {flashmap[-1].seconds:.1f} s and {len(flashmap)} steps."
    )
    return (
        '<section class="fm-chart"><h3>Timeline</h3>'
        '<p class="fm-note">Tokens over seconds of the device, each side on its own clock. In the FlashMap row a step '
        "has the colour of the last position accepted.</p>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">{grid}'
        f'<path class="fm-curve fm-plain" d="{curve(plain)}"/><path class="fm-curve fm-flash" d="{curve(flashmap)}"/>'
        f"{lane(plain, floor + GAP, 'Plain')}{lane(flashmap, floor + LANE + 2 * GAP, 'FlashMap')}"
        f'<text class="fm-tick" text-anchor="end" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}">seconds</text></svg>'
        '<p class="fm-keys"><span class="fm-key fm-flash">FlashMap (solid)</span> '
        f'<span class="fm-key fm-plain">plain (dashed)</span></p><p class="fm-sr">{words}</p></section>'
    )


def look(commit: Commit) -> str:
    return colour(commit.accepted) if commit.accepted else "fm-none"


def count(commits: list[Commit]) -> int:
    return sum(len(commit.tokens) for commit in commits)


def ticks(largest: float, most: int = 5) -> list[float]:
    """Round numbers from 0 up to `largest`, at most `most` steps apart."""
    for exponent in range(-4, 7):
        for digit in (1, 2, 5):
            step = digit * 10.0**exponent
            if largest / step <= most:
                return [i * step for i in range(int(largest / step + 1e-9) + 1)]
    return [0.0]
