"""The stream of frames of one swap, over one connection or more: spread over them, and put in order again.

Each connection carries one gRPC call. The sender numbers its frames and puts each on the connection that is free first;
it is free when it has taken its last frame. The receiver holds early frames back until their turn, and does not read on
from a connection that is too far ahead. So each side holds, for every connection, WINDOW_FRAMES and one more that are
read and one that is written, of 1 MiB at most: with eight of them 48 MiB, most of it payloads that a swap keeps anyway.

Only the caller of a swap opens further connections and leaves them, for it knows an address; both sides send on all.
One that breaks ends the swap, as nobody keeps what it took; one that is left takes nothing with it. On the wire a
further connection is the call `Lane`, and the feature is named "lanes".
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Protocol

from noloco_p2p.errors import CorruptPayload, PeerError, TimedOut, Unreachable
from noloco_p2p.gossip.frames import Accept, Frame, Offer
from noloco_p2p.net import framing
from noloco_p2p.net.connection_tuning import Direction
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

FEATURE = "lanes"  # in Hello: this peer joins connections to a swap
MAX_CONNECTIONS = 8
WINDOW_FRAMES = 4  # per connection
LEAVE = pb.Frame(leave=pb.Leave()).SerializeToString()
LAST_WORDS_S = 0.5  # from the end of what is sent to the end of the stream


class Wire(Protocol):
    """One gRPC call, from either side: messages in order, both ways. Raises PeerError and its children."""

    async def write(self, data: bytes) -> None:
        """Returns when gRPC has room for more."""
        ...

    async def read(self) -> bytes | None:
        """None = the other side has written its last, in peace."""
        ...

    async def finish(self) -> None:
        """This side has written its last."""
        ...

    async def close(self) -> None:
        """The call is over, whatever is on its way."""
        ...


class Order:
    """Frames in the order of their numbers, from 1. Holds less than `window` frames more than can be taken."""

    def __init__(self) -> None:
        self._next = 1
        self._early: dict[int, Frame] = {}

    def __len__(self) -> int:
        return len(self._early)

    def has_room(self, sequence: int, *, window: int) -> bool:
        return sequence < self._next + window

    def put(self, sequence: int, frame: Frame) -> None:
        """Raises CorruptPayload for a number that has been used."""
        if sequence < self._next or sequence in self._early:
            raise CorruptPayload(f"frame {sequence} came twice")
        self._early[sequence] = frame

    def take(self) -> Frame | None:
        """The next one, if it is here."""
        frame = self._early.pop(self._next, None)
        if frame is not None:
            self._next += 1
        return frame


class SwapConnection:
    """A wire and what a stream knows of it."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.number = 0
        self.writing: asyncio.Task[PeerError | None] | None = None
        self.reading: asyncio.Task[None] | None = None
        self.leaving = False  # takes no more frames; what it has taken still comes through
        self.last_received = 0

    @property
    def is_free(self) -> bool:
        return not self.leaving and (self.writing is None or self.writing.done())


