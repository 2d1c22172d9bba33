"""Progress is seen in a log file: a line now and then, none in a terminal's place of the bar."""

import io

import pytest
from rich.console import Console

from flashmap_hf import progress
from flashmap_hf.progress import ProgressLog


def run(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> str:
    text = io.StringIO()
    clock = iter(range(0, 10_000, 12))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=text, force_terminal=terminal))
    with ProgressLog() as bar:
        task = bar.add_task("answers", total=8)
        for _ in range(4):
            bar.advance(task)
        bar.update(task, description="nearly", completed=7)
    return text.getvalue()


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run(monkeypatch, terminal=False)
    assert "answers: 38 %" in shown  # the third advance, 36 seconds in
    assert shown.count("answers:") == 1


def test_no_lines_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "answers:" not in run(monkeypatch, terminal=True)
