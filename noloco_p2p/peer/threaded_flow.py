"""How the thread that computes takes part in a pipeline; a sibling of `gossip.exchange.ThreadedExchange`."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVarTuple

from noloco_p2p.flow.actions import Compute
from noloco_p2p.flow.head import Head
from noloco_p2p.peer.flow_driver import FlowDriver, Handed

As = TypeVarTuple("As")


class FlowCounts(NamedTuple):
    """late: of those done, whose forward pass was in an earlier inner step. held: now."""

    done: int
    lost: int
    late: int
    held: int


class ThreadedFlow:
    """`take` waits no longer than it was asked to; the reports never wait, and nothing a neighbour does raises here."""

    def __init__(self, driver: FlowDriver, loop: asyncio.AbstractEventLoop) -> None:
        self._driver = driver
        self._loop = loop

    @property
    def is_over(self) -> bool:
        """No head trains any more, as far as this peer has heard, and nothing is left to compute."""
        return self._driver.is_over

    @property
    def is_idle(self) -> bool:
        """No microbatch is held or in flight."""
        return self._driver.machine.is_idle

    @property
    def counts(self) -> FlowCounts:
        """Of microbatches, since the start."""
        machine = self._driver.machine
        held = machine.in_flight if isinstance(machine, Head) else machine.stash
        return FlowCounts(machine.num_done, machine.num_lost, machine.num_late, len(held))

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

    def leave(self) -> None:
        """Launch and accept nothing from now on; what is held is finished, and `is_idle` tells when."""
        self._tell(self._driver.leave)

    def rejoin(self) -> None:
        self._tell(self._driver.rejoin)

    def evaluate(self, microbatches: Collection[object]) -> None:
        """Of a head: send these around the ring before others, without gradients, in place of those before."""
        self._tell(self._driver.evaluate, microbatches)

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
