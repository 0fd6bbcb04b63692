"""Implements the interfaces of `net` and `swarm` in memory. All peers share one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from noloco_p2p.errors import TimedOut, Unreachable
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Frame, Hello, PeerStatus, WantLayout
from noloco_p2p.gossip.seams import Candidate, FrameStream, Service

QUEUED_FRAMES = 8
Wrap = Callable[[FrameStream], FrameStream]  # wraps a stream, for example with the faults of `Faults`


def unchanged(stream: FrameStream) -> FrameStream:
    return stream


class MemoryNetwork:
    """A network in memory. `add` registers a service under its peer id, and `remove` makes it unreachable.

    Directories show the peers in `listed`. A peer that is listed but cannot be reached represents one that has just
    died. Peers in `closed` get no offers, because their records say that nobody can call them.
    """

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self.listed: dict[str, None] = {}  # a dict as an ordered set
        self.closed: set[str] = set()
        self._wraps: dict[str, Wrap] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, peer_id: str, service: Service, *, wrap: Wrap = unchanged) -> None:
        """Make a peer reachable. `wrap` is applied to the streams that others open to it."""
        self.services[peer_id] = service
        self.listed[peer_id] = None
        self._wraps[peer_id] = wrap

    def remove(self, peer_id: str) -> None:
        self.vanish(peer_id)
        del self.listed[peer_id]

    def vanish(self, peer_id: str) -> None:
        """Make the peer unreachable, but keep it listed."""
        self.services.pop(peer_id, None)

    def service(self, peer_id: str) -> Service:
        try:
            return self.services[peer_id]
        except KeyError:
            raise Unreachable(f"{peer_id} is not reachable", peer=peer_id) from None

    def call(self, peer_id: str, stream: FrameStream) -> None:
        """Pass a stream to the peer, which answers the offer that arrives over it."""
        service = self.service(peer_id)
        self.own(asyncio.create_task(service.on_swap(self._wraps[peer_id](stream))))

    def own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class MemoryDirectory:
    """A directory that lists all peers of a MemoryNetwork except its owner."""

    def __init__(self, network: MemoryNetwork, *, own_id: str) -> None:
        self._network = network
        self._own_id = own_id

    def live(self) -> Sequence[Candidate]:
        others = [peer for peer in self._network.listed if peer != self._own_id]
        return [Candidate(peer, address=peer, can_be_called=peer not in self._network.closed) for peer in others]

    def num_live(self) -> int:
        return len(self.live()) + 1

    def knows(self, peer_id: str) -> bool:
        return any(peer.peer_id == peer_id for peer in self.live())

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        return Candidate(peer_id, address=peer_id) if peer_id in self._network.listed else None


class MemoryTransport:
    """A transport that calls peers of a MemoryNetwork. `wrap` is applied to the streams that it opens."""

    def __init__(
        self,
        network: MemoryNetwork,
        hello: Callable[[], Hello],
        *,
        wrap: Wrap = unchanged,
    ) -> None:
        self._network = network
        self._hello = hello
        self._wrap = wrap

    async def open_swap(self, candidate: Candidate, *, timeout_s: float) -> FrameStream:
        here, there = MemoryStream.pair(candidate.peer_id, self._hello().peer_id)
        self._network.call(candidate.peer_id, there)
        return self._wrap(here)

    async def status(self, candidate: Candidate, *, swap_id: bytes = b"", timeout_s: float) -> PeerStatus:
        service = self._network.service(candidate.peer_id)
        service.admit(self._hello())
        return await service.on_status(swap_id)

    async def fetch(self, candidate: Candidate, want: FetchWant, *, timeout_s: float) -> AsyncGenerator[FetchItem]:
        service = self._network.service(candidate.peer_id)
        hello = self._hello()
        service.admit(replace(hello, layout="") if isinstance(want, WantLayout) else hello)
        async with aclosing(service.on_fetch(want)) as items:
            async for item in items:
                yield item


class MemoryStream:
    """One end of a stream. Each end receives the frames that the other end sends, in order and with back-pressure."""

    def __init__(self, peer: str, incoming: asyncio.Queue[Frame | None], outgoing: asyncio.Queue[Frame | None]) -> None:
        self._peer = peer
        self._incoming = incoming
        self._outgoing = outgoing
        self._ended = asyncio.Event()
        self._other: MemoryStream | None = None

    @classmethod
    def pair(cls, there: str, here: str) -> tuple[MemoryStream, MemoryStream]:
        """Return the initiator's end and the acceptor's end of a new stream."""
        forth: asyncio.Queue[Frame | None] = asyncio.Queue(QUEUED_FRAMES)
        back: asyncio.Queue[Frame | None] = asyncio.Queue(QUEUED_FRAMES)
        initiator, acceptor = cls(there, back, forth), cls(here, forth, back)
        initiator._other, acceptor._other = acceptor, initiator
        return initiator, acceptor

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, frame: Frame) -> None:
        assert self._other is not None
        if self._ended.is_set() or self._other._ended.is_set():
            raise Unreachable("the stream is closed", peer=self._peer)
        put = asyncio.ensure_future(self._outgoing.put(frame))
        closed = asyncio.ensure_future(self._other._ended.wait())
        try:
            await asyncio.wait({put, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not put.done():
                raise Unreachable("the partner closed the stream", peer=self._peer)
        finally:
            put.cancel()
            closed.cancel()

    async def receive(self, timeout_s: float) -> Frame:
        assert self._other is not None
        if self._ended.is_set():
            raise Unreachable("the stream is closed", peer=self._peer)
        if self._incoming.empty() and self._other._ended.is_set():
            raise Unreachable("the partner closed the stream", peer=self._peer)
        try:
            frame = await asyncio.wait_for(self._incoming.get(), timeout_s)
        except TimeoutError:
            raise TimedOut(f"no frame arrived for {timeout_s:.1f} s", peer=self._peer) from None
        if frame is None:
            raise Unreachable("the stream is closed", peer=self._peer)
        return frame

    async def close(self) -> None:
        self._ended.set()
        for queue in (self._incoming, self._outgoing):
            if not queue.full():  # a full queue has no waiting reader to wake
                queue.put_nowait(None)
