"""The fault plan injects the named fault at the named frame, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest
from blake3 import blake3
from harness.patience import PATIENCE_S

from noloco_p2p.errors import PeerError, TimedOut, Unreachable
from noloco_p2p.gossip.frames import Chunk, End, Frame, Header, Part, Ready, SectionName, chunk_digest
from noloco_p2p.testing.faults import (
    Announce,
    At,
    Cut,
    Drop,
    Fault,
    FaultPlan,
    FlipBit,
    NotFinite,
    Repeat,
    Replace,
    Stall,
    SwapWithNext,
    Truncate,
)
from noloco_p2p.testing.memory import MemoryStream

SECTION = SectionName.OUTER_GRADIENT


def chunk(index: int, payload: bytes) -> Chunk:
    return Chunk(SECTION, index, payload, chunk_digest(payload))


def end(*chunks: Chunk) -> End:
    return End(SECTION, blake3(b"".join(chunk.digest for chunk in chunks)).digest())


HEADER = Header(SECTION, "fp32", 2, 2, 8)
FIRST, SECOND = chunk(0, b"abcd"), chunk(1, b"efgh")
FRAMES: list[Frame] = [HEADER, FIRST, SECOND, end(FIRST, SECOND), Ready(Part.LATE)]


async def through(plan: FaultPlan, *, side: str) -> list[Frame]:
    """Return the frames that arrive when the fault is on the sender's or on the receiver's side."""
    here, there = MemoryStream.pair("b", "a")
    sender, receiver = (plan.wrapper()(here), there) if side == "send" else (here, plan.wrapper()(there))
    arrived: list[Frame] = []

    async def send_all() -> None:
        for frame in FRAMES:
            await sender.send(frame)

    sending = asyncio.create_task(send_all())
    try:
        while True:
            arrived.append(await receiver.receive(0.05))
    except (TimedOut, Unreachable):
        pass
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    return arrived


def run(plan: FaultPlan, side: str) -> list[Frame]:
    return asyncio.run(through(plan, side=side))


def plan_for(at: At, fault: Fault, side: str) -> FaultPlan:
    return FaultPlan().fail_at(at, send=fault) if side == "send" else FaultPlan().fail_at(at, receive=fault)


REPLACEMENT = Ready(Part.EARLY)
TRUNCATED, FLIPPED, SET = chunk(0, b"ab"), chunk(0, b"`bcd"), chunk(0, b"\xff" * 4)


@pytest.mark.parametrize("side", ["send", "receive"])
@pytest.mark.parametrize(
    ("at", "fault", "expected"),
    [
        (At(Chunk, nth=3), Drop(), FRAMES),
        (At(Chunk, index=1), Drop(), [HEADER, FIRST, *FRAMES[3:]]),
        (At(Chunk, nth=2), Drop(), [HEADER, FIRST, *FRAMES[3:]]),
        (At(nth=3), Drop(), [HEADER, FIRST, *FRAMES[3:]]),
        (At(Ready, part=Part.EARLY), Drop(), FRAMES),
        (At(section=SectionName.SLOW_WEIGHTS), Drop(), FRAMES),
        (At(Chunk), Repeat(), [HEADER, FIRST, FIRST, SECOND, *FRAMES[3:]]),
        (At(Chunk), SwapWithNext(), [HEADER, SECOND, FIRST, *FRAMES[3:]]),
        (At(Chunk, index=1), Cut(), [HEADER, FIRST]),
        (At(Chunk, index=1), Stall(), [HEADER, FIRST]),
        (At(Header), Announce(codec="int8"), [Header(SECTION, "int8", 2, 2, 8), *FRAMES[1:]]),
        (
            At(Header),
            Announce(num_elements=9, num_chunks=8, num_bytes=7),
            [Header(SECTION, "fp32", 9, 8, 7), *FRAMES[1:]],
        ),
        (At(Ready), Replace(REPLACEMENT), [*FRAMES[:4], REPLACEMENT]),
        (At(Chunk), FlipBit(0), [HEADER, Chunk(SECTION, 0, b"`bcd", FIRST.digest), *FRAMES[2:]]),
        (At(Chunk), FlipBit(0, digests="chunk"), [HEADER, FLIPPED, *FRAMES[2:]]),
        (At(Chunk), FlipBit(0, digests="section"), [HEADER, FLIPPED, SECOND, end(FLIPPED, SECOND), FRAMES[4]]),
        (At(Chunk), Truncate(2), [HEADER, Chunk(SECTION, 0, b"ab", FIRST.digest), *FRAMES[2:]]),
        (At(Chunk), Truncate(2, digests="chunk"), [HEADER, TRUNCATED, *FRAMES[2:]]),
        (At(Chunk), NotFinite(), [HEADER, SET, SECOND, end(SET, SECOND), FRAMES[4]]),
    ],
    ids=lambda value: str(value)[:60] if not isinstance(value, list) else "",
)
def test_a_fault_does_what_it_says(at: At, fault: Fault, expected: list[Frame], side: str) -> None:
    assert run(plan_for(at, fault, side), side) == expected


def test_a_plan_is_a_value() -> None:
    empty = FaultPlan()
    assert empty.fail_at(At(Chunk), send=Drop()) == empty.fail_at(At(Chunk), send=Drop())
    assert empty == FaultPlan(), "fail_at returns a new plan"
    assert run(empty, "send") == FRAMES


def test_only_the_first_streams_are_faulty_and_what_fired_is_counted() -> None:
    calls: list[str] = []
    faults = FaultPlan().fail_at(At(), send=Drop()).wrapper(first_streams=1, on_fault=lambda: calls.append("fault"))

    async def main() -> list[Frame]:
        arrived = []
        for _ in range(2):
            here, there = MemoryStream.pair("b", "a")
            await faults(here).send(HEADER)
            await here.send(REPLACEMENT)
            arrived.append(await there.receive(PATIENCE_S))
        return arrived

    assert asyncio.run(main()) == [REPLACEMENT, HEADER]
    assert (faults.fired, faults.opened, calls) == (1, 2, ["fault"])


async def raises_unreachable(call: Coroutine[object, object, object]) -> bool:
    try:
        await asyncio.wait_for(call, PATIENCE_S)
    except PeerError as error:
        return isinstance(error, Unreachable)
    return False


def test_after_a_cut_both_ends_find_the_stream_broken_in_both_directions() -> None:
    async def main() -> list[bool]:
        here, there = MemoryStream.pair("b", "a")
        faulty = FaultPlan().fail_at(At(), send=Cut()).wrapper()(here)
        waiting = asyncio.create_task(raises_unreachable(faulty.receive(PATIENCE_S)))
        return [
            await raises_unreachable(faulty.send(HEADER)),
            await waiting,
            await raises_unreachable(there.receive(PATIENCE_S)),
            await raises_unreachable(there.send(HEADER)),
        ]

    assert asyncio.run(main()) == [True] * 4


def test_a_stall_ends_when_the_stream_is_closed() -> None:
    async def main() -> bool:
        here, _ = MemoryStream.pair("b", "a")
        faulty = FaultPlan().fail_at(At(), send=Stall()).wrapper()(here)
        stalled = asyncio.create_task(raises_unreachable(faulty.send(HEADER)))
        await faulty.close()
        return await stalled

    assert asyncio.run(main())


def test_a_fault_that_does_not_fit_its_frame_is_a_mistake_of_the_test() -> None:
    with pytest.raises(ValueError, match="cannot be applied to a Header frame"):
        run(FaultPlan().fail_at(At(Header), receive=FlipBit(0)), "receive")
