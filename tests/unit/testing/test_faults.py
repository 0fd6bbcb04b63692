"""A fault happens at the chosen frame, and at no other."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest
from harness.patience import PATIENCE_S

from noloco_p2p.errors import PeerError, TimedOut, Unreachable
from noloco_p2p.gossip.frames import Chunk, Frame, Header, Ready, Received
from noloco_p2p.testing.faults import Faults, flip_bit
from noloco_p2p.testing.memory import MemoryStream

HEADER, FIRST, SECOND = Header(b"d" * 32), Chunk(b"abcd"), Chunk(b"efgh")
FRAMES: list[Frame] = [HEADER, FIRST, SECOND, Ready()]


async def through(faults: Faults) -> list[Frame]:
    """Return the frames that arrive."""
    here, there = MemoryStream.pair("b", "a")
    sender, arrived = faults(here), list[Frame]()

    async def send_all() -> None:
        for frame in FRAMES:
            await sender.send(frame)

    sending = asyncio.create_task(send_all())
    try:
        while True:
            arrived.append(await there.receive(0.05))
    except (TimedOut, Unreachable):
        pass
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    return arrived


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        (Faults(Chunk, "drop", nth=3), FRAMES),
        (Faults(Received, "drop"), FRAMES),
        (Faults(Chunk, "drop", nth=2), [HEADER, FIRST, Ready()]),
        (Faults(Chunk, "drop", again=True), [HEADER, Ready()]),
        (Faults(Header | Ready, "drop", nth=2), [HEADER, FIRST, SECOND]),
        (Faults(Chunk, "repeat"), [HEADER, FIRST, FIRST, SECOND, Ready()]),
        (Faults(Chunk, "late"), [HEADER, SECOND, FIRST, Ready()]),
        (Faults(Chunk, "cut", nth=2), [HEADER, FIRST]),
        (Faults(Chunk, "stall", nth=2), [HEADER, FIRST]),
        (
            Faults(Header, lambda header: Header(b"e" * 32)),
            [Header(b"e" * 32), *FRAMES[1:]],
        ),
        (Faults(Chunk, flip_bit(0)), [HEADER, Chunk(b"`bcd"), SECOND, Ready()]),
    ],
)
def test_a_fault_does_what_it_says(faults: Faults, expected: list[Frame]) -> None:
    assert asyncio.run(through(faults)) == expected


def test_frames_are_counted_over_all_streams() -> None:
    calls: list[str] = []
    faults = Faults(Header, "drop", nth=2, on_fault=lambda: calls.append("fault"))

    async def main() -> list[Frame]:
        arrived = []
        for _ in range(3):
            here, there = MemoryStream.pair("b", "a")
            await faults(here).send(HEADER)
            await here.send(Ready())
            arrived.append(await there.receive(PATIENCE_S))
        return arrived

    assert asyncio.run(main()) == [HEADER, Ready(), HEADER]
    assert (faults.fired, calls) == (1, ["fault"])


async def raises_unreachable(call: Coroutine[object, object, object]) -> bool:
    try:
        await asyncio.wait_for(call, PATIENCE_S)
    except PeerError as error:
        return isinstance(error, Unreachable)
    return False


def test_after_a_cut_both_ends_find_the_stream_broken_in_both_directions() -> None:
    async def main() -> list[bool]:
        here, there = MemoryStream.pair("b", "a")
        faulty = Faults(Header, "cut")(here)
        waiting = asyncio.create_task(raises_unreachable(faulty.receive(PATIENCE_S)))
        return [
            await raises_unreachable(faulty.send(HEADER)),
            await waiting,
            await raises_unreachable(there.receive(PATIENCE_S)),
            await raises_unreachable(there.send(HEADER)),
        ]

    assert asyncio.run(main()) == [True] * 4
