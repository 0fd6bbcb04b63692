"""The line of newcomers before a donor: who is served when, what is told, and who loses its turn."""

from __future__ import annotations

import asyncio

import pytest

from noloco_p2p.errors import Refused
from noloco_p2p.gossip.uploads import MAX_UPLOADS, MAX_WAITING, STALLED_S, UploadLine, wait_s


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("ahead", "expected_s"), [([10, 4], 4), ([10, 4, 3], 7), ([10, 4, 3, 20], 10), ([10, 4, 3, 20, 1], 11)]
)
def test_the_time_to_wait_is_that_of_those_before_two_at_once(ahead: list[int], expected_s: float) -> None:
    assert wait_s(ahead, chunk_s=1.0) == expected_s
    assert wait_s(ahead, chunk_s=0.5) == expected_s / 2


def test_the_place_and_the_time_left_are_told_once_a_chunk_was_measured() -> None:
    async def main() -> None:
        clock = Clock()
        line = UploadLine(clock=clock)
        with line.join(10) as first, line.join(4), line.join(5) as third:
            place = await anext(line.places(third))
            assert (place.position, place.left_s) == (1, None)
            clock.now_s = 2.0
            line.took(first)
            place = await anext(line.places(third))
            assert (place.position, place.left_s) == (1, 8.0)

    asyncio.run(main())


def test_who_takes_nothing_while_others_wait_loses_its_turn() -> None:
    async def main() -> None:
        clock = Clock()
        line = UploadLine(clock=clock)
        with line.join(5) as stalled, line.join(5) as busy, line.join(5) as third:
            clock.now_s = STALLED_S - 1
            line.took(busy)
            assert (await anext(line.places(third))).position == 1
            clock.now_s = STALLED_S + 1
            assert [place async for place in line.places(third)] == [], "its turn has come"
            with pytest.raises(Refused, match="others wait"):
                line.took(stalled)
            line.took(busy)

    asyncio.run(main())


def test_a_line_has_an_end() -> None:
    async def main() -> None:
        line = UploadLine()
        places = [line.join(1) for _ in range(MAX_UPLOADS + MAX_WAITING)]
        for place in places:
            place.__enter__()
        with pytest.raises(Refused, match="newcomers wait here already") as refusal, line.join(1):
            pass
        assert refusal.value.retry_after_s > 0

    asyncio.run(main())
