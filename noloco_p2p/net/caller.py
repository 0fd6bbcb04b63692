"""Implement the caller's side of a swap, which opens further connections to a distant partner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc.aio import EOF  # pyright: ignore[reportAttributeAccessIssue] - missing in the stubs

from noloco_p2p.errors import CorruptPayload, PeerError, Unreachable
from noloco_p2p.gossip.frames import Hello, Offer
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net import convert
from noloco_p2p.net.connection import SERVICE, Connection, Connector, refused, translate
from noloco_p2p.net.swap_stream import LEAVE, SwapConnection, SwapStream, call_cancelled
from noloco_p2p.net.throttle import Limits
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

log = logging.getLogger(__name__)

# These methods are called with bytes, because convert.py encodes and decodes the frames.
SWAP_METHOD, CONNECTION_METHOD = f"/{SERVICE}/Swap", f"/{SERVICE}/Lane"
OPEN_CONNECTION_S = 5.0  # to connect, and as much again for the answer


class CallerWire:
    """A call on its own connection.

    The connection ends when the last reference to the call is dropped. `close` therefore drops its reference, and the
    tracebacks of errors raised here do not refer to the call. Otherwise, a stored error would keep the connection open
    until the next garbage collection.
    """

    def __init__(self, peer: str, connection: Connection, call: Any, limits: Limits) -> None:
        self.round_trip_s = connection.round_trip_s
        self._peer = peer
        self._channel: grpc.aio.Channel | None = connection.channel
        self._call: Any = call
        self._limits = limits

    async def write(self, data: bytes) -> None:
        await self._limits.sending(len(data))
        await self._do(lambda call: call.write(data))

    async def read(self) -> bytes | None:
        message = await self._do(lambda call: call.read())
        if message is EOF:
            return None
        await self._limits.receiving(len(message))
        return message

    async def finish(self) -> None:
        with contextlib.suppress(PeerError):
            await self._do(lambda call: call.done_writing())

    async def close(self) -> None:
        (call, self._call), (channel, self._channel) = (self._call, None), (self._channel, None)
        if channel is not None:
            call.cancel()
            await channel.close()

    async def _do(self, action: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run `action` on the call. Raises PeerError if the call has ended."""
        fault: PeerError | asyncio.CancelledError = Unreachable("the stream is closed", peer=self._peer)
        if self._call is not None:
            try:
                return await action(self._call)
            except grpc.aio.AioRpcError as error:
                fault = translate(error, self._peer)
            except (grpc.aio.UsageError, asyncio.InvalidStateError):  # a write after the end of the call raises these
                pass
            except asyncio.CancelledError:
                fault = call_cancelled(self._peer)
        raise fault


class CallerStream(SwapStream):
    """The caller's stream of a swap. It opens further connections once the partner has accepted the offer."""

    def __init__(
        self,
        candidate: Candidate,
        first: CallerWire,
        *,
        connector: Connector,
        hello: Callable[[], Hello],
        num_connections: int,
        limits: Limits,
    ) -> None:
        self._candidate = candidate
        self._connector = connector
        self._hello = hello
        self._num_wanted = num_connections
        self._limits = limits
        self._growing: asyncio.Task[None] | None = None
        super().__init__(candidate.peer_id, first)

    def _agreed(self, offer: Offer) -> None:
        self._growing = asyncio.create_task(self._grow(offer))

    async def _grow(self, offer: Offer) -> None:
        await asyncio.gather(*(self._open_connection(offer) for _ in range(self._num_wanted - 1)))

    async def _open_connection(self, offer: Offer) -> None:
        """Open another connection. If that fails, the swap continues unchanged."""
        try:
            wire = await connect(
                self._connector, self._candidate, CONNECTION_METHOD, timeout_s=OPEN_CONNECTION_S, limits=self._limits
            )
            try:
                await asyncio.wait_for(self._join(wire, offer), OPEN_CONNECTION_S)
            except BaseException:
                await wire.close()
                raise
        except (PeerError, TimeoutError) as error:
            log.debug("could not open another connection to %s: %s", self._candidate.address, error)
            return
        self.add(SwapConnection(wire))

    async def _join(self, wire: CallerWire, offer: Offer) -> None:
        """Join the swap on a new connection. Raises Refused or another PeerError."""
        join = pb.Join(hello=convert.to_wire(self._hello()), swap_id=offer.swap_id)
        await wire.write(pb.Frame(join=join).SerializeToString())
        try:
            answer = pb.Frame.FromString(await wire.read() or b"")
        except DecodeError:
            raise CorruptPayload(
                "the reply on an additional connection is not a valid frame", peer=self._peer
            ) from None
        if answer.HasField("refuse"):
            raise refused(answer.refuse, self._peer)
        if not answer.HasField("join"):
            raise CorruptPayload(
                "the reply on an additional connection is neither a Join nor a Refuse", peer=self._peer
            )

    async def _leave(self, connection: SwapConnection) -> None:
        """Stop using a connection. The partner receives everything that was sent, and ends the call."""
        connection.leaving = True
        await self._written(connection)
        if connection is not self._first:
            await self._write(connection, LEAVE)
        await connection.wire.finish()

    async def _last_words(self) -> None:
        if self._growing:
            self._growing.cancel()
            await asyncio.wait({self._growing})
        connections = list(self._connections)
        await asyncio.gather(*(self._leave(connection) for connection in connections))
        for connection in connections:
            if connection.reading:
                await asyncio.wait({connection.reading})  # until the partner has closed the stream, too

    async def _end(self) -> None:
        if self._growing:
            self._growing.cancel()
            await asyncio.wait({self._growing})
        await super()._end()


async def connect(
    connector: Connector, candidate: Candidate, method: str, *, timeout_s: float, limits: Limits
) -> CallerWire:
    """Call `method` on a new connection. Raises PeerError, and fails at once if the connection is refused."""
    connection = await connector.dial(candidate, timeout_s=timeout_s)
    call = connection.channel.stream_stream(method)(metadata=connection.metadata)
    return CallerWire(candidate.peer_id, connection, call, limits)
