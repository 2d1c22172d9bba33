"""What all visitors share, and how a race reaches the browser tab that asked for it."""

from collections.abc import Iterator
from typing import Any

import gradio as gr

from flashmap_hf import FlashMapConfig, drafters, targets
from flashmap_hf.demo import charts, panes
from flashmap_hf.demo.controls import Controls
from flashmap_hf.demo.device_panel import panel
from flashmap_hf.demo.figures import figures
from flashmap_hf.demo.job import Job, Line
from flashmap_hf.demo.panes import Transcript
from flashmap_hf.demo.pieces import Pieces
from flashmap_hf.demo.race import Race
from flashmap_hf.demo.shelf import Shelf
from flashmap_hf.devices import choose_dtype, default_device
from flashmap_hf.generation_config import Verification

BLOCK_SIZE = 4  # where the drafter's own cannot be read
OWN, EULER, MIDPOINT = "as trained", "one Euler step", "midpoint (two steps)"
STEPS = {OWN: None, EULER: 1, MIDPOINT: 2}


class Theatre:
    """What all visitors share: the models that are loaded and the line for the device. A race belongs to one tab."""

    def __init__(self, target: str = "", drafter: str = "", dtype: str = "auto"):
        self.target, self.drafter, self.dtype_asked = target, drafter, dtype != "auto"
        device = default_device()
        self.shelf = Shelf(choose_dtype(dtype, device), device)
        self.line = Line()
        self.jobs: dict[str | None, Job] = {}

    def block_size(self) -> int:
        """K of the drafter that the page opens with."""
        try:
            return int(
                FlashMapConfig.from_pretrained(self.drafter or drafters.default_drafter(self.target_name)).block_size
            )
        except (ValueError, OSError):
            return BLOCK_SIZE

    @property
    def target_name(self) -> str:
        return self.target or targets.SMOLLM2.name

    def run(self, *values: Any, request: gr.Request) -> Iterator[tuple[Any, ...]]:
        """Follow one race; yields what the page shows."""
        self.stop(request)
        try:
            job = Job(controls(*values), self.shelf, self.line)
        except ValueError as error:
            yield refused(str(error))
            return
        self.jobs[request.session_hash] = job
        try:
            screen = Screen(job)
            for _ in job.watch():
                yield screen.look()
        finally:
            if self.jobs.get(request.session_hash) is job:
                del self.jobs[request.session_hash]

    def stop(self, request: gr.Request) -> None:
        """End the race of this tab, if there is one."""
        if job := self.jobs.get(request.session_hash):
            job.stop.set()

    def device(self, *values: Any) -> str:
        """The panel for what is chosen now; an unusable choice is what it says."""
        try:
            return panel(controls("any prompt", *values[1:]), self.shelf, self.dtype_asked)
        except ValueError as error:
            return panes.complaint(str(error))


def controls(
    prompt: str | None,
    target: str | None,
    drafter: str | None,
    block_size: float | None,
    steps: str | None,
    temperature: float | None,
    verification: Verification,
    adaptive: bool,
    tree: bool,
    max_new_tokens: float | None,
    seed: float | None,
) -> Controls:
    """From what the widgets hold; a field that was emptied counts as untouched."""
    default = Controls("any prompt")
    return Controls(
        prompt=prompt or "",
        target=target or "",
        drafter=drafter or "",
        block_size=int(block_size) if block_size is not None else None,
        num_steps=STEPS[steps or OWN],
        temperature=float(temperature or 0.0),
        verification=verification,
        tree=bool(tree),
        adaptive=bool(adaptive),
        max_new_tokens=int(max_new_tokens) if max_new_tokens is not None else default.max_new_tokens,
        seed=int(seed or 0),
    )


class Screen:
    """One race as the page shows it: status, numbers, two heads and two texts, the charts, the two buttons."""

    def __init__(self, job: Job):
        self.job = job
        self.transcripts: tuple[Transcript, Transcript] | None = None

    def look(self) -> tuple[Any, ...]:
        job, race = self.job, self.job.race
        if race is None or job.pair is None:
            return shown(job, None, "", "", "")
        if self.transcripts is None:
            tokenizer = job.pair.tokenizer
            self.transcripts = (
                Transcript(race.plain, Pieces(tokenizer), coloured=False),
                Transcript(race.flashmap, Pieces(tokenizer), coloured=True),
            )
        plain, flashmap = (transcript.update() for transcript in self.transcripts)
        return shown(job, race, plain, flashmap, charts.report(race) if job.phase == "done" else "")


def shown(job: Job | None, race: Race | None, plain: str, flashmap: str, report: str) -> tuple[Any, ...]:
    found = figures(race) if race else None
    limit = job.controls.max_new_tokens if job else 0
    busy = job is not None and job.phase != "done"
    return (
        panes.status(job, found),
        panes.scoreboard(job, found),
        panes.pane_head("Plain", "one token per step", found.plain if found else None, limit),
        plain,
        panes.pane_head("FlashMap", "up to a block per step", found.flashmap if found else None, limit),
        flashmap,
        report,
        gr.update(value="Racing …" if busy else "Run"),
        gr.update(variant="stop" if busy else "secondary"),
    )


def refused(reason: str) -> tuple[Any, ...]:
    """The empty page with one sentence."""
    nothing = shown(None, None, "", "", "")
    return (panes.complaint(reason[:1].upper() + reason[1:]), *nothing[1:])
