"""The loop of a peer that holds one stage: it computes what its neighbours send, and closes inner steps.

This thread is the only one that touches weights. Rounds of swaps are not part of it yet.
"""

from __future__ import annotations

import logging
import threading

from noloco_p2p.devices import empty_cache, is_out_of_memory
from noloco_p2p.flow.actions import CloseStep, Compute
from noloco_p2p.peer.flow_driver import Handed
from noloco_p2p.peer.threaded_flow import ThreadedFlow
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.stage_work import StageWork

log = logging.getLogger(__name__)

LOOK_S = 0.1  # how often it looks whether it is to leave, or all is over


class StageLoop:
    """total_steps: inner steps of the schedule. A head advances by its own; an inner replica follows the heads."""

    def __init__(self, flow: ThreadedFlow, work: StageWork, inner: InnerStep, *, total_steps: int) -> None:
        self.steps = 0
        self.progress = 0.0
        self._flow = flow
        self._work = work
        self._inner = inner
        self._total_steps = total_steps

    def run(self, leaving: threading.Event) -> None:
        """Until no head trains any more, or `leaving` is set. Raises what the data of a head raises."""
        while not leaving.is_set():
            if handed := self._flow.take(LOOK_S):
                self._perform(handed)
            elif self._flow.is_over:
                return

    def _perform(self, handed: Handed) -> None:
        if isinstance(handed.task, CloseStep):
            self._close_step(handed.task)
            return
        assert isinstance(handed.inputs, Compute)
        try:
            result = self._work.compute(handed.inputs)
        except ValueError as error:
            log.error("a microbatch is lost: %s", error)
            self._flow.failed(handed.task)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.warning("a microbatch is lost, as the accelerator is out of memory")
            error.__traceback__ = None  # it holds the activations
            empty_cache(self._work.stage.device)
            self._flow.failed(handed.task)
        else:
            self._flow.computed(handed.task, result)

    def _close_step(self, step: CloseStep) -> None:
        self._work.close(self._inner, step.num_tokens, progress=self.progress)
        self.steps += 1
        self.progress = self.steps / self._total_steps if step.progress is None else step.progress
        self._flow.step_closed(self.progress)
