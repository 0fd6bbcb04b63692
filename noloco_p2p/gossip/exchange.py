"""The only door between the training thread and the network thread.

The network thread asks for snapshots and hands over committed swaps. The training thread serves both between two inner
steps, and never waits for the network.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from noloco_p2p.gossip.coder import Coding
from noloco_p2p.gossip.units import Slice, Units


@dataclass(frozen=True, slots=True)
class Committed:
    """A swap whose half-differences may be added to the weights.

    `snapshot_step` is the inner step after which the snapshot was taken.
    """

    partner: str
    progress: float  # of the partner
    coding: Coding
    start: int  # of the slice in the flat vector
    snapshot_step: int
    seconds: float


@dataclass(slots=True)
class _Request:
    part: Slice
    answer: asyncio.Future[tuple[Tensor, int]] = field(repr=False)


class Exchange:
    """Passes snapshots and half-differences between the two threads.

    `loop` is the loop of the network thread. In a simulation, both sides run on this loop.
    """

    def __init__(self, units: Units, loop: asyncio.AbstractEventLoop) -> None:
        self.units = units
        self.step = 0  # inner steps that the trainer has taken
        self.step_s = 0.0  # duration of an inner step, or 0 before the second one
        # Copies elements [start, stop) of the weights on any thread, between two inner steps. If this is None, the
        # trainer copies them in `serve`.
        self.read: Callable[[int, int], Tensor] | None = None
        self.on_applied: Callable[[Committed], None] = lambda swap: None  # called on the network thread
        self._loop = loop
        self._wanted: deque[_Request] = deque()
        self._committed: deque[Committed] = deque()
        self._last_step_s: float | None = None

    # the training thread

    def step_taken(self, now_s: float) -> None:
        """Record that an inner step has ended at `now_s`."""
        if self._last_step_s is not None:
            took_s = now_s - self._last_step_s
            self.step_s += (took_s - self.step_s) / min(8, self.step) if self.step_s else took_s
        self.step, self._last_step_s = self.step + 1, now_s

    def collect(self) -> list[Committed]:
        """Return the swaps that have been committed since the last call, which the caller applies at once."""
        swaps = [self._committed.popleft() for _ in range(len(self._committed))]
        for swap in swaps:
            self._loop.call_soon_threadsafe(self.on_applied, swap)
        return swaps

    def serve(self, read: Callable[[int, int], Tensor]) -> None:
        """Copy the slices that the network thread asked for. `read(start, stop)` returns a new fp32 tensor."""
        for _ in range(len(self._wanted)):
            request = self._wanted.popleft()
            values = read(*self.units.bounds(request.part))
            self._loop.call_soon_threadsafe(_answer, request, values, self.step)

    # the network thread

    async def snapshot(self, part: Slice) -> tuple[Tensor, int]:
        """Return the values of a slice after the next inner step, and the number of that step.

        The wait has no deadline of its own, because an inner step may take minutes. The partner's patience limits it.
        """
        request = _Request(part, self._loop.create_future())
        self._wanted.append(request)
        return await request.answer

    def committed(self, swap: Committed) -> None:
        self._committed.append(swap)


def _answer(request: _Request, values: Tensor, step: int) -> None:
    if not request.answer.done():  # the swap may have failed meanwhile
        request.answer.set_result((values, step))
