"""Inject faults at the peer, the round and the phase that a test chooses.

injector = Injector().fail_at(peer="a", round=3, phase=Phase.LATE_CHUNK)
a = swarm.peer("a", **injector.of("a"))
...
assert injector.fired == 1
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypedDict

from noloco_p2p.gossip.frames import Accept, Chunk, Frame, Header, Offer, Part, Ready, SectionName
from noloco_p2p.gossip.seams import FrameStream
from noloco_p2p.testing.faults import At, Cut, Fault, FaultPlan, FaultyStreams
from noloco_p2p.testing.memory import Wrap


class Phase(Enum):
    """The phases of a swap, by the frame that the faulty peer sends in them."""

    OFFER = At(Offer | Accept)
    EARLY_HEADER = At(Header, section=SectionName.SLOW_WEIGHTS)
    EARLY_CHUNK = At(Chunk, section=SectionName.OUTER_MOMENTUM)
    EARLY_READY = At(Ready, part=Part.EARLY)
    LATE_CHUNK = At(Chunk, section=SectionName.OUTER_GRADIENT)
    LATE_READY = At(Ready, part=Part.LATE)


class Wraps(TypedDict):
    """The arguments of `MemorySwarm.peer` that wrap streams."""

    wrap: Wrap
    wrap_accepted: Wrap


class Injector:
    """`fail_at` adds a fault; `of` returns the wrappers of a peer's streams, both opened and accepted ones."""

    def __init__(self, *, on_fault: Callable[[str], None] = lambda peer: None) -> None:
        self.fired = 0
        self._faults: dict[tuple[str, int], FaultPlan] = {}
        self._on_fault = on_fault

    def fail_at(self, *, peer: str, round: int, phase: Phase | At, fault: Fault | None = None) -> Injector:
        """Add a fault at the frame of `phase` in every swap of that round. None means that the connection breaks."""
        plan, at = self._faults.get((peer, round), FaultPlan()), phase.value if isinstance(phase, Phase) else phase
        self._faults[peer, round] = plan.fail_at(at, send=fault or Cut())
        return self

    def of(self, peer: str) -> Wraps:
        def wrap(stream: FrameStream) -> FrameStream:
            return _RoundStream(stream, lambda round_index: self._streams(peer, round_index))

        return {"wrap": wrap, "wrap_accepted": wrap}

    def _streams(self, peer: str, round_index: int) -> FaultyStreams | None:
        plan = self._faults.get((peer, round_index))

        def fired() -> None:
            self.fired += 1
            self._on_fault(peer)

        return plan.wrapper(on_fault=fired) if plan else None


class _RoundStream:
    """A stream that learns the round of the swap from its own Offer or Accept, and then adds that round's faults."""

    def __init__(self, stream: FrameStream, faults: Callable[[int], FaultyStreams | None]) -> None:
        self._stream = stream
        self._faults = faults

    @property
    def peer(self) -> str:
        return self._stream.peer

    async def send(self, frame: Frame) -> None:
        if isinstance(frame, Offer | Accept) and (faults := self._faults(frame.boundary.round)):
            self._stream = faults(self._stream)
        await self._stream.send(frame)

    async def receive(self, timeout_s: float) -> Frame:
        return await self._stream.receive(timeout_s)

    async def close(self) -> None:
        await self._stream.close()
