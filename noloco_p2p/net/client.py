"""The Transport on gRPC: this peer's calls to others. Nothing but PeerError and its children leaves this file."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF  # pyright: ignore[reportAttributeAccessIssue] - missing in the stubs

from noloco_p2p.errors import CorruptPayload, PeerError, Refused, TimedOut, Unreachable
from noloco_p2p.gossip import frames
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net import convert, framing, options
from noloco_p2p.net.throttle import UNLIMITED, Limits
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.net.wire.v1.peer_pb2_grpc import PeerStub

SWAP_METHOD = "/noloco_p2p.wire.v1.Peer/Swap"  # called with bytes: framing.py makes and reads the messages
LAST_WORDS_S = 0.5  # from the end of what is sent to the end of the stream
MAX_MANIFEST_CHUNKS = 1 << 20  # 1 TiB of state; a manifest that names more is refused


class GrpcTransport:
    """Dials other peers, with one connection per call: a swap may use the whole link for minutes."""

    def __init__(self, hello: Callable[[], frames.Hello], limits: Limits = UNLIMITED) -> None:
        self._hello = hello
        self._limits = limits
        self._options = [*options.CLIENT, *limits.options()]

    async def open_swap(self, candidate: Candidate, *, timeout_s: float) -> ClientStream:
        """Connect, and open a swap stream. Raises Unreachable or TimedOut."""
        channel = grpc.aio.insecure_channel(candidate.address, options=self._options)
        try:
            await asyncio.wait_for(_connect(channel, candidate), timeout_s)
        except TimeoutError:
            await channel.close()
            raise Unreachable(
                f"{candidate.address} does not answer within {timeout_s:.1f} s", peer=candidate.peer_id
            ) from None
        except BaseException:
            await channel.close()
            raise
        return ClientStream(candidate.peer_id, channel, channel.stream_stream(SWAP_METHOD)(), self._limits)

    async def status(self, candidate: Candidate, *, swap_id: bytes = b"", timeout_s: float) -> frames.PeerStatus:
        request = pb.StatusRequest(hello=convert.hello_to_wire(self._hello()), swap_id=swap_id)
        async with grpc.aio.insecure_channel(candidate.address, options=self._options) as channel:
            try:
                reply = await PeerStub(channel).Status(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise translate(error, candidate.peer_id) from None
        _check_parsed(reply, candidate.peer_id)
        if reply.HasField("refuse"):
            raise refused(reply.refuse, candidate.peer_id)
        return convert.status_from_wire(reply)

    async def fetch(
        self, candidate: Candidate, want: frames.FetchWant, *, timeout_s: float
    ) -> AsyncGenerator[frames.FetchItem]:
        request = _fetch_request(want)
        request.hello.CopyFrom(convert.hello_to_wire(self._hello()))
        async with grpc.aio.insecure_channel(candidate.address, options=self._options) as channel:
            call = PeerStub(channel).Fetch(request)
            manifest: list[pb.Manifest] = []
            try:
                while True:
                    reply = await asyncio.wait_for(call.read(), timeout_s)
                    if reply is EOF:
                        break
                    _check_parsed(reply, candidate.peer_id)
                    await self._limits.receiving(reply.ByteSize())
                    match reply.WhichOneof("what"):
                        case "refuse":
                            raise refused(reply.refuse, candidate.peer_id)
                        case "spec_json":
                            yield frames.SpecJson(reply.spec_json)
                        case "chunk":
                            yield frames.StateChunk(reply.chunk.index, reply.chunk.payload)
                        case "manifest":
                            manifest.append(reply.manifest)
                            if sum(len(part.chunk_digests) for part in manifest) > MAX_MANIFEST_CHUNKS:
                                raise CorruptPayload("a manifest without end", peer=candidate.peer_id)
                        case _:
                            raise CorruptPayload("an answer of an unknown kind", peer=candidate.peer_id)
                if manifest:
                    yield _join_manifest(manifest)
            except grpc.aio.AioRpcError as error:
                raise translate(error, candidate.peer_id) from None
            except TimeoutError:
                raise TimedOut(
                    f"{candidate.address} sent nothing for {timeout_s:.0f} s", peer=candidate.peer_id
                ) from None
            finally:
                call.cancel()


class ClientStream:
    """The initiator's side of a swap stream."""

    def __init__(self, peer: str, channel: grpc.aio.Channel, call: Any, limits: Limits = UNLIMITED) -> None:
        self._limits = limits
        self._peer = peer
        self._channel = channel
        self._call = call
        self._reading: asyncio.Future[Any] | None = None

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, frame: frames.Frame) -> None:
        message = framing.encode(frame)
        await self._limits.sending(len(message))
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._peer) from None
        except (grpc.aio.UsageError, asyncio.InvalidStateError):  # what a write after the end of the call raises
            raise Unreachable("the stream is closed", peer=self._peer) from None

    async def receive(self, timeout_s: float) -> frames.Frame:
        # A read that is cancelled takes the whole call with it, so it goes on when the reader does not wait any longer.
        reading = self._reading = self._reading or asyncio.ensure_future(self._call.read())
        done, _ = await asyncio.wait({reading}, timeout=timeout_s)
        if not done:
            raise TimedOut(f"nothing came for {timeout_s:.1f} s", peer=self._peer)
        self._reading = None
        try:
            message = reading.result()
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._peer) from None
        except (grpc.aio.UsageError, asyncio.InvalidStateError, asyncio.CancelledError):
            raise Unreachable("the stream is closed", peer=self._peer) from None
        if message is EOF:
            raise Unreachable("the other side closed the stream", peer=self._peer)
        await self._limits.receiving(len(message))
        return framing.decode(message)

    async def close(self) -> None:
        """The other side hears all that was sent before, a last Ready or Abort above all, if it takes it at once."""
        try:
            with contextlib.suppress(PeerError, TimeoutError, grpc.aio.BaseError, asyncio.InvalidStateError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._call.done_writing()
                    while True:  # until the other side has closed the stream, too
                        await self.receive(LAST_WORDS_S)
        finally:
            self._call.cancel()
            if self._reading:
                await asyncio.wait({self._reading})
            await self._channel.close()


async def _connect(channel: grpc.aio.Channel, candidate: Candidate) -> None:
    """Until the channel is connected. A refused connection is told at once: another candidate may be there."""
    ready, failing = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
    state = channel.get_state(try_to_connect=True)
    while state is not ready:
        if state is failing:
            raise Unreachable(f"{candidate.address} cannot be connected to", peer=candidate.peer_id)
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


def _check_parsed(message: object, peer: str) -> None:
    """gRPC gives None for bytes that are no message."""
    if message is None:
        raise CorruptPayload("what came is no message of this protocol", peer=peer)


def translate(error: grpc.aio.AioRpcError, peer: str) -> PeerError:
    """A gRPC status in words of this project."""
    details = convert.text(error.details() or error.code().name)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or "ping timeout" in details:
        return TimedOut(f"no answer in time: {details}", peer=peer)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return CorruptPayload(f"a message is too large: {details}", peer=peer)
    return Unreachable(f"no connection: {details}", peer=peer)


def refused(message: pb.Refuse, peer: str) -> Refused:
    refuse = convert.refuse_from_wire(message)
    return Refused(refuse.sentence, peer=peer, code=refuse.code.name, retry_after_s=refuse.retry_after_s)


def _fetch_request(want: frames.FetchWant) -> pb.FetchRequest:
    match want:
        case frames.WantSpec():
            return pb.FetchRequest(spec=pb.SpecRequest())
        case frames.WantManifest():
            return pb.FetchRequest(manifest=pb.ManifestRequest())
        case frames.WantChunks(manifest_digest, indices):
            return pb.FetchRequest(chunks=pb.ChunksRequest(manifest_digest=manifest_digest, indices=indices))


def _join_manifest(parts: list[pb.Manifest]) -> frames.StateManifest:
    first = parts[0]
    return frames.StateManifest(
        layout=convert.text(first.layout),
        num_elements=first.num_elements,
        round=first.round,
        progress=convert.finite(first.progress),
        num_bytes=first.num_bytes,
        chunk_digests=tuple(digest for part in parts for digest in part.chunk_digests),
    )
