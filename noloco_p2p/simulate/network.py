"""A network of links with a delay and a rate, on the clock of the running loop. It replaces the package `net`."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from noloco_p2p.errors import TimedOut, Unreachable
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Frame, Hello, PeerStatus
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.testing.links import BUFFER_S, PROFILES, LinkProfile, Shape
from noloco_p2p.testing.memory import MemoryNetwork, Wrap, unchanged

FRAME_BYTES = 64  # bytes of a frame besides its content
BREAKS_WITHIN = 12  # frames; a swap of the caller has as many if its slice has six chunks
IDEAL = LinkProfile("ideal", down_mbit_s=float("inf"), up_mbit_s=float("inf"), delay_ms=0, jitter_ms=0)
LINKS = {IDEAL.name: IDEAL, **PROFILES}


class LinkDirection(Protocol):
    """One direction of a peer's link, which the frames of all its swaps share."""

    def carry(self, num_bytes: int, then: Callable[[], None]) -> None:
        """Accept `num_bytes`, and call `then` when they have left the link. Bytes leave in order of entry."""
        ...

    async def drain(self) -> None:
        """Wait until the link accepts more bytes, as a sender does when its buffer is full."""
        ...


class ShapedWay:
    """One direction of a link, with a single queue."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def carry(self, num_bytes: int, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(self._shape.due_s(loop.time(), num_bytes), then)

    async def drain(self) -> None:
        await asyncio.sleep(max(0.0, self._shape.backlog_s(asyncio.get_running_loop().time()) - BUFFER_S))


@dataclass(frozen=True, slots=True)
class Link:
    """The link of a peer to all others. `up` carries data from the peer, and `down` carries data to it."""

    up: LinkDirection
    down: LinkDirection
    delay_s: float

    @classmethod
    def of(cls, profile: LinkProfile, *, seed: int) -> Link:
        delays = {"delay_ms": profile.delay_ms, "jitter_ms": profile.jitter_ms}
        up = Shape(mbit_s=profile.up_mbit_s, seed=2 * seed, **delays)
        down = Shape(mbit_s=profile.down_mbit_s, seed=2 * seed + 1, **delays)
        return cls(ShapedWay(up), ShapedWay(down), profile.delay_ms / 1e3)


class LinkNetwork(MemoryNetwork):
    """A network of reachable peers and their links.

    `lose` is the fraction of calls whose connection breaks before the caller has sent BREAKS_WITHIN frames.
    """

    def __init__(self, *, lose: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.links: dict[str, Link] = {}
        self._lose = lose
        self._rng = random.Random(f"lost/{seed}")
        self._streams: dict[str, list[LinkStream]] = {}  # open streams by peer, both ends of each

    def connect(self, caller: str, called: str) -> LinkStream:
        """Return the caller's end of a new stream. The called peer gets the other end when the call has arrived."""
        self.service(called)
        ours, theirs = self.links[caller], self.links[called]
        here, there = LinkStream(called, ours.up, ours.down), LinkStream(caller, theirs.up, theirs.down)
        here.other, there.other = there, here
        if self._rng.random() < self._lose:
            here.break_after(self._rng.randrange(1, BREAKS_WITHIN))
        for name in (caller, called):
            still_open = [stream for stream in self._streams.get(name, []) if not stream.has_ended]
            self._streams[name] = [*still_open, here, there]
        return here

    def vanish(self, peer_id: str) -> None:
        """Make a peer unreachable, and break its swaps."""
        super().vanish(peer_id)
        for stream in self._streams.pop(peer_id, []):
            stream.end()

    def delay_s(self, caller: str, called: str) -> float:
        return self.links[caller].delay_s + self.links[called].delay_s


class LinkTransport:
    """Makes the calls of one peer over a LinkNetwork. `wrap` is applied to the streams that it opens."""

    def __init__(self, network: LinkNetwork, hello: Callable[[], Hello], *, wrap: Wrap = unchanged) -> None:
        self._network = network
        self._hello = hello
        self._wrap = wrap

    async def open_swap(self, candidate: Candidate, *, timeout_s: float) -> FrameStream:
        called = candidate.peer_id
        own_id = self._hello().peer_id
        stream = self._network.connect(own_id, called)
        await asyncio.sleep(2 * self._network.delay_s(own_id, called))  # a handshake
        assert stream.other is not None
        self._network.call(called, stream.other)
        return self._wrap(stream)

    async def status(self, candidate: Candidate, *, swap_id: bytes = b"", timeout_s: float) -> PeerStatus:
        service = self._network.service(candidate.peer_id)
        service.admit(self._hello())
        await asyncio.sleep(2 * self._network.delay_s(self._hello().peer_id, candidate.peer_id))
        return await service.on_status(swap_id)

    async def fetch(self, candidate: Candidate, want: FetchWant, *, timeout_s: float) -> AsyncGenerator[FetchItem]:
        """Raise Unreachable: simulated newcomers take their donor's state directly."""
        raise Unreachable("states cannot be fetched in a simulation", peer=candidate.peer_id)
        yield


class LinkStream:
    """One end of a stream.

    Its frames pass through the up link of this end, and then through the down link of the other end, in order.
    """

    def __init__(self, peer: str, up: LinkDirection, down: LinkDirection) -> None:
        self.other: LinkStream | None = None
        self.has_ended = False
        self._peer = peer
        self._up = up
        self._down = down
        self._in_up: deque[Frame] = deque()  # a queue, because timers for the same moment may fire in any order
        self._in_down: deque[Frame] = deque()
        self._received: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._is_drained = False
        self._frames_left: int | None = None

    @property
    def peer(self) -> str:
        return self._peer

    def break_after(self, num_frames: int) -> None:
        """Break the connection for both ends after this end has sent `num_frames` frames."""
        self._frames_left = num_frames

    async def send(self, frame: Frame) -> None:
        if self._frames_left == 0:
            self.end()
        if self.has_ended:
            raise Unreachable("the stream is closed", peer=self._peer)
        if self._frames_left is not None:
            self._frames_left -= 1
        self._in_up.append(frame)
        self._up.carry(_frame_bytes(frame), self._leave_up)
        await self._up.drain()

    async def receive(self, timeout_s: float) -> Frame:
        if self._is_drained:
            raise Unreachable("the stream is closed", peer=self._peer)
        try:
            frame = await asyncio.wait_for(self._received.get(), timeout_s)
        except TimeoutError:
            raise TimedOut(f"no frame arrived for {timeout_s:.1f} s", peer=self._peer) from None
        if frame is None:
            self._is_drained = True
            raise Unreachable("the stream is closed", peer=self._peer)
        return frame

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        """End the stream for both ends. Frames in flight still arrive, as over TCP."""
        for stream in (self, self._partner):
            if not stream.has_ended:
                stream.has_ended = True
                stream._end_when_drained()

    @property
    def _partner(self) -> LinkStream:
        assert self.other is not None
        return self.other

    def _leave_up(self) -> None:
        frame = self._in_up.popleft()
        partner = self._partner
        partner._in_down.append(frame)
        partner._down.carry(_frame_bytes(frame), partner._arrive)

    def _arrive(self) -> None:
        self._received.put_nowait(self._in_down.popleft())
        self._end_when_drained()

    def _end_when_drained(self) -> None:
        if self.has_ended and not self._in_down and not self._partner._in_up:
            self._received.put_nowait(None)


def _frame_bytes(frame: Frame) -> int:
    contents = (getattr(frame, name, b"") for name in ("payload", "exponents", "ages"))
    return FRAME_BYTES + sum(map(len, contents))
