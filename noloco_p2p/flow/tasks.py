"""The tasks of one machine, a head or an inner replica, and what the two machines have in common."""

from __future__ import annotations

from collections.abc import Callable

from noloco_p2p.flow.actions import Action, CloseStep, Compute, Kind
from noloco_p2p.flow.frames import MicrobatchId


class Tasks:
    """One is out at a time, the most urgent kind first, each kind in order of arrival.

    `take` gives the next one once none is out. A step closes first, and no task runs while it does.
    """

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


class Machine:
    """A stage of one peer. Methods are events, and return what to do.

    num_done: microbatches with a backward here; num_late: of those, the ones whose forward was in an earlier step.
    """

    def __init__(self) -> None:
        self.tasks = Tasks()
        self.num_done = self.num_late = self.num_lost = 0
        self._num_steps = 0
        self._is_leaving = False
        self._holds_steps = False

    @property
    def next_task(self) -> Compute | None:
        """What will be computed next, unless something more urgent arrives."""
        return self.tasks.peek(self._task)

    def hold_steps(self) -> None:
        """No step closes until `release_steps`. Tasks go on, and their gradients count toward the next step."""
        self._holds_steps = True

    def release_steps(self, now_s: float) -> list[Action]:
        """The outer step that was waited for is taken."""
        self._holds_steps = False
        return self._settle([], now_s)

    def rejoin(self, now_s: float) -> list[Action]:
        """Take part again, after leaving."""
        self._is_leaving = False
        return self._settle([], now_s)

    def _task(self, kind: Kind, id: MicrobatchId) -> Compute:
        raise NotImplementedError

    def _settle(self, actions: list[Action], now_s: float) -> list[Action]:
        """The actions, and what may be done now."""
        raise NotImplementedError
