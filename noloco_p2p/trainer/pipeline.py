"""Run the loop of a peer that holds one stage. The loop computes tasks from neighbours, and takes inner steps.

Only the thread of this loop touches weights. The pipeline never stops for a swap: half-differences are added to the
weights between two tasks.
"""

from __future__ import annotations

import logging
import threading
import time

from noloco_p2p.devices import empty_cache, is_out_of_memory
from noloco_p2p.flow.actions import CloseStep, Compute, Kind
from noloco_p2p.flow.steps import FINAL_MARK
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.peer.flow_driver import Handed
from noloco_p2p.peer.threaded_flow import ThreadedFlow
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.stage_work import StageWork

log = logging.getLogger(__name__)

LOOK_S = 0.1  # the longest wait for a task
SMOOTHING = 0.1  # weight of a new measurement of the duration of a task


class StageLoop:
    """The loop of one stage.

    `outer` swaps with replicas of the same stage. The progress of a head follows from its own steps, while an inner
    replica follows the progress of the heads.
    """

    def __init__(self, flow: ThreadedFlow, work: StageWork, inner: InnerStep, outer: NoLoCo) -> None:
        self.steps = 0
        self._task_s: dict[Kind, float] = {}  # smoothed duration of each kind of task
        self._flow = flow
        self._work = work
        self._inner = inner
        self._outer = outer
        self._has_finished = outer.progress >= FINAL_MARK

    @property
    def microbatch_s(self) -> float | None:
        """The compute time of a microbatch at this stage in seconds, or None before the first one."""
        return sum(self._task_s.values()) if Kind.BACKWARD in self._task_s else None

    def run(self, leaving: threading.Event) -> None:
        """Run until no head is training, or until `leaving` is set.

        Errors of a head's data source propagate to the caller.
        """
        while not leaving.is_set() and self.turn():
            pass

    def turn(self) -> bool:
        """Compute the next task, or wait briefly for one.

        Returns False once no head is training. After that, a peer can still call this method to serve heads that
        evaluate. Errors of a head's data source propagate to the caller.
        """
        if handed := self._flow.take(LOOK_S):
            self._perform(handed)
            return True
        if self._flow.is_over and not self._has_finished:
            # The heads have taken their last step. No task reports it, because nothing was counted here since the
            # step before.
            self._advance(FINAL_MARK)
        return not self._flow.is_over

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
        if self._has_finished:  # this stage has finished, and a head is late
            self._inner.forget()
        else:
            self._work.close(self._inner, step.num_tokens, progress=self._outer.progress)
            self.steps += 1
            self._advance(step.progress)
        self._flow.step_closed(self._outer.progress)

    def _advance(self, progress: float | None) -> None:
        """Count one inner step, and set the progress to `progress` if this peer follows the heads.

        The progress is set last, because a replica that was away must first notice that it is behind and fetch the
        state of another replica.
        """
        outer = self._outer
        outer.step()
        if progress is not None:
            outer.progress = progress
        self._has_finished = outer.progress >= FINAL_MARK
        if self._has_finished:
            outer.hold_progress()  # otherwise a partner that is behind would move a finished head backwards
