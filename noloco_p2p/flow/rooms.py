"""Shares the slots of a replica among the heads, and the computing thread among the tasks of a peer."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from enum import IntEnum

from noloco_p2p.flow.frames import MicrobatchId
from noloco_p2p.flow.limits import FAIR_SHARES, MAX_HEADS, MAX_WANTS_PER_PEER


class Rooms:
    """The slots of a replica, and the microbatches that wait for one. Waiting heads get slots in turn.

    A head that has had more than twice its fair share of slots in this step must wait for the others. `new_step` resets
    the counts. `is_barred` returns whether a head must wait for another reason.
    """

    def __init__(self, number: int, *, is_barred: Callable[[str], bool] = lambda head: False) -> None:
        self.held: set[MicrobatchId] = set()  # microbatches with a slot
        self._number = number
        self._is_barred = is_barred
        self._waiting: dict[MicrobatchId, tuple[str, asyncio.Future[None]]] = {}  # in order of arrival, with the peer
        self._num_served: dict[str, int] = {}  # slots per head, the most recently served head last

    def __len__(self) -> int:
        return len(self._waiting)

    def is_crowded(self, peer: str) -> bool:
        """Return whether a neighbour has too many microbatches waiting."""
        return sum(other == peer for other, _ in self._waiting.values()) >= MAX_WANTS_PER_PEER

    def ask(self, id: MicrobatchId, peer: str) -> asyncio.Future[None]:
        """Ask for a slot. The future is done once the microbatch has one. Call `release` in either case."""
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[id] = peer, asked
        self.grant()
        return asked

    def release(self, id: MicrobatchId) -> None:
        self._waiting.pop(id, None)
        self.held.discard(id)
        self.grant()

    def grant(self) -> None:
        """Give free slots to those who wait. Call this method when a head may no longer be barred."""
        while len(self.held) < self._number and (id := self._next()):
            _, asked = self._waiting.pop(id)
            self.held.add(id)
            if not asked.done():
                asked.set_result(None)

    def new_step(self) -> None:
        self._num_served.clear()

    def _next(self) -> MicrobatchId | None:
        heads = [head for head in dict.fromkeys(id.head for id in self._waiting) if not self._is_barred(head)]
        if not heads:
            return None
        num_heads = len(self._num_served.keys() | set(heads))
        most = FAIR_SHARES * sum(self._num_served.values()) / num_heads
        modest = [head for head in heads if self._num_served.get(head, 0) <= most]
        turns = {head: turn for turn, head in enumerate(self._num_served, 1)}
        head = min(modest or heads, key=lambda head: turns.get(head, 0))  # min returns the first of equal items
        self._num_served[head] = self._num_served.pop(head, 0) + 1
        if len(self._num_served) > MAX_HEADS:
            del self._num_served[next(iter(self._num_served))]
        return next(id for id in self._waiting if id.head == head)


class Kind(IntEnum):
    """The tasks of the only thread that touches the weights, in order of urgency.

    Backward passes come before other tasks on microbatches because they free slots.
    """

    CLOSE_STEP = 0
    BACKWARD = 1
    LOSS = 2  # at a head, from the returned activations to their gradient
    FORWARD = 3


class Turns:
    """Lets tasks take turns at the computing thread, the most urgent one first.

    The task after the running one also has a turn, so that its input can be decoded in the meantime. Closing a step
    waits until no other task has a turn.
    """

    def __init__(self, number: int = 2) -> None:
        self.number = number
        self._num_taken = 0
        self._num_asked = 0
        # A heap of kinds, places in the order of arrival, and turns that each takes.
        self._waiting: list[tuple[Kind, int, int, asyncio.Future[None]]] = []

    def __len__(self) -> int:
        return self._num_taken

    @asynccontextmanager
    async def take(self, kind: Kind) -> AsyncGenerator[None]:
        share = self.number if kind is Kind.CLOSE_STEP else 1
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_asked += 1
        heapq.heappush(self._waiting, (kind, self._num_asked, share, turn))
        self._pass_on()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._num_taken -= share
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, share, turn = self._waiting[0]
            if not turn.done():  # a turn that is done was cancelled while its task waited
                if self._num_taken + share > self.number:
                    return
                self._num_taken += share
                turn.set_result(None)
            heapq.heappop(self._waiting)
