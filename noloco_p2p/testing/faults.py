"""Injects faults at chosen frames of a stream. The same plan always causes the same faults.

For example:

plan = FaultPlan().fail_at(At(Chunk, section=SectionName.OUTER_GRADIENT, index=1), send=FlipBit(3))
faults = plan.wrapper()
peer = swarm.peer("a", wrap=faults)          # wraps the streams that it opens
...
assert faults.fired == 1                     # the fault has happened
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Literal, NoReturn

from blake3 import blake3

from noloco_p2p.errors import TimedOut, Unreachable
from noloco_p2p.gossip.frames import Chunk, End, Frame, Header, Part, SectionName, chunk_digest
from noloco_p2p.gossip.seams import FrameStream

# the digests that match a damaged payload: none, only its chunk's, or also the whole section's
Digests = Literal["stale", "chunk", "section"]


@dataclass(frozen=True, slots=True)
class At:
    """A position in one direction of a stream: the `nth` frame, counted from 1, that matches all given fields."""

    kind: type[Frame] | UnionType = Frame
    section: SectionName | None = None
    index: int | None = None
    part: Part | None = None
    nth: int = 1

    def fits(self, frame: Frame) -> bool:
        wanted = {"section": self.section, "index": self.index, "part": self.part}
        return isinstance(frame, self.kind) and all(
            value is None or getattr(frame, name, None) == value for name, value in wanted.items()
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """Break the connection in both directions. The frame is not delivered."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Deliver neither this frame nor any later one in this direction, without any notice."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Lose the frame, but deliver all later frames."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Deliver the frame twice."""


@dataclass(frozen=True, slots=True)
class SwapWithNext:
    """Deliver the frame after the next one."""


