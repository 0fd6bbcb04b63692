"""Shows the tasks of a `Progress`, as bars on a terminal and as occasional lines elsewhere. Short tasks are hidden."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from noloco_p2p.telemetry.console import count, duration, mib, terminal
from noloco_p2p.telemetry.progress import Draw, Task, line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

SHOW_AFTER_S = 1.0  # a shorter task needs no bar
TELL_AFTER_S = 2.0  # when a longer task ends, a line about it remains
LINE_EVERY_S = 10.0
REFRESH_S = 0.2


def drawing(say: Callable[[str], None]) -> Draw:
    """Return bars if standard output is a terminal, and otherwise lines that `say` prints."""
    return Bars(say) if sys.stdout.isatty() else Lines(say)


class _Ticking:
    """Redraws each long task from a thread, so that the display changes even when the work is stalled."""

    def __init__(self, say: Callable[[str], None], *, first_s: float, every_s: float) -> None:
        self._say = say
        self._first_s, self._every_s = first_s, every_s
        self._ended: dict[Task, threading.Event] = {}
        self._threads: dict[Task, threading.Thread] = {}

    def begin(self, task: Task) -> None:
        self._ended[task] = ended = threading.Event()
        self._threads[task] = thread = threading.Thread(
            target=self._main, args=(task, ended), name="noloco-progress", daemon=True
        )
        thread.start()

    def end(self, task: Task) -> None:
        self._ended.pop(task).set()
        self._threads.pop(task).join()
        seconds = time.monotonic() - task.began_s
        if seconds >= TELL_AFTER_S:
            self._say(_told(task, seconds))

    def _main(self, task: Task, ended: threading.Event) -> None:
        pause_s = self._first_s
        try:
            while not ended.wait(pause_s):
                self.tick(task)
                pause_s = self._every_s
        finally:
            self.leave(task)

    def tick(self, task: Task) -> None:
        raise NotImplementedError

    def leave(self, task: Task) -> None:
        raise NotImplementedError


class Lines(_Ticking):
    """Prints a line about each long task every few seconds, for logs and pipes."""

    def __init__(self, say: Callable[[str], None], *, every_s: float = LINE_EVERY_S) -> None:
        super().__init__(say, first_s=every_s, every_s=every_s)

    def tick(self, task: Task) -> None:
        self._say(line(task.as_dict(now_s=time.monotonic())))

    def leave(self, task: Task) -> None:
        pass


class Bars(_Ticking):
    """Draws bars on a terminal. All running tasks share one display, because rich allows only one at a time."""

    def __init__(self, say: Callable[[str], None], *, console: Console | None = None) -> None:
        super().__init__(say, first_s=SHOW_AFTER_S, every_s=REFRESH_S)
        self._console = console
        self._lock = threading.Lock()
        self._drawn: RichProgress | None = None
        self._ids: dict[Task, int] = {}

    def tick(self, task: Task) -> None:
        from rich.progress import TaskID

        now = task.as_dict(now_s=time.monotonic())
        with self._lock:
            if self._drawn is None:
                self._drawn = self._make()
                self._drawn.start()
            if task not in self._ids:
                self._ids[task] = self._drawn.add_task(task.what, total=None, told="")
            told = line(now).removeprefix(f"{now['what']}: ")
            task_id, done, total = TaskID(self._ids[task]), now["done"], now["total"]
            self._drawn.update(task_id, description=now["what"], completed=done, total=total, told=told)

    def leave(self, task: Task) -> None:
        from rich.progress import TaskID

        with self._lock:
            if task in self._ids and self._drawn:
                self._drawn.remove_task(TaskID(self._ids.pop(task)))
                if not self._ids:
                    self._drawn.stop()
                    self._drawn = None

    def _make(self) -> RichProgress:
        from rich.progress import BarColumn, Progress, TextColumn

        # With `transient`, the bar disappears when the work is done, and the line about it stays.
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[told]}"))
        return Progress(*columns, console=self._console or terminal(), transient=True, refresh_per_second=1 / REFRESH_S)


def _told(task: Task, seconds: float) -> str:
    if task.total is None or task.meter.done == 0:
        return f"{task.what}: {duration(seconds)}"
    if task.unit == "bytes":
        done = task.meter.done
        return f"{task.what}: {mib(done)} in {duration(seconds)} ({mib(done / seconds)}/s)"
    return f"{task.what}: {count(task.meter.done)} {task.unit} in {duration(seconds)}"
