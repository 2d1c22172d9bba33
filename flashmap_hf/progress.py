"""A progress bar on stderr; where that is no terminal (a log file, CI), a line now and then instead."""

import time
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

SECONDS = 30.0  # between two lines


class ProgressLog(Progress):
    """`rich.progress.Progress` on stderr that is seen in a log file, too."""

    def __init__(self, *columns: str | ProgressColumn, disable: bool = False):
        super().__init__(*columns, console=Console(stderr=True), disable=disable)
        self.last = time.monotonic()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._line(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._line(task_id)

    def _line(self, task_id: TaskID) -> None:
        now = time.monotonic()
        if self.disable or self.console.is_terminal or now - self.last < SECONDS:
            return
        self.last = now
        task = self._tasks[task_id]
        share = f"{task.percentage:.0f} %" if task.total else f"{task.completed:g}"
        self.console.print(f"{task.description or 'done'}: {share}", highlight=False)
