"""The tasks of one node: one is out at a time, the most urgent kind first, each kind in order of arrival."""

from __future__ import annotations

from collections.abc import Callable

from noloco_p2p.flow.actions import CloseStep, Compute, Kind
from noloco_p2p.flow.frames import MicrobatchId


class Tasks:
    """`take` gives the next task once none is out. A step closes first, and no task runs while it does."""

    def __init__(self) -> None:
        self.running: Compute | CloseStep | None = None
        self._queue: dict[MicrobatchId, Kind] = {}  # in order of arrival; a microbatch waits for one task at a time

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, kind: Kind, id: MicrobatchId) -> None:
        self._queue.pop(id, None)
        self._queue[id] = kind

    def remove(self, id: MicrobatchId) -> None:
        self._queue.pop(id, None)

    def take(self, make: Callable[[Kind, MicrobatchId], Compute]) -> list[Compute]:
        task = None if self.running is not None else self.peek(make)
        if task is None:
            return []
        del self._queue[task.id]
        self.running = task
        return [task]

    def peek(self, make: Callable[[Kind, MicrobatchId], Compute]) -> Compute | None:
        """The task that comes next, unless a more urgent one arrives: what it needs can be prepared."""
        if not self._queue:
            return None
        id = min(self._queue, key=self._queue.__getitem__)  # min takes the first of equals
        return make(self._queue[id], id)

    def close(self, step: CloseStep) -> list[CloseStep]:
        assert self.running is None
        self.running = step
        return [step]

    def end(self, task: Compute | CloseStep | None = None) -> bool:
        """False = this task is not the one that is out: its end is reported twice."""
        if self.running is None or (task is not None and task is not self.running):
            return False
        self.running = None
        return True
