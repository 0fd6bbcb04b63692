"""Injects a fault at a chosen frame that a peer sends. The same choice always causes the same fault.

For example:

faults = Faults(Chunk, flip_bit(3), nth=2)       # the second chunk that the peer sends
peer = swarm.peer("a", wrap=faults)
...
assert faults.fired == 1                         # the fault has happened
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import UnionType
from typing import Any, Literal

from noloco_p2p.errors import Unreachable
from noloco_p2p.gossip.frames import Chunk, Frame
from noloco_p2p.gossip.seams import FrameStream

# A cut breaks the connection in both directions, and the frame is not delivered. A stall delivers neither this frame
# nor any later one of its stream, without any notice. A dropped frame is lost, but all later ones are delivered. A
# repeated frame arrives twice, and a late one after the next one. A function returns the frame that arrives instead.
Fault = Literal["cut", "stall", "drop", "repeat", "late"] | Callable[[Any], Frame]


def flip_bit(bit: int) -> Callable[[Chunk], Chunk]:
    """Return a change that flips one bit of a chunk's payload."""

    def flip(chunk: Chunk) -> Chunk:
        payload = bytearray(chunk.payload)
        payload[bit // 8 % len(payload)] ^= 1 << bit % 8
        return Chunk(bytes(payload))

    return flip


class Faults:
    """Wraps the streams of a peer. `fired` is the number of faults that have happened.

    `fault` happens at the `nth` frame of this kind, counted from 1 over all streams, that the peer sends. With `again`,
    it also happens at every later one. `on_fault` is called at that moment, for example to make the whole peer vanish.
    """

    def __init__(
        self,
        kind: type[Frame] | UnionType,
        fault: Fault,
        *,
        nth: int = 1,
        again: bool = False,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self.fired = 0
        self._kind = kind
        self._fault: Fault = fault
        self._left = nth  # frames until the fault, including the one with the fault
        self._again = again
        self._on_fault = on_fault

    def __call__(self, stream: FrameStream) -> FrameStream:
        return _FaultyStream(stream, self)

    def at(self, frame: Frame) -> Fault | None:
        """Count a frame, and return the fault that happens to it."""
        if not isinstance(frame, self._kind):
            return None
        self._left -= 1
        if self._left > 0 or (self._left < 0 and not self._again):
            return None
        self.fired += 1
        self._on_fault()
        return self._fault


class _FaultyStream:
    def __init__(self, stream: FrameStream, faults: Faults) -> None:
        self._stream = stream
        self._faults = faults
        self._closed = asyncio.Event()
        self._is_stalled = False
        self._held: list[Frame] = []

    @property
    def peer(self) -> str:
        return self._stream.peer

    async def send(self, frame: Frame) -> None:
        fault = None if self._is_stalled else self._faults.at(frame)
        if fault == "cut":
            await self.close()
            raise Unreachable("the connection was cut", peer=self.peer)
        if fault == "stall" or self._is_stalled:
            self._is_stalled = True
            await self._closed.wait()
            raise Unreachable("the stream is closed", peer=self.peer)
        held, self._held = self._held, [frame] if fault == "late" else []
        now = [] if fault in ("drop", "late") else [fault(frame) if callable(fault) else frame]
        for each in (*now, *(now if fault == "repeat" else ()), *held):
            await self._stream.send(each)

    async def receive(self, timeout_s: float) -> Frame:
        return await self._stream.receive(timeout_s)

    async def close(self) -> None:
        self._closed.set()
        await self._stream.close()
