"""Implement Transport, the interface through which this peer calls others, on top of gRPC.

It raises only PeerError or one of its subclasses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import grpc.aio
from grpc.aio import EOF  # pyright: ignore[reportAttributeAccessIssue] - missing in the stubs

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import CorruptPayload, TimedOut
from noloco_p2p.gossip import frames
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net import convert
from noloco_p2p.net.caller import SWAP_METHOD, CallerStream, connect
from noloco_p2p.net.connection import Connector, PeerStub, check_parsed, nobody_is_banned, refused, translate
from noloco_p2p.net.session import Session
from noloco_p2p.net.throttle import UNLIMITED, Limits
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

FAR_S = 0.02  # from this round-trip time on, one TCP stream is much slower than the link if packets are lost
FAR_CONNECTIONS = 6  # with 1 % loss, six streams carry more than five times as much as one
MAX_MANIFEST_CHUNKS = 1 << 20  # enough for 1 TiB of state; a larger manifest is refused


class GrpcTransport:
    """A transport that dials other peers.

    Each call has its own connection, because a swap can use the whole link for minutes. A swap with a
    distant peer uses `connections` connections, and a swap with a close one uses one.
    """

    def __init__(
        self,
        hello: Callable[[], frames.Hello],
        limits: Limits = UNLIMITED,
        *,
        connections: int = FAR_CONNECTIONS,
        session: Session | None = None,
        why_banned: Callable[[str], str] = nobody_is_banned,
        guard: DialGuard | None = None,
    ) -> None:
        self._hello = hello
        self._limits = limits
        self._connector = Connector(session, limits, why_banned=why_banned, guard=guard)
        self._connections = connections

    async def open_swap(self, candidate: Candidate, *, timeout_s: float) -> CallerStream:
        """Connect, and open a swap stream. Raises Unreachable or TimedOut."""
        wire = await connect(self._connector, candidate, SWAP_METHOD, timeout_s=timeout_s, limits=self._limits)
        return CallerStream(
            candidate,
            wire,
            connector=self._connector,
            hello=self._hello,
            num_connections=self._connections if wire.round_trip_s > FAR_S else 1,
            limits=self._limits,
        )

    async def status(self, candidate: Candidate, *, swap_id: bytes = b"", timeout_s: float) -> frames.PeerStatus:
        request = pb.StatusRequest(hello=convert.to_wire(self._hello()), swap_id=swap_id)
        async with self._connector.dialled(candidate, timeout_s=timeout_s) as connection:
            try:
                call = PeerStub(connection.channel).Status(request, timeout=timeout_s, metadata=connection.metadata)
                reply = await call
            except grpc.aio.AioRpcError as error:
                raise translate(error, candidate.peer_id) from None
        check_parsed(reply, candidate.peer_id)
        if reply.HasField("refuse"):
            raise refused(reply.refuse, candidate.peer_id)
        return convert.from_wire(frames.PeerStatus, reply)

    async def fetch(
        self, candidate: Candidate, want: frames.FetchWant, *, timeout_s: float
    ) -> AsyncGenerator[frames.FetchItem]:
        hello = self._hello()
        if isinstance(want, frames.WantLayout):
            hello = replace(hello, layout="")  # a peer with another layout would refuse the request
        request = convert.want_to_wire(want, hello)
        async with self._connector.dialled(candidate, timeout_s=timeout_s) as connection:
            call = PeerStub(connection.channel).Fetch(request, metadata=connection.metadata)
            manifest: frames.StateManifest | None = None
            digests: list[bytes] = []
            try:
                while True:
                    reply = await asyncio.wait_for(call.read(), timeout_s)
                    if reply is EOF:
                        break
                    check_parsed(reply, candidate.peer_id)
                    await self._limits.receiving(reply.ByteSize())
                    match reply.WhichOneof("what"):
                        case "refuse":
                            raise refused(reply.refuse, candidate.peer_id)
                        case "spec_json":
                            yield frames.SpecJson(reply.spec_json)
                        case "layout_json":
                            yield frames.LayoutJson(reply.layout_json)
                        case "chunk":
                            yield convert.from_wire(frames.StateChunk, reply.chunk)
                        case "manifest":
                            part = convert.manifest_from_wire(reply.manifest)
                            manifest = manifest or part
                            digests += part.chunk_digests
                            if len(digests) > MAX_MANIFEST_CHUNKS:
                                raise CorruptPayload("the manifest lists too many chunks", peer=candidate.peer_id)
                        case _:
                            raise CorruptPayload("it sent an unknown kind of reply", peer=candidate.peer_id)
                if manifest:
                    yield replace(manifest, chunk_digests=tuple(digests))
            except grpc.aio.AioRpcError as error:
                raise translate(error, candidate.peer_id) from None
            except TimeoutError:
                raise TimedOut(
                    f"{candidate.address} sent no data for {timeout_s:.0f} s", peer=candidate.peer_id
                ) from None
            finally:
                call.cancel()
