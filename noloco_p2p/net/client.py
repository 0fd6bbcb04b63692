"""Implement Transport, the interface through which this peer calls others, on top of gRPC.

It raises only PeerError or one of its subclasses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import CorruptPayload, PeerError, TimedOut
from noloco_p2p.gossip import frames
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import Identity
from noloco_p2p.net import convert
from noloco_p2p.net.connection import CallerWire, Connector, nobody_is_banned, refused
from noloco_p2p.net.session import Session
from noloco_p2p.net.swap_stream import SwapStream
from noloco_p2p.net.throttle import UNLIMITED, Limits
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.ticket import Ticket

log = logging.getLogger(__name__)

R = TypeVar("R", pb.StatusReply, pb.FetchReply)

SWAP_METHOD, CONNECTION_METHOD = "Swap", "Lane"
OPEN_CONNECTION_S = 5.0  # to connect, and as much again for the answer
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

    @classmethod
    def from_outside(cls, ticket: Ticket, identity: Identity, guard: DialGuard) -> GrpcTransport:
        """Return a transport for calls from a program that is no peer of the ticket's run."""
        hello = frames.Hello(identity.peer_id, ticket.run_name, ticket.spec_digest)
        return cls(lambda: hello, session=Session(identity, ticket.invitation), guard=guard)

    async def open_swap(self, candidate: Candidate, *, timeout_s: float) -> SwapStream:
        """Connect, and open a swap stream. Once the partner has accepted an offer on it, open further connections, if
        it is distant. Raises PeerError.
        """
        wire = await self._connector.call(candidate, SWAP_METHOD, timeout_s=timeout_s)
        num_more = self._connections - 1 if wire.round_trip_s > FAR_S else 0

        async def open_more(offer: frames.Offer) -> None:
            await asyncio.gather(*(self._open_connection(stream, candidate, offer) for _ in range(num_more)))

        def on_accepted(offer: frames.Offer) -> None:
            stream.opening = asyncio.create_task(open_more(offer))

        peer = candidate.peer_id
        stream = SwapStream(wire, peer=peer, proven=peer, is_caller=True, on_accepted=on_accepted)
        return stream

    async def _open_connection(self, stream: SwapStream, candidate: Candidate, offer: frames.Offer) -> None:
        """Open another connection, and join the swap on it. If that fails, the swap continues unchanged."""
        join = pb.Join(hello=convert.to_wire(self._hello()), swap_id=offer.swap_id)
        try:
            wire = await self._connector.call(candidate, CONNECTION_METHOD, timeout_s=OPEN_CONNECTION_S)
            try:
                async with asyncio.timeout(OPEN_CONNECTION_S):
                    await wire.write(pb.Frame(join=join).SerializeToString())
                    answer = pb.Frame.FromString(await wire.read() or b"")
                if answer.HasField("refuse"):
                    raise refused(answer.refuse, candidate.peer_id)
                if not answer.HasField("join"):
                    raise CorruptPayload("the reply is neither a Join nor a Refuse", peer=candidate.peer_id)
            except BaseException:
                await wire.close()
                raise
        except (PeerError, TimeoutError, DecodeError) as error:
            log.debug("could not open another connection to %s: %s", candidate.address, error)
            return
        stream.add(wire)

    async def status(self, candidate: Candidate, *, swap_id: bytes = b"", timeout_s: float) -> frames.PeerStatus:
        request = pb.StatusRequest(hello=convert.to_wire(self._hello()), swap_id=swap_id)
        async with self._asked(candidate, "Status", request, timeout_s=timeout_s) as wire:
            reply = await _reply(wire, pb.StatusReply, candidate, timeout_s=timeout_s)
        if reply is None:
            raise CorruptPayload("it did not answer the request", peer=candidate.peer_id)
        return convert.from_wire(frames.PeerStatus, reply)

    async def fetch(
        self, candidate: Candidate, want: frames.FetchWant, *, timeout_s: float
    ) -> AsyncGenerator[frames.FetchItem]:
        hello = self._hello()
        if isinstance(want, frames.WantLayout):
            hello = replace(hello, layout="")  # a peer with another layout would refuse the request
        request = convert.want_to_wire(want, hello)
        manifest: frames.StateManifest | None = None
        digests: list[bytes] = []
        async with self._asked(candidate, "Fetch", request, timeout_s=timeout_s) as wire:
            while (reply := await _reply(wire, pb.FetchReply, candidate, timeout_s=timeout_s)) is not None:
                match reply.WhichOneof("what"):
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

    @asynccontextmanager
    async def _asked(
        self, candidate: Candidate, method: str, request: Any, *, timeout_s: float
    ) -> AsyncIterator[CallerWire]:
        """Call a method with one request, and end the call at the end of the block."""
        wire = await self._connector.call(candidate, method, timeout_s=timeout_s)
        try:
            await wire.write(request.SerializeToString())
            await wire.finish()
            yield wire
        finally:
            await wire.close()


async def _reply(wire: CallerWire, kind: type[R], candidate: Candidate, *, timeout_s: float) -> R | None:
    """Return the next reply, or None after the last one. Raises Refused or another PeerError."""
    try:
        async with asyncio.timeout(timeout_s):
            data = await wire.read()
        reply = None if data is None else kind.FromString(data)
    except TimeoutError:
        raise TimedOut(f"{candidate.address} sent no data for {timeout_s:.0f} s", peer=candidate.peer_id) from None
    except DecodeError:
        raise CorruptPayload("it sent data that is not a valid protocol message", peer=candidate.peer_id) from None
    if reply is not None and reply.HasField("refuse"):
        raise refused(reply.refuse, candidate.peer_id)
    return reply
