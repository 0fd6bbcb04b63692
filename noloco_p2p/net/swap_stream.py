"""Carry the frames of one swap over one or more connections, and restore their order.

Each connection carries one gRPC call. The sender numbers its frames, and writes each one to the first free connection.
A connection is free once gRPC has accepted its previous frame. The receiver holds frames that arrive early, and stops
reading from a connection that is too far ahead. For each connection, a peer therefore holds at most WINDOW_FRAMES
frames plus one that is being read and one that is being written, each of up to 1 MiB. With eight connections, the total
is 48 MiB, most of which is payloads that the swap keeps anyway.

Only the caller of a swap opens further connections, because only the caller knows the partner's address.
Both partners send on all connections. A broken connection ends the swap, because nobody keeps the frames that it
carried. No frame is lost when a connection is closed properly. In the protocol, a further connection is the call
`Lane`. A peer that does not know this call refuses it, and the swap continues on its first connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from noloco_p2p.errors import CorruptPayload, PeerError, TimedOut, Unreachable
from noloco_p2p.gossip.frames import Accept, Frame, Offer
from noloco_p2p.net import convert
from noloco_p2p.net.session import check_name
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.owned_tasks import end_tasks

MAX_CONNECTIONS = 8
WINDOW_FRAMES = 4  # per connection
LEAVE = pb.Frame(leave=pb.Leave()).SerializeToString()
LAST_WORDS_S = 0.5  # from the last message to the end of the stream


class Wire(Protocol):
    """A gRPC call, as seen by either peer. It carries ordered messages in both directions. Raises PeerError or one of
    its subclasses.
    """

    async def write(self, data: bytes) -> None:
        """Write a message, and return when gRPC can accept more."""
        ...

    async def read(self) -> bytes | None:
        """Read a message. The result is None if the partner has finished properly."""
        ...

    async def finish(self) -> None:
        """Finish writing."""
        ...

    async def close(self) -> None:
        """End the call, and drop data that is in flight."""
        ...


class Order:
    """A buffer that reorders frames by sequence number, starting at 1.

    A frame is accepted if its number is less than `window` ahead of the next frame to take.
    """

    def __init__(self) -> None:
        self._next = 1
        self._early: dict[int, Frame] = {}

    def __len__(self) -> int:
        return len(self._early)

    def has_room(self, sequence: int, *, window: int) -> bool:
        return sequence < self._next + window

    def put(self, sequence: int, frame: Frame) -> None:
        """Add a frame. Raises CorruptPayload if its number has already been used."""
        if sequence < self._next or sequence in self._early:
            raise CorruptPayload(f"frame {sequence} arrived twice")
        self._early[sequence] = frame

    def take(self) -> Frame | None:
        """Return the next frame, or None if it has not arrived."""
        frame = self._early.pop(self._next, None)
        if frame is not None:
            self._next += 1
        return frame


class SwapConnection:
    """A connection of a swap, with its state."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.writing: asyncio.Task[PeerError | None] | None = None
        self.reading: asyncio.Task[None] | None = None
        self.leaving = False  # accepts no more frames, but frames that it has accepted still arrive
        self.last_received = 0

    @property
    def is_free(self) -> bool:
        return not self.leaving and (self.writing is None or self.writing.done())


