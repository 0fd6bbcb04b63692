"""The progress of long tasks: the amount of work done, the rate, and the time left. `bars.py` draws it.

`Progress` is passed to all code that may take seconds. Its tasks can be nested. Any thread may report progress, and
`noloco status` can read the innermost task at any moment. rich.progress is used only for drawing, because its own rate
does not fall when work stalls. A peer without a terminal does not import it at all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from noloco_p2p.telemetry.console import count, duration, mib

WINDOW_S = 15.0  # the time over which the rate is measured; it is short, so that a link that has become slow is noticed
SAMPLE_S = 0.25  # minimum time between two samples; a window has about sixty samples

Report = Callable[[int, int], None]  # (done, total) in the unit of the task


def ignore(done: int, total: int) -> None:
    """Ignore the progress. Use this function as a `Report`."""


class Meter:
    """Computes the rate and the time left from samples of an increasing count.

    Callers supply the current time as an argument, in seconds on any clock.
    """

    def __init__(self, *, now_s: float) -> None:
        self.done = 0
        self._samples: deque[tuple[float, int]] = deque([(now_s, 0)])

    def add(self, done: int, *, now_s: float) -> None:
        """Add a sample of the total `done` so far.

        A count that falls, for example after a restart, begins a new window.
        """
        if done < self.done:
            self._samples.clear()
        self.done = done
        if not self._samples or now_s - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now_s, done))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()

    def rate_per_s(self, *, now_s: float) -> float:
        """Return the rate over the last WINDOW_S seconds, or since the start if that is more recent. It falls towards 0
        during a stall.
        """
        began_s, begun = self._samples[0] if self._samples else (now_s, self.done)
        seconds = now_s - began_s
        return (self.done - begun) / seconds if seconds > 0 else 0.0

    def left_s(self, total: int, *, now_s: float) -> float | None:
        """Return the seconds until `total` is reached at the current rate, or None during a stall."""
        rate = self.rate_per_s(now_s=now_s)
        return max(0, total - self.done) / rate if rate > 0 else None


class Task:
    """A long task and its progress.

    `what` is a description, or a function that returns the current one. `unit` is "bytes", or the plural noun for what
    is counted. `total` is None until it is known.
    """

    def __init__(self, what: str | Callable[[], str], *, unit: str, now_s: float) -> None:
        self._what = what
        self.unit = unit
        self.began_s = now_s
        self.total: int | None = None
        self.meter = Meter(now_s=now_s)

    @property
    def what(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()

    def report(self, done: int, total: int) -> None:
        """Report that `done` of `total` units are done. Any thread can call this."""
        self.total = total
        self.meter.add(done, now_s=time.monotonic())

    def as_dict(self, *, now_s: float) -> dict[str, Any]:
        total = self.total
        return {
            "what": self.what,
            "since_s": round(now_s - self.began_s, 1),
            "unit": self.unit,
            "done": self.meter.done,
            "total": total,
            "rate_per_s": round(self.meter.rate_per_s(now_s=now_s), 1),
            "left_s": None if total is None else _rounded(self.meter.left_s(total, now_s=now_s)),
        }


class Draw(Protocol):
    """Shows tasks to a person. It is called by the thread that does the work."""

    def begin(self, task: Task) -> None: ...

    def end(self, task: Task) -> None: ...


class Progress:
    """The running tasks, with the innermost task last. Without `draw`, they are recorded but not shown."""

    def __init__(self, draw: Draw | None = None) -> None:
        self._draw = draw
        self._tasks: list[Task] = []
        self._lock = threading.Lock()

    @contextmanager
    def task(self, what: str | Callable[[], str], *, unit: str = "") -> Iterator[Report]:
        """Run a task: `with progress.task("evaluating", unit="batches") as report: report(1, 20)`.

        Without a unit, do not call `report`.
        """
        task = Task(what, unit=unit, now_s=time.monotonic())
        with self._lock:
            self._tasks.append(task)
        if self._draw:
            self._draw.begin(task)
        try:
            yield task.report
        finally:
            with self._lock:
                self._tasks.remove(task)
            if self._draw:
                self._draw.end(task)

    def now(self) -> dict[str, Any] | None:
        """Return the innermost task as JSON values, or None if no task is running."""
        with self._lock:
            return self._tasks[-1].as_dict(now_s=time.monotonic()) if self._tasks else None


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


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
