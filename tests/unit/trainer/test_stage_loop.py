"""The loop of a peer with one stage: while a round is at its boundary, tasks continue and no inner step closes."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, cast

from noloco_p2p.flow.actions import CloseStep, Compute, Kind
from noloco_p2p.flow.frames import MicrobatchId
from noloco_p2p.peer.flow_driver import Handed
from noloco_p2p.trainer.pipeline import StageLoop


class Flow:
    """Hands out tasks, every third of which closes a step unless steps are held."""

    def __init__(self, log: list[str], *, num_tasks: int) -> None:
        self.log = log
        self.is_held = False
        self._tasks = deque(range(num_tasks))

    @property
    def is_over(self) -> bool:
        return not self._tasks

    def take(self, wait_s: float) -> Handed | None:
        if not self._tasks:
            return None
        number = self._tasks.popleft()
        is_step = number % 3 == 2 and not self.is_held
        forward = Compute(Kind.FORWARD, MicrobatchId("head", number), None)
        task = CloseStep(64, (number + 1) / 12) if is_step else forward
        return Handed(task, task)

    def computed(self, task: Compute, result: object) -> None:
        self.log.append("task")

    def step_closed(self, progress: float) -> None:
        self.log.append(f"step {progress:.2f}")

    def hold_steps(self) -> None:
        self.is_held = True
        self.log.append("hold")

    def release_steps(self, progress: float) -> None:
        self.is_held = False
        self.log.append("release")


class Work:
    def compute(self, task: Compute) -> None:
        return None

    def close(self, inner: object, num_tokens: int, *, progress: float) -> None:
        pass


class Outer:
    """A round of two inner steps, which ends after five polls."""

    def __init__(self) -> None:
        self.progress = 0.0
        self.num_early = self.num_polled = 0
        self._steps = self._polls = 0

    def advance(self) -> bool:
        assert not self._polls, "no step closes at a boundary"
        self._steps += 1
        return self._steps % 2 == 0

    def reach_boundary(self) -> None:
        self.num_early += 1

    def hold_progress(self) -> None:
        assert self.progress >= 1

    def poll(self) -> object:
        self.num_polled += 1
        self._polls = (self._polls + 1) % 5
        return None if self._polls else object()


def run(num_tasks: int) -> tuple[list[str], Outer]:
    log: list[str] = []
    outer = Outer()
    flow, parts = Flow(log, num_tasks=num_tasks), (Work(), object(), outer)
    StageLoop(cast(Any, flow), *cast(tuple[Any, Any, Any], parts), poll_s=0.0).run(threading.Event())
    return log, outer


def test_tasks_go_on_while_a_round_is_at_its_boundary() -> None:
    log, _ = run(24)
    hold, release = log.index("hold"), log.index("release")
    assert log[:hold] == ["task", "task", "step 0.25", "task", "task"]
    assert log[hold + 1] == "step 0.50"
    assert log[hold + 2 : release] == ["task"] * 4


def test_a_replica_that_counted_nothing_for_the_last_step_ends_its_round_as_the_others_do() -> None:
    log, outer = run(5)
    assert log[-1] == "hold", "and it waits until the round has ended"
    assert outer.progress == 1
    assert outer.num_polled == 5


def test_the_last_round_ends_with_the_schedule_and_no_step_follows() -> None:
    log, outer = run(40)
    last = max(index for index, entry in enumerate(log) if entry.startswith("step"))
    assert float(log[last].split()[1]) >= 1
    assert "release" not in log[last:]
    assert outer.num_early <= 1
