"""Carry frames over one stream between two neighbours in a pipeline.

Frames without a payload are sent first, then backward frames, then forward frames. A more urgent frame can be sent
between two pieces of a less urgent one. On the receiving end, at most one payload per direction is held, and its size
is known from the spec. Nothing more is read while a payload is checked or while answers wait to be sent, so a peer that
floods this one only slows itself down.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

from noloco_p2p.errors import CorruptPayload, PeerError, TimedOut, Unreachable
from noloco_p2p.flow.frames import Backward, Forward, Frame, Want
from noloco_p2p.gossip.frames import Refuse, chunk_digest
from noloco_p2p.net import flow_wire
from noloco_p2p.net.flow_wire import PIECE_BYTES, FlowHello, Piece, WireFrame
from noloco_p2p.net.swap_stream import Wire

STUCK_S = 30.0  # longest wait to send a message, or for the next piece of a payload; enough for 1 MiB at 0.3 Mbit/s
MAX_QUEUED = 1024  # frames without a payload; a neighbour that lets the queue fill up is stuck
PAUSE_QUEUED = 256  # with a longer queue, nothing is read, because each frame that is read is answered


@dataclass(frozen=True, slots=True)
class PayloadSizes:
    """The sizes of a microbatch's payloads, encoded with the codecs in the spec."""

    forward_bytes: int
    backward_bytes: int


