"""The gRPC server of a peer: turns calls into calls of the gossip room's Service, and refusals into words."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from noloco_p2p.errors import CorruptPayload, PeerError, Refused, SettingsError, TimedOut, Unreachable
from noloco_p2p.gossip import frames
from noloco_p2p.gossip.seams import Service
from noloco_p2p.net import convert, framing, options
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

log = logging.getLogger(__name__)

SERVICE = "noloco_p2p.wire.v1.Peer"
QUEUED_FRAMES = 4  # received but not yet looked at; more is held back in the sender by flow control
MANIFEST_DIGESTS_PER_REPLY = 16_384
MAX_CHUNKS_PER_REQUEST = 65_536


class GrpcServer:
    """`port` is the real port once `start` has returned."""

    def __init__(self, service: Service) -> None:
        self._server = grpc.aio.server(options=options.SERVER)
        self._servicer = _Servicer(service)
        self._server.add_generic_rpc_handlers((_handlers(self._servicer),))
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Raises SettingsError when the port is taken."""
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            raise SettingsError(
                f"cannot listen on {host}:{port}: the port is in use or not allowed; "
                "choose another with --listen HOST:PORT"
            ) from None
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
        await self._servicer.stop()


class ServerStream:
    """The acceptor's side of a swap stream. The handler pumps what arrives into a short queue."""

    def __init__(self, context: Any) -> None:
        self.peer: str = context.peer()  # to ask for it once the call has ended crashes the process (grpcio 1.85)
        self._context = context
        self._arrived: asyncio.Queue[frames.Frame | PeerError] = asyncio.Queue(QUEUED_FRAMES)
        self._gone: PeerError | None = None
        self._closed = asyncio.Event()

    async def pump(self, requests: AsyncIterator[bytes]) -> None:
        """Runs for the life of the call; ends when the other side is gone or sent what is no frame."""
        try:
            async for message in requests:
                await self._arrived.put(framing.decode(message))
            fault: PeerError = Unreachable("the other side closed the stream", peer=self.peer)
        except CorruptPayload as error:
            fault = error
        except DecodeError:
            fault = CorruptPayload("what came is no message of this protocol", peer=self.peer)
        except asyncio.CancelledError:
            self.lose(Unreachable("the connection was lost", peer=self.peer))
            raise
        except grpc.RpcError as error:
            fault = Unreachable(f"the connection was lost: {error}", peer=self.peer)
        self.lose(fault)

    def lose(self, fault: PeerError) -> None:
        """Whoever waits for a frame gets `fault`, after the frames that are already here."""
        self._gone = self._gone or fault
        if not self._arrived.full():  # a full queue has no waiting reader to wake
            self._arrived.put_nowait(fault)

    async def send(self, frame: frames.Frame) -> None:
        if self._gone:
            raise self._gone
        try:
            await self._context.write(framing.encode(frame))
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise Unreachable(f"the connection was lost: {error}", peer=self.peer) from None

    async def receive(self, timeout_s: float) -> frames.Frame:
        if self._gone and self._arrived.empty():
            raise self._gone
        try:
            async with asyncio.timeout(timeout_s):  # unlike wait_for without a task for each frame
                frame = await self._arrived.get()
        except TimeoutError:
            raise TimedOut(f"nothing came for {timeout_s:.1f} s", peer=self.peer) from None
        if isinstance(frame, PeerError):
            raise frame
        return frame

    async def close(self) -> None:
        self.lose(Unreachable("the stream is closed", peer=self.peer))
        self._closed.set()

    async def closed(self) -> None:
        """Until this side has closed the stream."""
        await self._closed.wait()


def _handlers(servicer: _Servicer) -> grpc.GenericRpcHandler:
    """The methods of the service; a swap gets bytes, which framing.py makes and reads."""
    fetch = grpc.unary_stream_rpc_method_handler(
        servicer.Fetch, pb.FetchRequest.FromString, pb.FetchReply.SerializeToString
    )
    status = grpc.unary_unary_rpc_method_handler(
        servicer.Status, pb.StatusRequest.FromString, pb.StatusReply.SerializeToString
    )
    swap = grpc.stream_stream_rpc_method_handler(servicer.Swap)
    return grpc.method_handlers_generic_handler(SERVICE, {"Swap": swap, "Fetch": fetch, "Status": status})


class _Servicer:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._swaps: set[asyncio.Task[None]] = set()

    async def Swap(self, request_iterator: AsyncIterator[bytes], context: Any) -> None:  # noqa: N802
        stream = ServerStream(context)
        swap = self._own(self._service.on_swap(stream))
        pump = asyncio.create_task(stream.pump(request_iterator))
        closed = asyncio.create_task(stream.closed())
        try:
            # gRPC cancels this handler when the caller is gone; the swap is told so and ends by its own rules.
            await asyncio.wait({swap, closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pump.cancel()
            closed.cancel()
            stream.lose(Unreachable("the connection was lost", peer=stream.peer))

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncGenerator[pb.FetchReply]:  # noqa: N802
        try:
            self._service.admit(convert.hello_from_wire(request.hello))
            async with aclosing(self._service.on_fetch(_want(request))) as items:
                async for item in items:
                    for reply in _replies(item):
                        yield reply
        except PeerError as error:
            yield pb.FetchReply(refuse=_refuse(error))

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802
        try:
            self._service.admit(convert.hello_from_wire(request.hello))
            return convert.status_to_wire(await self._service.on_status(request.swap_id[:64]))
        except PeerError as error:
            return pb.StatusReply(refuse=_refuse(error))

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._swaps.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._swaps.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a swap that a peer offered ended in an unexpected error", exc_info=error)

    async def stop(self) -> None:
        for task in self._swaps:
            task.cancel()
        await asyncio.gather(*self._swaps, return_exceptions=True)


def _refuse(error: PeerError) -> pb.Refuse:
    code, retry_after_s = frames.RefuseCode.MALFORMED, 0.0
    if isinstance(error, Refused):
        code, retry_after_s = frames.RefuseCode[error.code], error.retry_after_s
    return convert.refuse_to_wire(frames.Refuse(code, str(error), retry_after_s))


def _want(request: pb.FetchRequest) -> frames.FetchWant:
    match request.WhichOneof("what"):
        case "spec":
            return frames.WantSpec()
        case "manifest":
            return frames.WantManifest()
        case "chunks":
            if len(request.chunks.indices) > MAX_CHUNKS_PER_REQUEST:
                raise CorruptPayload(f"at most {MAX_CHUNKS_PER_REQUEST} chunks can be asked for at once")
            return frames.WantChunks(request.chunks.manifest_digest, tuple(request.chunks.indices))
        case _:
            raise CorruptPayload("a request of an unknown kind; the caller may speak a newer protocol")


def _replies(item: frames.FetchItem) -> list[pb.FetchReply]:
    match item:
        case frames.SpecJson(data):
            return [pb.FetchReply(spec_json=data)]
        case frames.StateChunk(index, payload):
            return [pb.FetchReply(chunk=pb.StateChunk(index=index, payload=payload))]
        case frames.StateManifest(chunk_digests=digests):
            step = MANIFEST_DIGESTS_PER_REPLY
            parts = [digests[start : start + step] for start in range(0, len(digests), step)] or [()]
            return [pb.FetchReply(manifest=convert.manifest_to_wire(item, part)) for part in parts]
