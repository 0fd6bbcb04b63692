"""Simulates a link that the pipeline shares with swaps. Backward frames have priority over forward frames.

A swap gets a fifth of the link while frames of the pipeline are waiting, and the whole link otherwise. A more urgent
frame interrupts a less urgent one, because frames travel in chunks. Incoming traffic is shared in the same way as
outgoing traffic, because the senders use the same order.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from noloco_p2p.testing.links import BUFFER_S, Link, LinkProfile

SWAP_SHARE = 0.2  # share of the link that a swap gets while frames of the pipeline are waiting
FASTEST = 1e15  # bytes per second of an unlimited link; not infinity, because infinity times 0 is undefined
DONE_BYTES = 1e-3  # tolerance for rounding


class Urgency(IntEnum):
    BACKWARD = 0
    FORWARD = 1


@dataclass(slots=True, eq=False)
class Cargo:
    left: float  # bytes
    then: Callable[[], object]
    on_begin: Callable[[], object] | None = None


class SharedWay:
    """One direction of a link, without delay. It counts its busy time and the bytes of the pipeline and of swaps."""

    def __init__(self, mbit_s: float) -> None:
        self.bytes_per_s = min(mbit_s * 1e6 / 8, FASTEST)
        self.busy_s = 0.0
        self.flow_bytes = self.swap_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._flow: list[tuple[Urgency, int, Cargo]] = []  # a heap
        self._swaps: deque[Cargo] = deque()
        self._num_entered = 0
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def carry(
        self, num_bytes: int, urgency: Urgency, then: Callable[[], object], on_begin: Callable[[], object] | None = None
    ) -> None:
        """Accept a frame of the pipeline. `on_begin` is called when its first byte leaves."""
        self._advance()
        self.flow_bytes += num_bytes
        self._num_entered += 1
        heapq.heappush(self._flow, (urgency, self._num_entered, Cargo(num_bytes, then, on_begin)))
        self._plan()

    def carry_swap(self, num_bytes: int, then: Callable[[], object]) -> None:
        self._advance()
        self.swap_bytes += num_bytes
        self._swaps.append(Cargo(num_bytes, then))
        self._plan()

    def swap_backlog_s(self) -> float:
        """Return how many seconds the queued bytes of swaps would take if the pipeline did not use the link."""
        return sum(cargo.left for cargo in self._swaps) / self.bytes_per_s

    def _served(self) -> list[tuple[Cargo, float]]:
        """Return the items that are being sent, with their rates."""
        if not self._flow:
            return [(self._swaps[0], self.bytes_per_s)] if self._swaps else []
        flow = self._flow[0][2]
        if not self._swaps:
            return [(flow, self.bytes_per_s)]
        return [(flow, (1 - SWAP_SHARE) * self.bytes_per_s), (self._swaps[0], SWAP_SHARE * self.bytes_per_s)]

    def _advance(self) -> None:
        now_s = self._loop.time()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        served = self._served()
        for cargo, rate in served:
            cargo.left -= rate * elapsed_s
        self.busy_s += elapsed_s if served else 0.0

    def _plan(self) -> None:
        """Schedule `_finish` for the moment at which the next item has left the link."""
        if self._timer:
            self._timer.cancel()
        served = self._served()
        for cargo, _ in served:
            if cargo.on_begin:
                begin, cargo.on_begin = cargo.on_begin, None
                begin()
        due_s = min((max(0.0, cargo.left) / rate for cargo, rate in served), default=None)
        self._timer = None if due_s is None else self._loop.call_later(due_s, self._finish)

    def _finish(self) -> None:
        self._advance()
        done = [cargo for cargo, _ in self._served() if cargo.left <= DONE_BYTES]
        if self._flow and self._flow[0][2] in done:
            heapq.heappop(self._flow)
        if self._swaps and self._swaps[0] in done:
            self._swaps.popleft()
        self._plan()
        for cargo in done:
            cargo.then()


class SwapWay:
    """The `LinkDirection` of the swaps on a shared link."""

    def __init__(self, way: SharedWay, delay_s: float) -> None:
        self._way = way
        self._delay_s = delay_s

    def carry(self, num_bytes: int, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._way.carry_swap(num_bytes, lambda: loop.call_later(self._delay_s, then))

    async def drain(self) -> None:
        await asyncio.sleep(max(0.0, self._way.swap_backlog_s() - BUFFER_S))


class SharedLink:
    """The link of one peer.

    The delay includes the mean of the jitter, so that the frames of a stream keep their order.
    """

    def __init__(self, profile: LinkProfile) -> None:
        self.up = SharedWay(profile.up_mbit_s)
        self.down = SharedWay(profile.down_mbit_s)
        self.delay_s = (profile.delay_ms + profile.jitter_ms / 2) / 1e3

    @property
    def for_swaps(self) -> Link:
        return Link(SwapWay(self.up, self.delay_s), SwapWay(self.down, self.delay_s), self.delay_s)


def transfer(
    here: SharedLink, there: SharedLink, num_bytes: int, urgency: Urgency, arrived: Callable[[], object]
) -> None:
    """Send a frame of the pipeline from one link to another.

    It passes through both links at the same time, because the second link does not wait for the whole frame.
    """
    loop = asyncio.get_running_loop()
    delay_s = here.delay_s + there.delay_s
    halves = 0

    def half() -> None:
        nonlocal halves
        halves += 1
        if halves == 2:
            arrived()

    def begin() -> None:
        loop.call_later(delay_s, there.down.carry, num_bytes, urgency, half)

    here.up.carry(num_bytes, urgency, lambda: loop.call_later(delay_s, half), begin)