class Outbound:
    """A queue of payloads in one direction. Its length is bounded by the memory limits of both peers."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Forward | Backward, float]] = deque()  # with the time at which each began to wait
        self._pieces: Iterator[Piece] = iter(())

    def add(self, frame: Forward | Backward, since_s: float) -> None:
        self._waiting.append((frame, since_s))

    def next(self, now_s: float) -> WireFrame | None:
        piece = next(self._pieces, None)
        if piece is not None or not self._waiting:
            return piece
        frame, since_s = self._waiting.popleft()
        payload = frame.payload
        assert isinstance(payload, memoryview)
        self._pieces = _pieces(payload, is_backward=isinstance(frame, Backward))
        if isinstance(frame, Backward):
            return Backward(frame.id, payload.nbytes)
        return Forward(frame.id, _left(frame.remaining_s, now_s - since_s), payload.nbytes)


class ArrivingPayload:
    """A payload of `num_bytes` bytes that is arriving. `frame` is the frame that announced it."""

    def __init__(self, frame: Forward | Backward, num_bytes: int, now_s: float) -> None:
        self._frame = frame
        self._since_s = now_s
        self._data = bytearray(num_bytes)
        self._num_bytes = 0
        self._is_whole = True

    def take(self, piece: Piece, now_s: float) -> Forward | Backward | None:
        """Add a piece, and return the frame once the payload is complete. Its payload is None if a digest was wrong.

        Raises CorruptPayload for a piece of the wrong size.
        """
        begin, expected = self._num_bytes, min(PIECE_BYTES, len(self._data) - self._num_bytes)
        if len(piece.payload) != expected:
            raise CorruptPayload(f"a piece has {len(piece.payload)} bytes instead of {expected}")
        self._is_whole &= chunk_digest(piece.payload) == piece.digest
        self._num_bytes += expected
        self._data[begin : self._num_bytes] = piece.payload
        if self._num_bytes < len(self._data):
            return None
        payload = memoryview(self._data) if self._is_whole else None
        if isinstance(self._frame, Backward):
            return Backward(self._frame.id, payload)
        return Forward(self._frame.id, _left(self._frame.remaining_s, now_s - self._since_s), payload)


class FlowLink:
    """A stream to one neighbour. Its creator runs `run`, which is the only user of the connection.

    `checked` checks a frame and returns it, or raises CorruptPayload. It is awaited before the next frame is read.
    `received` is called with each frame, in order, until the link is stopped.
    """

    def __init__(
        self,
        peer: str,
        stage: int,
        wire: Wire,
        *,
        sizes: PayloadSizes,
        checked: Callable[[str, Frame], Awaitable[Frame]],
        received: Callable[[str, Frame], None],
        first_words: bytes = b"",
        is_dialled: bool = False,
        stuck_s: float = STUCK_S,
    ) -> None:
        self.peer, self.stage, self.is_dialled = peer, stage, is_dialled
        self._clock = asyncio.get_running_loop().time
        self.opened_s = self.used_s = self._clock()
        # The time of the last payload in either direction, or of the opening if there was none.
        self.worked_s = self.opened_s
        self._wire = wire
        self._sizes = sizes
        self._checked, self._received = checked, received
        self._first_words = first_words
        self._stuck_s = stuck_s
        self._control: deque[tuple[Frame, float]] = deque()
        self._backwards, self._forwards = Outbound(), Outbound()
        self._inbound: dict[bool, ArrivingPayload] = {}  # keyed by whether the payload is a Backward
        self._something_to_send = asyncio.Event()
        self._few_queued = asyncio.Event()
        self._few_queued.set()
        self._stopped: asyncio.Future[PeerError] = asyncio.get_running_loop().create_future()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.done()

    def send(self, frame: Frame, since_s: float) -> None:
        """Queue a frame for sending. `since_s` is the time on the event loop's clock at which it was ready.

        This never waits and never raises an error.
        """
        self.used_s = self._clock()
        self._note_work(frame)
        if isinstance(frame, Backward):
            self._backwards.add(frame, since_s)
        elif isinstance(frame, Forward):
            self._forwards.add(frame, since_s)
        elif len(self._control) < MAX_QUEUED:
            self._control.append((frame, since_s))
        else:
            self.stop(
                TimedOut(f"the neighbour is too slow: {MAX_QUEUED} frames are waiting to be sent", peer=self.peer)
            )
        if len(self._control) >= PAUSE_QUEUED:
            self._few_queued.clear()
        self._something_to_send.set()

    def _note_work(self, frame: Frame) -> None:
        if isinstance(frame, Forward | Backward):
            self.worked_s = self._clock()

    def stop(self, fault: PeerError) -> None:
        """Stop receiving, and end `run`."""
        if not self._stopped.done():
            self._stopped.set_result(fault)

    async def run(self) -> PeerError:
        """Carry frames in both directions until the stream ends, then close it and return the error that ended it."""
        tasks = [asyncio.create_task(self._until_fault(way)) for way in (self._read_all, self._write_all)]
        try:
            return await self._stopped
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._wire.close()

    async def _until_fault(self, way: Callable[[], Coroutine[Any, Any, None]]) -> None:
        fault: PeerError = Unreachable("the neighbour closed the stream", peer=self.peer)
        try:
            await way()
        except PeerError as error:
            fault = error
        except TimeoutError:
            fault = TimedOut(f"the neighbour has not sent or accepted any data for {self._stuck_s:g} s", peer=self.peer)
        self.stop(fault)

    # out

    async def _write_all(self) -> None:
        if self._first_words:
            await self._write(self._first_words)
        while True:
            frame = self._next()
            if frame is None:
                self._something_to_send.clear()
                await self._something_to_send.wait()
            else:
                await self._write(flow_wire.encode(frame))

    async def _write(self, data: bytes) -> None:
        async with asyncio.timeout(self._stuck_s):
            await self._wire.write(data)

    def _next(self) -> WireFrame | None:
        now_s = self._clock()
        if not self._control:
            return self._backwards.next(now_s) or self._forwards.next(now_s)
        frame, since_s = self._control.popleft()
        if len(self._control) < PAUSE_QUEUED:
            self._few_queued.set()
        assert not isinstance(frame, Forward | Backward)
        return (
            replace(frame, remaining_s=_left(frame.remaining_s, now_s - since_s)) if isinstance(frame, Want) else frame
        )

    # in

    async def _read_all(self) -> None:
        while True:
            async with asyncio.timeout(self._stuck_s if self._inbound else None):
                data = await self._wire.read()
            if data is None:
                return
            self.used_s = self._clock()
            frame = self._taken(flow_wire.decode(data))
            if frame is not None:
                frame = await self._checked(self.peer, frame)
                if self.is_stopped:
                    return
                self._note_work(frame)
                self._received(self.peer, frame)
            await self._few_queued.wait()  # until `_write` continues

    def _taken(self, frame: WireFrame) -> Frame | None:
        """Return a complete frame, or None while its payload is incomplete. Raises CorruptPayload."""
        match frame:
            case Forward() | Backward():
                is_backward = isinstance(frame, Backward)
                expected = self._sizes.backward_bytes if is_backward else self._sizes.forward_bytes
                if frame.payload != expected:
                    why = f"it has {frame.payload} bytes instead of {expected}"
                    raise CorruptPayload(f"an invalid payload was announced: {why}", peer=self.peer)
                if is_backward in self._inbound:
                    raise CorruptPayload("a payload was announced before the previous one was complete", peer=self.peer)
                self._inbound[is_backward] = ArrivingPayload(frame, expected, self._clock())
                return None
            case Piece(is_backward):
                if is_backward not in self._inbound:
                    raise CorruptPayload("received a piece of a payload that was not announced", peer=self.peer)
                whole = self._inbound[is_backward].take(frame, self._clock())
                if whole is not None:
                    del self._inbound[is_backward]
                return whole
            case FlowHello() | Refuse():
                raise CorruptPayload("received a FlowHello or Refuse after the start of the stream", peer=self.peer)
            case _:
                return frame


def _pieces(payload: memoryview, *, is_backward: bool) -> Iterator[Piece]:
    for begin in range(0, payload.nbytes, PIECE_BYTES):
        data = bytes(payload[begin : begin + PIECE_BYTES])
        yield Piece(is_backward, data, chunk_digest(data))


def _left(remaining_s: float, held_s: float) -> float:
    return max(0.0, remaining_s - held_s)