class SwapStream:
    """A FrameStream over one or more connections, for both partners of a swap. `close` ends all its tasks.

    An offer of the partner must bear the name `proven`, unless that is empty. `on_accepted` is called once, with the
    offer that one of the two has made and the other has accepted. From then on, several connections are allowed.
    """

    def __init__(
        self, first: Wire, *, peer: str, proven: str, is_caller: bool, on_accepted: Callable[[Offer], None]
    ) -> None:
        self.peer = peer
        self.accepted: Offer | None = None
        self.opening: asyncio.Task[None] | None = None  # the caller's task that opens further connections
        self._proven = proven
        self._is_caller = is_caller
        self._on_accepted = on_accepted
        self._connections: list[SwapConnection] = []
        self._order = Order()
        self._num_sent = 0
        self._gone: PeerError | None = None
        self._is_closing = False
        self._offer: tuple[Offer, bool] | None = None  # the first one, and whether this peer sent it
        self._freed, self._arrived, self._taken = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._first = self.add(first)

    @property
    def is_lost(self) -> bool:
        return self._gone is not None

    @property
    def num_connections(self) -> int:
        """Return the number of connections, not counting those that are closing."""
        return sum(not connection.leaving for connection in self._connections)

    async def send(self, frame: Frame) -> None:
        """Send a frame as soon as a connection is free. If there is only one, wait until it has accepted the frame."""
        connection = await self._free_connection()
        self._num_sent += 1
        self._heed(frame, is_own=True)
        writing = self._write(connection, convert.encode(frame, sequence=self._num_sent))
        if len(self._connections) == 1:
            # Cancelling a write would end the call, and the Abort that follows could not be sent.
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
                raise TimedOut(f"no frame arrived for {timeout_s:.1f} s", peer=self.peer) from None
        self._taken.set()
        return frame

    async def close(self) -> None:
        """Close the stream.

        If the partner is reading, it still receives everything that was sent before, such as a last Ready or Abort.
        """
        if self._is_closing:
            return
        self._is_closing = True
        self.lose(Unreachable("the stream is closed", peer=self.peer))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    if self.opening:
                        self.opening.cancel()
                        await asyncio.wait({self.opening})
                    await asyncio.gather(*map(self._leave, list(self._connections)))
        finally:
            connections, self._connections = self._connections, []
            tasks: list[asyncio.Task[Any]] = [self.opening] if self.opening else []
            for connection in connections:
                tasks += [task for task in (connection.reading, connection.writing) if task]
                await connection.wire.close()
            if tasks:
                # The tasks end with their calls, so none of them is cancelled inside gRPC unnecessarily.
                await asyncio.wait(tasks, timeout=LAST_WORDS_S)
            await end_tasks(tasks)

    def lose(self, fault: PeerError) -> None:
        """Let waiting readers fail with `fault` after they have read the frames that have arrived."""
        self._gone = self._gone or fault
        for event in (self._freed, self._arrived, self._taken):
            event.set()

    # connections

    def add(self, wire: Wire, *, first_words: bytes = b"") -> SwapConnection:
        """Use another connection."""
        connection = SwapConnection(wire)
        self._connections.append(connection)
        if first_words:
            self._write(connection, first_words)
        connection.reading = asyncio.create_task(self._read(connection))
        self._freed.set()
        return connection

    async def _leave(self, connection: SwapConnection) -> None:
        """Wait until everything is sent. The caller then stops using the connection, and the partner ends the call."""
        connection.leaving = True
        await self._written(connection)
        if self._is_caller:
            if connection is not self._first:
                await self._write(connection, LEAVE)
            await connection.wire.finish()
            if connection.reading:
                await asyncio.wait({connection.reading})

    async def _written(self, connection: SwapConnection) -> None:
        """Wait until gRPC has accepted the connection's last message."""
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

    def _write(self, connection: SwapConnection, data: bytes) -> asyncio.Task[PeerError | None]:
        async def write() -> PeerError | None:
            try:
                await connection.wire.write(data)
            except PeerError as fault:
                connection.leaving = True  # the stream ends when its reader has read all data that has arrived
                return fault
            finally:
                self._freed.set()
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
        """Read from a connection until its end. A broken connection ends the stream."""
        try:
            while (data := await connection.wire.read()) not in (None, LEAVE):
                await self._put(connection, *convert.decode(data))
            # This is how a lost connection looks to the called peer. The first connection always ends this way.
            if data is None and not self._is_caller and connection is not self._first:
                raise Unreachable("one of the swap's connections was lost", peer=self.peer)
            connection.leaving = True
            await self._written(connection)
            await connection.wire.close()
            if connection in self._connections:
                self._connections.remove(connection)
            if not self._connections:
                self.lose(Unreachable("the partner closed the stream", peer=self.peer))
        except PeerError as fault:
            self.lose(fault)

    async def _put(self, connection: SwapConnection, frame: Frame, sequence: int) -> None:
        if isinstance(frame, Offer):
            check_name(self._proven, frame.hello)
        if sequence <= connection.last_received:
            raise CorruptPayload(f"frame {sequence} arrived after frame {connection.last_received}", peer=self.peer)
        connection.last_received = sequence
        while (
            not self._order.has_room(sequence, window=WINDOW_FRAMES * len(self._connections)) and not self._is_closing
        ):
            self._taken.clear()
            await self._taken.wait()
        if self._is_closing:
            return  # the stream has ended
        self._order.put(sequence, frame)
        self._heed(frame, is_own=False)
        self._arrived.set()

    def _heed(self, frame: Frame, *, is_own: bool) -> None:
        """Watch for an offer and its acceptance by the other peer."""
        if isinstance(frame, Offer) and self._offer is None:
            self._offer = frame, is_own
        elif isinstance(frame, Accept) and self._offer and self._offer[1] is not is_own and not self.accepted:
            self.accepted = self._offer[0]
            self._on_accepted(self.accepted)


def call_cancelled(peer: str) -> Unreachable | asyncio.CancelledError:
    """Return the error to raise after a CancelledError in a gRPC call.

    Both a cancelled task and a gRPC call that has ended raise CancelledError. The result is a new exception, because
    the traceback of the original one refers to the call.
    """
    task = asyncio.current_task()
    return asyncio.CancelledError() if task and task.cancelling() else Unreachable("the stream is closed", peer=peer)
