"""Whatever happens to any frame of a swap, both partners apply all of it or nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from harness.swap_swarm import SlowStream, Swarm, Trainer, profile

from noloco_p2p.gossip.frames import Accept, Chunk, Frame, Grid, Header, Offer, Ready, Received
from noloco_p2p.gossip.seams import FrameStream
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.testing.faults import Fault, Faults, flip_bit
from noloco_p2p.testing.memory import unchanged

ROUNDING = 1e-4  # of fp32 sums
NUM_ELEMENTS = 30_000  # eight units, so slices have several chunks, and two swaps may run at a time
LINKS = [profile(100.0, delay_ms=100.0)] * 2
NUM_FLIPS = 100


@dataclass(frozen=True, slots=True)
class End:
    """The two trainers after a run, and by how much their mean has changed."""

    honest: Trainer
    faulty: Trainer
    drift: float


def run(faults: Faults, *, is_second: bool, num_steps: int) -> End:
    """Train two peers, of which one is faulty.

    At first, chunks have no grid. From the fourth step on, steps are larger, so chunks need several passes.
    """

    async def main() -> End:
        wraps: list[Callable[[Any], Any]] = [lambda stream: stream] * 2
        wraps[is_second] = faults
        swarm = Swarm(LINKS, num_elements=NUM_ELEMENTS, wrap=wraps)
        for trainer in swarm.trainers:
            asyncio.get_running_loop().call_later(4.0, setattr, trainer, "noise", 0.1)
        await swarm.run(num_steps)
        return End(swarm.trainers[not is_second], swarm.trainers[is_second], swarm.drift())

    return run_virtual(main())


def test_a_run_without_faults_has_swaps_of_all_kinds() -> None:
    end = run(Faults(Ready, "drop", nth=10_000), is_second=False, num_steps=20)
    assert end.drift < ROUNDING
    assert end.faulty.counts.repeated_chunks > 0
    assert {len(end.faulty.exchange.units.chunks(swap.part)) for swap in end.faulty.swaps} >= {1, 3}


KINDS: dict[str, type[Frame]] = {kind.__name__: kind for kind in (Offer, Accept, Grid, Header, Chunk, Received, Ready)}
FAULTS: dict[str, Fault] = {
    "cut": "cut",
    "stalled": "stall",
    "lost": "drop",
    "repeated": "repeat",
    "late": "late",
}


@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_frame_leaves_a_whole_swap_or_none(kind: str, fault: str, is_second: bool) -> None:
    for nth in range(1, 9):
        faults = Faults(KINDS[kind], FAULTS[fault], nth=nth)
        end = run(faults, is_second=is_second, num_steps=30 if fault == "stalled" else 12)
        assert faults.fired or kind in ("Offer", "Accept"), "one of two peers may make all offers"
        assert end.drift < ROUNDING
        assert len(end.honest.swaps) == len(end.faulty.swaps) > 0


def test_every_flipped_bit_is_noticed() -> None:
    rng = random.Random(7)
    for _ in range(NUM_FLIPS):
        flip = flip_bit(rng.randrange(1 << 15))
        end = run(Faults(Chunk, flip, nth=rng.randrange(1, 12)), is_second=True, num_steps=8)
        assert end.drift < ROUNDING
        assert len(end.honest.corrupt) == 1
        assert "announced" in end.honest.corrupt[0]
        assert end.faulty.corrupt == []


WRONG: dict[str, tuple[type[Frame], Callable[[Any], Frame], str]] = {
    "a longer chunk": (Chunk, lambda chunk: Chunk(bytes(chunk.payload) + b"0"), "instead of"),
    "chunks that were not announced": (Header, lambda header: Header(bytes(32)), "announced"),
    "a short grid": (Grid, lambda grid: Grid(grid.exponents[1:]), "a grid of"),
    "a step out of range": (Grid, lambda grid: Grid(bytes([110]) + grid.exponents[1:]), "out of range"),
    "Ready instead of a header": (Header, lambda header: Ready(), "expected Header"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_partner_that_always_sends_wrong_data_changes_nothing(wrong: str) -> None:
    kind, change, reason = WRONG[wrong]
    end = run(Faults(kind, change, again=True), is_second=True, num_steps=8)
    assert end.honest.swaps == end.faulty.swaps == []
    assert any(reason in told for told in end.honest.corrupt), end.honest.corrupt


def test_nothing_is_sent_to_a_partner_that_has_not_committed_to_its_slice() -> None:
    """Otherwise a liar could make its slice depend on what it has read."""
    end = run(Faults(Header, "drop", again=True), is_second=True, num_steps=8)
    assert end.faulty.counts.bytes_sent > 0
    assert end.honest.counts.bytes_sent == 0


def test_a_partner_cannot_keep_a_swap_open_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noloco_p2p.gossip.gossip.LONGEST_S", 5.0)
    monkeypatch.setattr("noloco_p2p.gossip.gossip.LONGEST_STEPS", 0)

    async def main() -> Swarm:
        swarm = Swarm(LINKS, num_elements=NUM_ELEMENTS, codec="int8", wrap=[unchanged, SlowStream])
        await swarm.run(30)
        return swarm

    swarm = run_virtual(main())
    honest = swarm.trainers[0]
    assert honest.swaps == []
    assert honest.counts.failures["slow"] > 1
    assert swarm.drift() < ROUNDING


class Mirror:
    """A stream of a liar that announces what its partner announces, and then sends what its partner sends."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream, self.peer = stream, stream.peer
        self._heard: asyncio.Queue[Frame] = asyncio.Queue()

    async def send(self, frame: Frame) -> None:
        await self._stream.send(await self._heard.get() if isinstance(frame, (Header, Chunk)) else frame)

    async def receive(self, timeout_s: float) -> Frame:
        frame = await self._stream.receive(timeout_s)
        if isinstance(frame, (Header, Chunk)):
            self._heard.put_nowait(frame)
        return frame

    async def close(self) -> None:
        await self._stream.close()


def test_nobody_can_send_back_what_its_partner_sends() -> None:
    async def main() -> Trainer:
        swarm = Swarm(LINKS, num_elements=NUM_ELEMENTS, codec="int8", wrap=[lambda stream: stream, Mirror])
        await swarm.run(8)
        return swarm.trainers[0]

    honest = run_virtual(main())
    assert honest.swaps == []
    assert any("announced" in told for told in honest.corrupt)
