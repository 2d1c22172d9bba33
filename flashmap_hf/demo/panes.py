"""What the page shows, as HTML. Whatever a model or a visitor wrote goes through `escape`."""

import html

from flashmap_hf.demo.figures import Figures, SideFigures, sameness, verdict
from flashmap_hf.demo.job import Job
from flashmap_hf.demo.pieces import Pieces
from flashmap_hf.demo.race import Side

COLOURS = 8  # positions beyond share the last one
# What a template engine on the way to the page might look at, beside what HTML does.
TEMPLATE_SIGNS = {ord(sign): f"&#{ord(sign)};" for sign in "${}`"}
# Characters that a browser drops or acts upon are shown by their pictures.
CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "\u2421"}
DASH = "–"


def escape(text: str) -> str:
    """Text that a browser shows as it is, in an element or an attribute."""
    return html.escape(text.translate(CONTROLS)).translate(TEMPLATE_SIGNS)


# --- the two texts --------------------------------------------------------------------------------------------------


class Transcript:
    """The HTML of one side's text; it only ever grows at its end, so that only the new end travels."""

    def __init__(self, side: Side, pieces: Pieces, coloured: bool):
        self.side, self.pieces, self.coloured = side, pieces, coloured
        self.steps = self.tokens = 0
        self.closed = False
        self.html = ""

    def update(self) -> str:
        """With what has come since the last call."""
        finished = self.side.finished  # read first: what is committed by then is all there will be
        for commit in list(self.side.commits)[self.steps :]:
            self.steps += 1
            for place, text in enumerate(self.pieces.add(commit.tokens)):
                self.tokens += 1
                self.html += self._token(text, place + 1 if place < commit.accepted else 0)
        if finished and not self.closed:
            self.html += self._token(self.pieces.rest(), 0)
            self.closed = True
        return self.html

    def _token(self, text: str, position: int) -> str:
        """position: in its block, from 1; 0: the target's own token."""
        if not text:
            return ""
        if not self.coloured:
            return escape(text)
        look, title = "fm-own", "the target's own"
        if position:
            look, title = f'{colour(position)}" data-k="{position}', f"draft, position {position}, accepted"
        return f'<span class="fm-t {look}" title="Token {self.tokens}: {title}">{escape(text)}</span>'


def colour(position: int) -> str:
    """The class of a draft at `position`, from 1."""
    return f"fm-k{min(position, COLOURS)}"


def legend() -> str:
    """Which look means what, in words; n-grams and trees may draft further than a block of the drafter."""
    drafts = "".join(
        f'<li><span class="fm-t {colour(k)}">{k}</span><span class="fm-sr"> accepted draft, position {k}</span></li>'
        for k in range(1, COLOURS + 1)
    )
    return (
        '<ul class="fm-legend" aria-label="Legend of the FlashMap pane">'
        f'<li class="fm-lead">Accepted draft, by position in its block:</li>{drafts}<li>and later</li>'
        '<li><span class="fm-t fm-own">word</span> the target\'s own token (dotted line)</li></ul>'
    )


def pane_head(name: str, what: str, found: SideFigures | None, limit: int) -> str:
    """Title of a pane, with its speed and how far it is."""
    tokens = found.tokens if found else 0
    share = min(100 * tokens / max(limit, 1), 100)
    speed = number(found.tokens_per_second if found else None, 1)
    progress = f'<span class="fm-count">{tokens} of {limit}</span>' if found else ""
    return (
        f'<div class="fm-pane-head"><h2>{name} <small>{what}</small></h2>'
        f"<p><b>{speed}</b> tokens/s{progress}</p></div>"
        f'<div class="fm-bar" aria-hidden="true"><i style="width:{share:.1f}%"></i></div>'
    )


# --- numbers --------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def scoreboard(job: Job | None, found: Figures | None) -> str:
    """The live numbers; dashes before there are any."""
    same, why = sameness(job, found) if job and found and found.compared else (DASH, "Compared token by token.")
    mark = {"identical": "fm-good", "differ": "fm-bad"}.get(same, "")
    sign = {"identical": "✓ ", "differ": "✗ "}.get(same, "")
    speedup = found.speedup if found else None
    race, word = "", "FlashMap / plain"
    if speedup is not None and speedup != 1.0:
        race, word = ("fm-good", "faster") if speedup > 1.0 else ("fm-bad", "slower here")
    plain_step = number(found.plain.step_ms if found else None, 0)
    cards = [
        card("Speed-up", f"{number(speedup, 2)}{'' if speedup is None else '×'}", word, race),
        card("Plain", number(found.plain.tokens_per_second if found else None, 1), f"tokens/s, {plain_step} ms a step"),
        card("FlashMap", number(found.flashmap.tokens_per_second if found else None, 1), "tokens/s"),
        card("Tokens per step", number(found.tokens_per_step if found else None, 2), "plain: 1.00"),
        card("Drafter", number(found.drafter_ms if found else None, 0), "ms a block"),
        card("Target", number(found.target_ms if found else None, 0), "ms to check a block"),
        card("Outputs", sign + same, why, mark),
    ]
    return f'<dl class="fm-board">{"".join(cards)}</dl>'


def card(name: str, value: str, note: str, mark: str = "") -> str:
    return f'<div class="fm-card {mark}"><dt>{name}</dt><dd><b>{value}</b><span>{escape(note)}</span></dd></div>'


# --- what is going on -----------------------------------------------------------------------------------------------


def status(job: Job | None, found: Figures | None) -> str:
    """One line: what is going on, what came out, or what went wrong."""
    if job is None:
        return message("Choose an example or write a prompt, then press Run.")
    if job.complaint is not None:
        return complaint(job.complaint)
    if job.phase == "done":
        return outcome(job, found)
    if job.stop.is_set():
        return message("Stopping at the next step …", busy=True)
    words = {
        "waiting": f"Waiting: {job.ahead} before you on this device.",
        "loading": "Loading the two models …",
        "warming": "Warming up both sides …",
        "racing": "Racing: both sides take turns on one device.",
        "checking": "Comparing the outputs …",
    }
    return message(words[job.phase], busy=True)


def outcome(job: Job, found: Figures | None) -> str:
    if found is None:
        return message("Stopped before the race began.")
    parts = [f"Stopped after {found.plain.tokens} and {found.flashmap.tokens} tokens."] if job.stopped else []
    parts.append(verdict(found))
    if job.race and job.race.flashmap.stats.plain_calls:
        parts.append("The drafter could not help in this run: its side decoded plainly.")
    if job.pair and job.pair.template_differs:
        parts.append("The drafter was trained with another chat template: expect a lower acceptance.")
    slow = found.speedup is not None and found.speedup < 1.0
    return message(" ".join(parts), "fm-slow" if slow else "fm-fast")


def message(text: str, mark: str = "", busy: bool = False) -> str:
    spin = '<i class="fm-spin" aria-hidden="true"></i>' if busy else ""
    return f'<p class="fm-status {mark}" role="status">{spin}<span>{escape(text)}</span></p>'


def complaint(text: str) -> str:
    return f'<p class="fm-status fm-error" role="alert"><b>Not possible.</b> <span>{escape(text)}</span></p>'
