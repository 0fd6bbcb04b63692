"""Run the loop of a peer that holds one stage. The loop computes tasks from neighbours, and completes steps and rounds.

Only the thread of this loop touches weights. The pipeline never stops for a swap. After the last inner step of a round,
tasks continue with unchanged weights, and only the next inner step waits for the outer step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from noloco_p2p.devices import empty_cache, is_out_of_memory
from noloco_p2p.flow.actions import CloseStep, Compute, Kind
from noloco_p2p.flow.steps import FINAL_MARK
from noloco_p2p.outer.noloco import NoLoCo, RoundResult
from noloco_p2p.peer.flow_driver import Handed
from noloco_p2p.peer.threaded_flow import ThreadedFlow
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.stage_work import StageWork

log = logging.getLogger(__name__)

LOOK_S = 0.1  # the longest wait for a task
POLL_S = 0.02  # pause between two checks, at a boundary, whether the round has ended
SMOOTHING = 0.1  # weight of a new measurement of the duration of a task


class StageLoop:
    """The loop of one stage.

    `outer` swaps with replicas of the same stage. The progress of a head follows from its own steps, while an inner
    replica follows the progress of the heads. `on_round` is called with the result of each round.
    """

    def __init__(
        self,
        flow: ThreadedFlow,
        work: StageWork,
        inner: InnerStep,
        outer: NoLoCo,
        *,
        on_round: Callable[[RoundResult], None] = lambda result: None,
        poll_s: float = POLL_S,
    ) -> None:
        self.steps = 0
        self.is_at_boundary = False
        self._task_s: dict[Kind, float] = {}  # smoothed duration of each kind of task
        self._flow = flow
        self._work = work
        self._inner = inner
        self._outer = outer
        self._on_round = on_round
        self._poll_s = poll_s
        self._has_finished = outer.progress >= FINAL_MARK
        self._polled_s = 0.0

    @property
    def microbatch_s(self) -> float | None:
        """The compute time of a microbatch at this stage in seconds, or None before the first one."""
        return sum(self._task_s.values()) if Kind.BACKWARD in self._task_s else None

    def run(self, leaving: threading.Event) -> None:
        """Run until no head is training and the last round has ended, or until `leaving` is set.

        Errors of a head's data source propagate to the caller.
        """
        while not leaving.is_set() and self.turn():
            pass

    def turn(self) -> bool:
        """Compute the next task, or wait briefly for one.

        Returns False once no head is training and the last round has ended. After that, a peer can still call this
        method to serve heads that evaluate. Errors of a head's data source propagate to the caller.
        """
        if self.is_at_boundary:
            self._poll_round()
        if handed := self._flow.take(self._poll_s if self.is_at_boundary else LOOK_S):
            self._perform(handed)
            return True
        if self._flow.is_over and not self._has_finished and not self.is_at_boundary:
            # The heads have taken their last step. No task reports it, because nothing was counted here since the
            # step before.
            self._advance(FINAL_MARK)
        return self.is_at_boundary or not self._flow.is_over

    def _perform(self, handed: Handed) -> None:
        if isinstance(handed.task, CloseStep):
            self._close_step(handed.task)
            return
        assert isinstance(handed.inputs, Compute)
        began_s = time.monotonic()
        try:
            result = self._work.compute(handed.inputs)
        except ValueError as error:
            log.error("a microbatch was lost: %s", error)
            self._flow.failed(handed.task)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.warning("a microbatch was lost because the accelerator ran out of memory")
            error.__traceback__ = None  # it would keep the activations in memory
            empty_cache(self._work.stage.device)
            self._flow.failed(handed.task)
        else:
            self._flow.computed(handed.task, result)
            self._measured(handed.task.kind, time.monotonic() - began_s)

    def _measured(self, kind: Kind, seconds: float) -> None:
        before = self._task_s.get(kind, seconds)
        self._task_s[kind] = before + SMOOTHING * (seconds - before)

    def _close_step(self, step: CloseStep) -> None:
        outer = self._outer
        if self._has_finished:  # this stage has finished, and a head is late
            self._inner.forget()
            self._flow.step_closed(outer.progress)
            return
        self._work.close(self._inner, step.num_tokens, progress=outer.progress)
        self.steps += 1
        self._advance(step.progress)
        self._flow.step_closed(outer.progress)

    def _advance(self, progress: float | None) -> None:
        """Count one inner step, and set the progress to `progress` if this peer follows the heads.

        The progress is set last, because a replica that was away must first notice that it is behind and fetch the
        state of another replica.
        """
        outer = self._outer
        self.is_at_boundary = outer.advance()
        if progress is not None:
            outer.progress = progress
        self._has_finished = outer.progress >= FINAL_MARK
        if self._has_finished:
            outer.hold_progress()  # otherwise a partner that is behind would move a finished head backwards
        if self._has_finished and not self.is_at_boundary:
            outer.reach_boundary()
            self.is_at_boundary = True
        if self.is_at_boundary:
            self._flow.hold_steps()

    def _poll_round(self) -> None:
        """Take the outer step, between two tasks, once the round has ended."""
        now_s = time.monotonic()
        if now_s - self._polled_s < self._poll_s:
            return
        self._polled_s = now_s
        if result := self._outer.poll():
            self.end_round()
            self._on_round(result)

    def end_round(self) -> None:
        """Resume inner steps after the outer step has been taken or the round has been given up."""
        self.is_at_boundary = False
        if not self._has_finished:
            self._flow.release_steps(self._outer.progress)