class SwapStream:
    """A FrameStream over one connection or more, for both sides of a swap. Its tasks end in `close`, or with `lose`."""

    def __init__(self, peer: str, first: Wire) -> None:
        self._peer = peer
        self._connections: list[SwapConnection] = []
        self._first = SwapConnection(first)
        self._order = Order()
        self._num_sent = 0
        self._num_added = 0
        self._is_numbered = False
        self._gone: PeerError | None = None
        self._is_closing = False
        self._offer: tuple[Offer, Direction] | None = None
        self._is_answered = False
        self._freed, self._arrived, self._taken = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.add(self._first)

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def num_connections(self) -> int:
        """Without those that are being left."""
        return sum(not connection.leaving for connection in self._connections)

    async def send(self, frame: Frame) -> None:
        """Waits until a connection is free; with one connection, until it has taken the frame."""
        connection = await self._free_connection()
        self._num_sent += 1
        frame = _with_feature(frame)
        self._heed(frame, Direction.SENT)
        data = framing.encode(frame, sequence=self._num_sent if self._is_numbered else 0)
        writing = self._write(connection, data, frame)
        if len(self._connections) == 1:
            # A write that is cancelled would take the call with it, and the farewell that is to follow.
            fault = await asyncio.shield(writing)
            if fault:
                raise fault

    async def receive(self, timeout_s: float) -> Frame:
        frame = self._order.take()
        if frame is None:
            try:
                async with asyncio.timeout(timeout_s):
                    frame = await self._next()
            except TimeoutError:
                raise TimedOut(f"nothing came for {timeout_s:.1f} s", peer=self._peer) from None
        self._taken.set()
        return frame

    async def close(self) -> None:
        """The other side hears all that was sent before, a last Ready or Abort above all, if it takes it at once."""
        if self._is_closing:
            return
        self._is_closing = True
        self.lose(Unreachable("the stream is closed", peer=self._peer))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._last_words()
        finally:
            await self._end()

    def lose(self, fault: PeerError) -> None:
        """Whoever waits for a frame gets `fault`, after the frames that are already here."""
        self._gone = self._gone or fault
        for event in (self._freed, self._arrived, self._taken):
            event.set()

    # what differs between the two sides

    def _agreed(self, offer: Offer) -> None:
        """The offer is accepted, and both sides can have several connections."""

    def _moved(self, direction: Direction, frame: Frame, *, connection: int) -> None:
        """A frame is through."""

    async def _last_words(self) -> None:
        """Until all that was sent is out, or longer."""
        for connection in list(self._connections):
            await self._written(connection)

    def _check_end(self, connection: SwapConnection) -> None:
        """The other side has ended the connection without a Leave. Raises Unreachable when that is no peaceful end."""

    async def _end(self) -> None:
        """Ends all tasks and calls."""
        connections, self._connections = self._connections, []
        for connection in connections:
            await connection.wire.close()
        tasks = [
            task
            for connection in connections
            for task in (connection.reading, connection.writing)
            if task and not task.done()
        ]
        if tasks:
            # They end with their call; none is cut off inside gRPC that can do without.
            await asyncio.wait(tasks, timeout=LAST_WORDS_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # connections

    def add(self, connection: SwapConnection, *, first_words: bytes = b"") -> None:
        """From now on frames are numbered, and may go this way."""
        self._connections.append(connection)
        connection.number = self._num_added = self._num_added + 1
        self._is_numbered = len(self._connections) > 1 or self._is_numbered
        if first_words:
            self._write(connection, first_words)
        connection.reading = asyncio.create_task(self._read(connection))
        self._freed.set()

    def _left(self, connection: SwapConnection) -> None:
        """It takes nothing more in either direction."""
        if connection in self._connections:
            self._connections.remove(connection)
        if not self._connections:
            self.lose(Unreachable("the other side closed the stream", peer=self._peer))

    async def _written(self, connection: SwapConnection) -> None:
        """Until the connection has taken what was given to it."""
        if connection.writing:
            await asyncio.wait({connection.writing})

    # sending

    async def _free_connection(self) -> SwapConnection:
        while True:
            if self._gone:
                raise self._gone
            for connection in self._connections:
                if connection.is_free:
                    return connection
            self._freed.clear()
            await self._freed.wait()

    def _write(
        self, connection: SwapConnection, data: bytes, frame: Frame | None = None
    ) -> asyncio.Task[PeerError | None]:
        async def write() -> PeerError | None:
            try:
                await connection.wire.write(data)
            except PeerError as fault:
                connection.leaving = True  # the stream ends when its reader finds the end, behind what has arrived
                return fault
            finally:
                self._freed.set()
            if frame is not None:
                self._moved(Direction.SENT, frame, connection=connection.number)
            return None

        connection.writing = asyncio.create_task(write())
        return connection.writing

    # receiving

    async def _next(self) -> Frame:
        while (frame := self._order.take()) is None:
            if self._gone:
                raise self._gone
            self._arrived.clear()
            await self._arrived.wait()
        return frame

    async def _read(self, connection: SwapConnection) -> None:
        """Runs for the life of a connection. What breaks one connection ends the stream."""
        try:
            while (data := await connection.wire.read()) is not None:
                if data == LEAVE:
                    break
                frame, sequence = framing.decode(data)
                await self._put(connection, frame, sequence)
            else:
                self._check_end(connection)
            connection.leaving = True
            await self._written(connection)
            await connection.wire.close()
            self._left(connection)
        except PeerError as fault:
            self.lose(fault)

    async def _put(self, connection: SwapConnection, frame: Frame, sequence: int) -> None:
        sequence = sequence or connection.last_received + 1
        if sequence <= connection.last_received:
            raise CorruptPayload(f"frame {sequence} came after frame {connection.last_received}", peer=self._peer)
        connection.last_received = sequence
        self._moved(Direction.RECEIVED, frame, connection=connection.number)
        while (
            not self._order.has_room(sequence, window=WINDOW_FRAMES * len(self._connections)) and not self._is_closing
        ):
            self._taken.clear()
            await self._taken.wait()
        if self._is_closing:
            return  # nobody takes it any more
        self._order.put(sequence, frame)
        self._heed(frame, Direction.RECEIVED)
        self._arrived.set()

    def _heed(self, frame: Frame, direction: Direction) -> None:
        """An offer one way and its answer the other way tell whether there may be several connections."""
        if isinstance(frame, Offer) and self._offer is None:
            self._offer = frame, direction
        elif isinstance(frame, Accept) and self._offer and self._offer[1] is not direction and not self._is_answered:
            self._is_answered = True
            offer = self._offer[0]
            if FEATURE in offer.hello.features and FEATURE in frame.hello.features:
                self._agreed(offer)


def call_cancelled(peer: str) -> Unreachable | asyncio.CancelledError:
    """What to raise: a gRPC call that has ended may raise CancelledError in whoever uses it, and so does a task that is
    cancelled. A new one for it, as the one that came has the call in its traceback."""
    task = asyncio.current_task()
    return asyncio.CancelledError() if task and task.cancelling() else Unreachable("the stream is closed", peer=peer)


def _with_feature(frame: Frame) -> Frame:
    if isinstance(frame, Offer | Accept) and FEATURE not in frame.hello.features:
        return replace(frame, hello=replace(frame.hello, features=(*frame.hello.features, FEATURE)))
    return frame
