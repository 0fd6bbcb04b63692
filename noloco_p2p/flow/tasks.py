"""This module contains the task queue of a head or an inner replica, and the base class of both state machines."""

from __future__ import annotations

from collections.abc import Callable

from noloco_p2p.flow.actions import Action, CloseStep, Compute, Kind
from noloco_p2p.flow.frames import MicrobatchId


class Tasks:
    """A queue of tasks that run one at a time.

    The most urgent kind comes first, and tasks of the same kind run in order of arrival. `take` returns the next task
    if none is running. Closing a step has priority, and no other task runs until the step is closed.
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
        """Return the task that will run next unless a more urgent one arrives, so that its input can be prepared."""
        if not self._queue:
            return None
        id = min(self._queue, key=self._queue.__getitem__)  # min returns the first of equal items
        return make(self._queue[id], id)

    def close(self, step: CloseStep) -> list[CloseStep]:
        assert self.running is None
        self.running = step
        return [step]

    def end(self, task: Compute | CloseStep | None = None) -> bool:
        """End the running task. Return False if the end of `task` was already reported."""
        if self.running is None or (task is not None and task is not self.running):
            return False
        self.running = None
        return True


class Machine:
    """The state machine of a peer's stage. Its methods handle events and return actions.

    `num_done` counts the microbatches whose backward pass was computed here. `num_late` counts how many of them had
    their forward pass in an earlier step.
    """

    def __init__(self) -> None:
        self.tasks = Tasks()
        self.num_done = self.num_late = self.num_lost = 0
        self._num_steps = 0
        self._is_leaving = False

    @property
    def next_task(self) -> Compute | None:
        """The task that will run next unless a more urgent one arrives."""
        return self.tasks.peek(self._task)

    def rejoin(self, now_s: float) -> list[Action]:
        """Participate again after leaving."""
        self._is_leaving = False
        return self._settle([], now_s)

    def _task(self, kind: Kind, id: MicrobatchId) -> Compute:
        raise NotImplementedError

    def _settle(self, actions: list[Action], now_s: float) -> list[Action]:
        """Return these actions and all others that have become possible."""
        raise NotImplementedError
