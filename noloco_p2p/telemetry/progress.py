"""The progress of long tasks: the amount of work done, the rate, and the time left.

`Progress` is passed to all code that may take seconds. Its tasks can be nested. Any thread may report progress, and
`noloco status` can read the innermost task at any moment. The rate is not that of rich.progress, which does not fall
when work stalls. A peer without a terminal does not import rich at all.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from noloco_p2p.telemetry.console import count, duration, mib, terminal

if TYPE_CHECKING:
    from rich.table import Table

WINDOW_S = 15.0  # the time over which the rate is measured; it is short, so that a link that has become slow is noticed
SAMPLE_S = 0.25  # minimum time between two samples; a window has about sixty samples
SHOW_AFTER_S = 1.0  # a shorter task needs no bar
TELL_AFTER_S = 2.0  # when a longer task ends, a line about it remains
LINE_EVERY_S = 10.0  # without a terminal
BAR_CELLS = 20

Report = Callable[[int, int], None]  # (done, total) in the unit of the task


def ignore(done: int, total: int) -> None:
    """Ignore the progress. Use this function as a `Report`."""


class Task:
    """A long task and its progress.

    `what` is a description, or a function that returns the current one. `unit` is "bytes", or the plural noun for what
    is counted. `total` is None until it is known. Callers supply the current time, in seconds on any clock.
    """

    def __init__(self, what: str | Callable[[], str], *, unit: str, now_s: float) -> None:
        self._what = what
        self.unit = unit
        self.began_s = now_s
        self.done = 0
        self.total: int | None = None
        self._samples: deque[tuple[float, int]] = deque([(now_s, 0)])

    @property
    def what(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()

    def report(self, done: int, total: int | None, *, now_s: float) -> None:
        """Note that `done` of `total` units are done. A count that falls, as after a restart, begins a new window."""
        if done < self.done:
            self._samples.clear()
        self.done, self.total = done, total
        if not self._samples or now_s - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now_s, done))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()

    def rate_per_s(self, *, now_s: float) -> float:
        """Return the rate over the last WINDOW_S seconds, or since the start if that is more recent. It falls towards 0
        during a stall.
        """
        began_s, begun = self._samples[0] if self._samples else (now_s, self.done)
        return (self.done - begun) / (now_s - began_s) if now_s > began_s else 0.0

    def as_dict(self, *, now_s: float) -> dict[str, Any]:
        """Return the task as JSON values. `left_s` is None if the total is unknown or the work stalls."""
        rate, total = self.rate_per_s(now_s=now_s), self.total
        return {
            "what": self.what,
            "since_s": round(now_s - self.began_s, 1),
            "unit": self.unit,
            "done": self.done,
            "total": total,
            "rate_per_s": round(rate, 1),
            "left_s": round(max(0, total - self.done) / rate, 1) if total is not None and rate > 0 else None,
        }


class Progress:
    """The running tasks, with the innermost task last.

    `say` prints a line. On a terminal, long tasks have bars; elsewhere, a line about the innermost task is printed now
    and then. When a long task ends, a line about it remains. Without `say`, tasks are recorded but not shown.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say
        self._tasks: list[Task] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()  # set when no task is left
        self._display: threading.Thread | None = None

    @contextmanager
    def task(self, what: str | Callable[[], str], *, unit: str = "") -> Iterator[Report]:
        """Run a task: `with progress.task("evaluating", unit="batches") as report: report(1, 20)`.

        Without a unit, do not call `report`.
        """
        task = Task(what, unit=unit, now_s=time.monotonic())
        with self._lock:
            self._tasks.append(task)
            if self._say and len(self._tasks) == 1:
                show = self._draw if sys.stdout.isatty() else self._tell
                self._ended = threading.Event()
                self._display = threading.Thread(
                    target=show, args=(self._say, self._ended), name="noloco-progress", daemon=True
                )
                self._display.start()
        try:
            yield lambda done, total: task.report(done, total, now_s=time.monotonic())
        finally:
            with self._lock:
                self._tasks.remove(task)
                display = None if self._tasks else self._display
            if display:
                self._ended.set()
                display.join()
            seconds = time.monotonic() - task.began_s
            if self._say and seconds >= TELL_AFTER_S:
                self._say(told(task.as_dict(now_s=time.monotonic())))

    def now(self) -> dict[str, Any] | None:
        """Return the innermost task as JSON values, or None if no task is running."""
        with self._lock:
            return self._tasks[-1].as_dict(now_s=time.monotonic()) if self._tasks else None

    def _tell(self, say: Callable[[str], None], ended: threading.Event) -> None:
        while not ended.wait(LINE_EVERY_S):
            if now := self.now():
                say(line(now))

    def _draw(self, say: Callable[[str], None], ended: threading.Event) -> None:
        """Draw a bar for each task that has taken more than SHOW_AFTER_S. The bars vanish when all tasks have ended."""
        if ended.wait(SHOW_AFTER_S):
            return
        from rich.live import Live

        with Live(console=terminal(), get_renderable=self._bars, transient=True, refresh_per_second=5):
            ended.wait()

    def _bars(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        bars, now_s = Table.grid(padding=(0, 1)), time.monotonic()
        with self._lock:
            tasks = [task.as_dict(now_s=now_s) for task in self._tasks if now_s - task.began_s >= SHOW_AFTER_S]
        for task in tasks:
            bar = ProgressBar(task["total"], task["done"], width=BAR_CELLS, pulse=task["total"] is None)
            bars.add_row(task["what"], bar, line(task).removeprefix(f"{task['what']}: "))
        return bars


def line(task: dict[str, Any]) -> str:
    """Format the values of `Task.as_dict`: `fetching the state: 120.0 MiB of 953.7 MiB, 12.3 MiB/s, 68 s left`."""
    show = mib if task["unit"] == "bytes" else count
    unit = "" if task["unit"] in ("bytes", "") else f" {task['unit']}"
    if task["total"] is None:
        return f"{task['what']}: {duration(task['since_s'])} so far"
    left = "no progress" if task["left_s"] is None else f"{duration(task['left_s'])} left"
    rate = f"{show(task['rate_per_s'])}/s" if task["unit"] == "bytes" or task["rate_per_s"] >= 10 else None
    parts = [f"{task['what']}: {show(task['done'])} of {show(task['total'])}{unit}", rate, left]
    return ", ".join(part for part in parts if part)


def told(task: dict[str, Any]) -> str:
    """Describe a task that has ended: `fetching the state: 953.7 MiB in 1 min 20 s (11.9 MiB/s)`."""
    if not task["done"]:
        return f"{task['what']}: {duration(task['since_s'])}"
    if task["unit"] == "bytes":
        rate = mib(task["done"] / max(task["since_s"], 0.1))
        return f"{task['what']}: {mib(task['done'])} in {duration(task['since_s'])} ({rate}/s)"
    return f"{task['what']}: {count(task['done'])} {task['unit']} in {duration(task['since_s'])}"
