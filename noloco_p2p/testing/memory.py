"""Implements the interfaces of `net` and `swarm` in memory. All peers share one event loop, real or virtual."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from noloco_p2p.errors import TimedOut, Unreachable
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Frame, Hello, PeerStatus, WantLayout
from noloco_p2p.gossip.seams import Candidate, FrameStream, Service
from noloco_p2p.testing.links import IDEAL, Link, LinkDirection

FRAME_BYTES = 64  # bytes of a frame besides its content
BREAKS_WITHIN = 12  # frames; a swap of the caller has as many if its slice has six chunks
Wrap = Callable[[FrameStream], FrameStream]  # wraps a stream, for example with the faults of `Faults`


def unchanged(stream: FrameStream) -> FrameStream:
    return stream


class MemoryNetwork:
    """A network in memory. `add` registers a service under its peer id, and `remove` makes it unreachable.

    Directories show the peers in `listed`. A peer that is listed but cannot be reached represents one that has just
    died. Peers in `closed` get no offers, because their records say that nobody can call them. `links` holds the links
    of peers; the others have ideal links. `lose` is the fraction of calls whose connection breaks before the caller has
    sent BREAKS_WITHIN frames.
    """

    def __init__(self, *, lose: float = 0.0, seed: int = 0) -> None:
        self.services: dict[str, Service] = {}
        self.listed: dict[str, None] = {}  # a dict as an ordered set
        self.closed: set[str] = set()
        self.links: dict[str, Link] = {}
        self._lose = lose
        self._rng = random.Random(f"lost/{seed}")
        self._streams: dict[str, list[MemoryStream]] = {}  # open streams by peer, both ends of each
        self._wraps: dict[str, Wrap] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, peer_id: str, service: Service, *, wrap: Wrap = unchanged) -> None:
        """Make a peer reachable. `wrap` is applied to its ends of the streams that it or others open."""
        self.services[peer_id] = service
        self.listed[peer_id] = None
        self._wraps[peer_id] = wrap

    def remove(self, peer_id: str) -> None:
        self.vanish(peer_id)
        del self.listed[peer_id]

    def vanish(self, peer_id: str) -> None:
        """Make the peer unreachable, and break its swaps, but keep it listed."""
        self.services.pop(peer_id, None)
        for stream in self._streams.pop(peer_id, []):
            stream.end()

    def service(self, peer_id: str) -> Service:
        try:
            return self.services[peer_id]
        except KeyError:
            raise Unreachable(f"{peer_id} is not reachable", peer=peer_id) from None

    def link(self, peer_id: str) -> Link:
        return self.links.setdefault(peer_id, Link.of(IDEAL))

    async def round_trip(self, caller: str, called: str) -> None:
        await asyncio.sleep(2 * (self.link(caller).delay_s + self.link(called).delay_s))

    async def connect(self, caller: str, called: str) -> FrameStream:
        """Open a stream, and let the called peer answer the offer that arrives over it."""
        self.service(called)
        here, there = MemoryStream.pair(called, caller, self.link(called), self.link(caller))
        if self._rng.random() < self._lose:
            here.frames_left = self._rng.randrange(1, BREAKS_WITHIN)
        for name in (caller, called):
            still_open = [stream for stream in self._streams.get(name, []) if not stream.has_ended]
            self._streams[name] = [*still_open, here, there]
        await self.round_trip(caller, called)  # a handshake
        self.own(asyncio.create_task(self.service(called).on_swap(self._wraps[called](there))))
        return self._wraps.get(caller, unchanged)(here)

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
    """A transport that calls peers of a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, hello: Callable[[], Hello]) -> None:
        self._network = network
        self._hello = hello

    async def open_swap(self, candidate: Candidate, *, timeout_s: float) -> FrameStream:
        return await self._network.connect(self._hello().peer_id, candidate.peer_id)

    async def status(self, candidate: Candidate, *, swap_id: bytes = b"", timeout_s: float) -> PeerStatus:
        service = self._network.service(candidate.peer_id)
        service.admit(self._hello())
        await self._network.round_trip(self._hello().peer_id, candidate.peer_id)
        return await service.on_status(swap_id)

    async def fetch(self, candidate: Candidate, want: FetchWant, *, timeout_s: float) -> AsyncGenerator[FetchItem]:
        service = self._network.service(candidate.peer_id)
        hello = self._hello()
        service.admit(replace(hello, layout="") if isinstance(want, WantLayout) else hello)
        async with aclosing(service.on_fetch(want)) as items:
            async for item in items:
                yield item


class MemoryStream:
    """One end of a stream.

    Its frames pass through the up link of this end, and then through the down link of the other end, in order. If
    `frames_left` is a number, the connection breaks for both ends after this end has sent so many frames.
    """

    def __init__(self, peer: str, link: Link) -> None:
        self.peer = peer
        self.has_ended = False
        self.frames_left: int | None = None
        self._up: LinkDirection = link.up
        self._down: LinkDirection = link.down
        self._other = self
        self._in_up: deque[Frame] = deque()  # a queue, because timers for the same moment may fire in any order
        self._in_down: deque[Frame] = deque()
        self._received: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._is_drained = False

    @classmethod
    def pair(
        cls, there: str, here: str, link_there: Link | None = None, link_here: Link | None = None
    ) -> tuple[MemoryStream, MemoryStream]:
        """Return the initiator's end and the acceptor's end of a new stream."""
        initiator = cls(there, link_here or Link.of(IDEAL))
        acceptor = cls(here, link_there or Link.of(IDEAL))
        initiator._other, acceptor._other = acceptor, initiator
        return initiator, acceptor

    async def send(self, frame: Frame) -> None:
        if self.frames_left == 0:
            self.end()
        if self.has_ended:
            raise Unreachable("the stream is closed", peer=self.peer)
        if self.frames_left is not None:
            self.frames_left -= 1
        self._in_up.append(frame)
        self._up.carry(_frame_bytes(frame), self._leave_up)
        await self._up.drain()

    async def receive(self, timeout_s: float) -> Frame:
        if self._is_drained:
            raise Unreachable("the stream is closed", peer=self.peer)
        try:
            frame = await asyncio.wait_for(self._received.get(), timeout_s)
        except TimeoutError:
            raise TimedOut(f"no frame arrived for {timeout_s:.1f} s", peer=self.peer) from None
        if frame is None:
            self._is_drained = True
            raise Unreachable("the stream is closed", peer=self.peer)
        return frame

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        """End the stream for both ends. Frames in flight still arrive, as over TCP."""
        for stream in (self, self._other):
            if not stream.has_ended:
                stream.has_ended = True
                stream._end_when_drained()

    def _leave_up(self) -> None:
        frame, other = self._in_up.popleft(), self._other
        other._in_down.append(frame)
        other._down.carry(_frame_bytes(frame), other._arrive)

    def _arrive(self) -> None:
        self._received.put_nowait(self._in_down.popleft())
        self._end_when_drained()

    def _end_when_drained(self) -> None:
        if self.has_ended and not self._in_down and not self._other._in_up:
            self._received.put_nowait(None)


def _frame_bytes(frame: Frame) -> int:
    contents = (getattr(frame, name, b"") for name in ("payload", "exponents", "ages"))
    return FRAME_BYTES + sum(map(len, contents))
