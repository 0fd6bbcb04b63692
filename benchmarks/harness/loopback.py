"""Run peers in one process over real gRPC on loopback, with a dict as the directory: a MemorySwarm with sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import uvloop

from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.seams import INTERNET, Candidate, Deadlines, Directory, FrameStream, Service, Transport
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.net.client import FAR_CONNECTIONS, GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.throttle import Limits
from noloco_p2p.spec import Spec
from noloco_p2p.testing.memory import Wrap
from noloco_p2p.testing.peers import MemorySwarm


class LoopbackSwarm(MemorySwarm):
    """Peers over gRPC in one process, whose directory is `addresses`.

    A test may replace an address with that of a LinkProxy, or with "" for a peer that accepts no calls. `rates` limits
    the upload and download of peers that are made later, in bytes per second.
    """

    def __init__(self, spec: Spec, *, deadlines: Deadlines = INTERNET, connections: int = FAR_CONNECTIONS) -> None:
        super().__init__(spec, deadlines=deadlines)
        self.addresses: dict[str, str] = {}
        self.rates: dict[str, tuple[float | None, float | None]] = {}
        self.servers: dict[str, GrpcServer] = {}
        self._limits: dict[str, Limits] = {}
        self._connections = connections

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()

    def _outside(self, peer_id: str, hello: Callable[[], Hello]) -> tuple[Transport, Directory]:
        upload, download = self.rates.get(peer_id, (None, None))
        limits = self._limits[peer_id] = Limits.of(upload_bytes_per_s=upload, download_bytes_per_s=download)
        transport = GrpcTransport(hello, limits, connections=self._connections)
        return _WrappedTransport(transport, self.wraps[peer_id]), _Listed(self.addresses, own_id=peer_id)

    async def _connect(self, peer_id: str, service: PeerService) -> None:
        wrapped = _WrappedService(service, self.wraps[peer_id])
        self.servers[peer_id] = server = GrpcServer(wrapped, self._limits[peer_id])
        await server.start("127.0.0.1", 0)
        self.addresses[peer_id] = f"127.0.0.1:{server.port}"

    async def _disconnect(self, peer_id: str) -> None:
        """Stop the server without telling the directory, as a kill does."""
        await self.servers.pop(peer_id).stop(0.0)

    async def _disconnect_all(self) -> None:
        for server in self.servers.values():
            await server.stop(0.0)


class _WrappedTransport:
    def __init__(self, transport: GrpcTransport, wrap: Wrap) -> None:
        self._transport = transport
        self._wrap = wrap
        self.status, self.fetch = self._transport.status, self._transport.fetch

    async def open_swap(self, candidate: Candidate, *, timeout_s: float) -> FrameStream:
        return self._wrap(await self._transport.open_swap(candidate, timeout_s=timeout_s))


class _WrappedService:
    def __init__(self, service: Service, wrap: Wrap) -> None:
        self.admit, self.on_status, self.on_fetch = service.admit, service.on_status, service.on_fetch
        self._service = service
        self._wrap = wrap

    async def on_swap(self, stream: FrameStream) -> None:
        await self._service.on_swap(self._wrap(stream))


class _Listed:
    def __init__(self, addresses: dict[str, str], *, own_id: str) -> None:
        self._addresses = addresses
        self._own_id = own_id

    def live(self) -> Sequence[Candidate]:
        listed = list(self._addresses.items())  # a copy, since a test may change the dict from its own thread
        return [
            Candidate(peer, address, can_be_called=bool(address)) for peer, address in listed if peer != self._own_id
        ]

    def num_live(self) -> int:
        return len(self.live()) + 1

    def knows(self, peer_id: str) -> bool:
        return peer_id in self._addresses

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        return next((candidate for candidate in self.live() if candidate.peer_id == peer_id), None)