@dataclass(frozen=True, slots=True)
class FlipBit:
    """Flip one bit of a chunk's payload."""

    bit: int
    digests: Digests = "stale"

    def alter(self, payload: bytes) -> bytes:
        damaged = bytearray(payload)
        damaged[self.bit // 8] ^= 1 << self.bit % 8
        return bytes(damaged)


@dataclass(frozen=True, slots=True)
class Truncate:
    """Cut off a chunk's payload after `num_bytes`."""

    num_bytes: int
    digests: Digests = "stale"

    def alter(self, payload: bytes) -> bytes:
        return payload[: self.num_bytes]


@dataclass(frozen=True, slots=True)
class Lengthen:
    """Make a chunk's payload `num_bytes` longer than announced."""

    num_bytes: int
    digests: Digests = "section"

    def alter(self, payload: bytes) -> bytes:
        return payload + bytes(self.num_bytes)


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Set all bits of a chunk's payload, which every codec decodes to NaN."""

    digests: Digests = "section"

    def alter(self, payload: bytes) -> bytes:
        return b"\xff" * len(payload)


@dataclass(frozen=True, slots=True)
class Announce:
    """Change fields of a Header. None leaves a field unchanged."""

    codec: str | None = None
    num_elements: int | None = None
    num_chunks: int | None = None
    num_bytes: int | None = None

    def alter(self, header: Header) -> Header:
        return Header(
            header.section,
            header.codec if self.codec is None else self.codec,
            header.num_elements if self.num_elements is None else self.num_elements,
            header.num_chunks if self.num_chunks is None else self.num_chunks,
            header.num_bytes if self.num_bytes is None else self.num_bytes,
        )


@dataclass(frozen=True, slots=True)
class Replace:
    """Deliver another frame instead of this one."""

    frame: Frame


Fault = Cut | Stall | Drop | Repeat | SwapWithNext | FlipBit | Truncate | Lengthen | NotFinite | Announce | Replace


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """An immutable plan of faults and the frames at which they happen. Each fault happens once per stream."""

    sending: tuple[tuple[At, Fault], ...] = ()
    receiving: tuple[tuple[At, Fault], ...] = ()

    def fail_at(self, at: At, *, send: Fault | None = None, receive: Fault | None = None) -> FaultPlan:
        """Return a plan with one more fault.

        `send` applies to a frame that the owner of the stream sends, and `receive` to a frame that it receives.
        """
        sending = (*self.sending, (at, send)) if send else self.sending
        receiving = (*self.receiving, (at, receive)) if receive else self.receiving
        return FaultPlan(sending, receiving)

    def wrapper(
        self, *, first_streams: int | None = None, on_fault: Callable[[], None] = lambda: None
    ) -> FaultyStreams:
        """Return a function that wraps the streams of a peer. Only the first `first_streams` streams are faulty, or all
        if it is None.

        `on_fault` is called at the moment of a fault, for example to make the whole peer vanish.
        """
        return FaultyStreams(self, first_streams, on_fault)


class FaultyStreams:
    """Applies a plan to each new stream. `fired` counts the faults that happened, and `opened` counts the streams."""

    def __init__(self, plan: FaultPlan, first_streams: int | None, on_fault: Callable[[], None]) -> None:
        self.fired = 0
        self.opened = 0
        self._plan = plan
        self._first_streams = first_streams
        self._on_fault = on_fault

    def __call__(self, stream: FrameStream) -> FrameStream:
        self.opened += 1
        if self._first_streams is not None and self.opened > self._first_streams:
            return stream
        return _FaultyStream(stream, self._plan, self._count)

    def _count(self) -> None:
        self.fired += 1
        self._on_fault()


class _FaultyStream:
    def __init__(self, stream: FrameStream, plan: FaultPlan, on_fault: Callable[[], None]) -> None:
        self._stream = stream
        self._closed = asyncio.Event()
        self._outgoing = _Direction(plan.sending, on_fault)
        self._incoming = _Direction(plan.receiving, on_fault)
        self._arrived: deque[Frame] = deque()

    @property
    def peer(self) -> str:
        return self._stream.peer

    async def send(self, frame: Frame) -> None:
        for altered in await self._through(self._outgoing, frame):
            await self._stream.send(altered)

    async def receive(self, timeout_s: float) -> Frame:
        try:
            async with asyncio.timeout(timeout_s):  # a stall looks like a frame that does not arrive
                while not self._arrived:
                    frame = await self._stream.receive(timeout_s)
                    self._arrived.extend(await self._through(self._incoming, frame))
        except TimeoutError:
            raise TimedOut(f"no frame arrived for {timeout_s:.1f} s", peer=self.peer) from None
        return self._arrived.popleft()

    async def close(self) -> None:
        self._closed.set()
        await self._stream.close()

    async def _through(self, direction: _Direction, frame: Frame) -> Sequence[Frame]:
        frames = direction.pass_on(frame)
        if isinstance(frames, Cut):
            await self.close()
            raise Unreachable("the connection was cut", peer=self.peer)
        if isinstance(frames, Stall):
            await self._never()
        return frames

    async def _never(self) -> NoReturn:
        await self._closed.wait()
        raise Unreachable("the stream is closed", peer=self.peer)


class _Direction:
    """Counts the frames in one direction of one stream, and decides what happens to each of them."""

    def __init__(self, faults: Sequence[tuple[At, Fault]], on_fault: Callable[[], None]) -> None:
        self._faults = faults
        self._on_fault = on_fault
        self._seen = [0] * len(faults)
        self._held: tuple[Frame, ...] = ()
        self._stalled = False
        self._digests: dict[SectionName, list[bytes]] = {}  # of the chunks seen so far
        self._repaired: set[SectionName] = set()

    def pass_on(self, frame: Frame) -> Sequence[Frame] | Cut | Stall:
        if self._stalled:
            return Stall()
        fault = self._fault_for(frame)
        held, self._held = self._held, ()
        match fault:
            case Cut():
                return fault
            case Stall():
                self._stalled = True
                return fault
            case SwapWithNext():
                self._held = (frame,)
                return held
            case None:
                return (self._repair(frame), *held)
            case FlipBit() | Truncate() | Lengthen() | NotFinite() if isinstance(frame, Chunk):
                return (self._repair(_damaged(fault, frame), digests=fault.digests), *held)
            case _:
                return (*_altered(fault, frame), *held)

    def _repair(self, frame: Frame, *, digests: Digests = "stale") -> Frame:
        """Make the digest in the End of a section match its damaged chunks, if the fault asks for that."""
        if isinstance(frame, Chunk):
            self._digests.setdefault(frame.section, []).append(frame.digest)
            if digests == "section":
                self._repaired.add(frame.section)
        elif isinstance(frame, End) and frame.section in self._repaired:
            return End(frame.section, blake3(b"".join(self._digests[frame.section])).digest())
        return frame

    def _fault_for(self, frame: Frame) -> Fault | None:
        found = None
        for number, (at, fault) in enumerate(self._faults):
            if at.fits(frame):
                self._seen[number] += 1
                if self._seen[number] == at.nth:
                    found = fault
        if found:
            self._on_fault()
        return found


def _altered(fault: Fault, frame: Frame) -> tuple[Frame, ...]:
    match fault, frame:
        case Drop(), _:
            return ()
        case Repeat(), _:
            return (frame, frame)
        case Replace(other), _:
            return (other,)
        case Announce(), Header():
            return (fault.alter(frame),)
        case _:
            raise ValueError(f"{fault} cannot be applied to a {type(frame).__name__} frame")


def _damaged(fault: FlipBit | Truncate | Lengthen | NotFinite, chunk: Chunk) -> Chunk:
    payload = fault.alter(bytes(chunk.payload))
    fits = fault.digests != "stale"
    return Chunk(chunk.section, chunk.index, payload, chunk_digest(payload) if fits else chunk.digest)
