"""Give the computing thread access to a pipeline, as `gossip.exchange.Exchange` does for swaps."""

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
    """Counts of microbatches.

    `late` counts the microbatches in `done` whose forward pass was in an earlier inner step. `held` is the number held
    now.
    """

    done: int
    lost: int
    late: int
    held: int


class ThreadedFlow:
    """The computing thread's interface to a pipeline.

    `take` waits no longer than requested. Methods that report an event never wait, and a neighbour's fault never raises
    an error here.
    """

    def __init__(self, driver: FlowDriver, loop: asyncio.AbstractEventLoop) -> None:
        self._driver = driver
        self._loop = loop

    @property
    def is_over(self) -> bool:
        """Return whether, as far as is known, no head is training any more and nothing is left to compute."""
        return self._driver.is_over

    @property
    def is_idle(self) -> bool:
        """Return whether no microbatch is held or in flight."""
        return self._driver.machine.is_idle

    @property
    def counts(self) -> FlowCounts:
        """Return the counts of microbatches since the start."""
        machine = self._driver.machine
        held = machine.in_flight if isinstance(machine, Head) else machine.stash
        return FlowCounts(machine.num_done, machine.num_lost, machine.num_late, len(held))

    def take(self, wait_s: float) -> Handed | None:
        """Return the next task, or None if there is none within `wait_s`.

        Raises any error that occurred while reading a head's data.
        """
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
        """Report a failed task, so that only its gradients are discarded."""
        self._tell(self._driver.failed, task)

    def step_closed(self, progress: float) -> None:
        self._tell(self._driver.step_closed, progress)

    def leave(self) -> None:
        """Stop launching and accepting microbatches.

        Once the held microbatches are finished, `is_idle` becomes true.
        """
        self._tell(self._driver.leave)

    def rejoin(self) -> None:
        self._tell(self._driver.rejoin)

    def evaluate(self, microbatches: Collection[object]) -> None:
        """Send these microbatches of a head through the pipeline before any others, without gradients.

        They replace the microbatches of an earlier call.
        """
        self._tell(self._driver.evaluate, microbatches)

    def _tell(self, function: Callable[[*As], None], *arguments: *As) -> None:
        """Call a function on the network thread without waiting for it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)
