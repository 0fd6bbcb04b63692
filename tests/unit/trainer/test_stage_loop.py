"""The loop of a peer with one stage: its inner steps, and the end of its schedule."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, cast

from noloco_p2p.flow.actions import CloseStep, Compute, Kind
from noloco_p2p.flow.frames import MicrobatchId
from noloco_p2p.peer.flow_driver import Handed
from noloco_p2p.trainer.pipeline import StageLoop


class Flow:
    """Hands out tasks, every third of which closes a step."""

    def __init__(self, log: list[str], *, num_tasks: int) -> None:
        self.log = log
        self._tasks = deque(range(num_tasks))

    @property
    def is_over(self) -> bool:
        return not self._tasks

    def take(self, wait_s: float) -> Handed | None:
        if not self._tasks:
            return None
        number = self._tasks.popleft()
        forward = Compute(Kind.FORWARD, MicrobatchId("head", number), None)
        task = CloseStep(64, (number + 1) / 12) if number % 3 == 2 else forward
        return Handed(task, task)

    def computed(self, task: Compute, result: object) -> None:
        self.log.append("task")

    def step_closed(self, progress: float) -> None:
        self.log.append(f"step {progress:.2f}")


class Work:
    def compute(self, task: Compute) -> None:
        return None

    def close(self, inner: Inner, num_tokens: int, *, progress: float) -> None:
        inner.num_steps += 1


class Inner:
    num_steps = num_forgotten = 0

    def forget(self) -> None:
        self.num_forgotten += 1


class Outer:
    progress = 0.0
    num_steps = 0
    is_held = False

    def step(self) -> None:
        assert not self.is_held, "no step follows the last one"
        self.num_steps += 1

    def hold_progress(self) -> None:
        self.is_held = True


def run(num_tasks: int) -> tuple[list[str], Inner, Outer]:
    log: list[str] = []
    inner, outer = Inner(), Outer()
    flow, parts = Flow(log, num_tasks=num_tasks), (Work(), inner, outer)
    StageLoop(cast(Any, flow), *cast(tuple[Any, Any, Any], parts)).run(threading.Event())
    return log, inner, outer


def test_an_inner_replica_follows_the_heads() -> None:
    log, _, outer = run(7)
    assert log == ["task", "task", "step 0.25", "task", "task", "step 0.50", "task"]
    assert outer.num_steps == 3, "the heads have ended"


def test_a_replica_that_counted_nothing_for_the_last_step_ends_as_the_others_do() -> None:
    _, inner, outer = run(5)
    assert (inner.num_steps, outer.num_steps) == (1, 2)
    assert (outer.progress, outer.is_held) == (1, True)


def test_no_step_follows_the_end_of_the_schedule() -> None:
    log, inner, outer = run(40)
    assert log.count("step 1.00") == 10
    assert (inner.num_steps, inner.num_forgotten, outer.num_steps) == (4, 9, 4)
