"""How the thread that computes takes part in a pipeline; a sibling of `gossip.exchange.ThreadedExchange`."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable
from typing import TypeVarTuple

from noloco_p2p.flow.actions import Compute
from noloco_p2p.peer.flow_driver import FlowDriver, Handed

As = TypeVarTuple("As")


class ThreadedFlow:
    """`take` waits no longer than it was asked to; the reports never wait, and nothing a neighbour does raises here."""

    def __init__(self, driver: FlowDriver, loop: asyncio.AbstractEventLoop) -> None:
        self._driver = driver
        self._loop = loop

    @property
    def is_over(self) -> bool:
        """No head trains any more, as far as this peer has heard, and nothing is left to compute."""
        return self._driver.is_over

    def take(self, wait_s: float) -> Handed | None:
        """The next task; None when there is none within `wait_s`. Raises what the data of a head raised."""
        try:
            handed = self._driver.tasks.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(handed, Exception):
            raise handed
        return handed

    def computed(self, task: Compute, result: object) -> None:
        self._tell(self._driver.computed, task, result)

    def failed(self, task: Compute) -> None:
        """Its gradients are discarded, and no others."""
        self._tell(self._driver.failed, task)

    def step_closed(self, progress: float) -> None:
        self._tell(self._driver.step_closed, progress)

    def hold_steps(self) -> None:
        """A round is at its boundary: no inner step is handed out until `release_steps`, and tasks go on."""
        self._tell(self._driver.hold_steps)

    def release_steps(self, progress: float) -> None:
        """The outer step is taken. progress: where it brought this peer on the schedule."""
        self._tell(self._driver.release_steps, progress)

    def _tell(self, function: Callable[[*As], None], *arguments: *As) -> None:
        """Call on the network thread, without waiting for it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)
