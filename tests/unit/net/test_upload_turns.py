"""What is not sent is not charged, and swaps do not wait behind uploads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from noloco_p2p.net.throttle import DEPTH_S, UPLOAD_WAIT_S, Throttle
from noloco_p2p.simulate.clock import run_virtual

RATE = 1e6
MESSAGE_BYTES = 1_000_000  # one second
NUM_CALLS = 331

Take = Callable[[Throttle, int], Coroutine[Any, Any, None]]


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def gave_up(taking: Coroutine[Any, Any, None]) -> None:
    """Wait for a turn, and end while waiting."""
    task = asyncio.create_task(taking)
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("take", [Throttle.take, Throttle.take_what_is_left])
def test_calls_that_hang_up_leave_no_debt(take: Take) -> None:
    async def main() -> None:
        throttle = Throttle(RATE)
        for _ in range(NUM_CALLS):
            await gave_up(take(throttle, MESSAGE_BYTES))
        began_s = now_s()
        await throttle.take(MESSAGE_BYTES)
        assert now_s() - began_s <= 1.0 + DEPTH_S

    run_virtual(main())


def test_what_has_arrived_stays_charged() -> None:
    async def main() -> None:
        throttle = Throttle(RATE)
        await gave_up(throttle.arrived(10 * MESSAGE_BYTES))
        began_s = now_s()
        await throttle.arrived(MESSAGE_BYTES)
        assert now_s() - began_s == pytest.approx(11.0, abs=0.1)

    run_virtual(main())


def test_a_swap_waits_for_one_upload_and_not_for_a_queue_of_them() -> None:
    async def main() -> None:
        throttle = Throttle(RATE)
        uploads = [asyncio.create_task(throttle.take_what_is_left(MESSAGE_BYTES)) for _ in range(50)]
        await asyncio.sleep(2 * UPLOAD_WAIT_S + 0.5)
        began_s = now_s()
        await throttle.take(MESSAGE_BYTES)
        assert now_s() - began_s <= 1.5
        await asyncio.gather(*uploads)
        assert now_s() == pytest.approx(51.0, abs=0.1)  # together they use the whole rate

    run_virtual(main())


def test_uploads_go_on_slowly_while_swaps_use_the_whole_rate() -> None:
    async def main() -> None:
        throttle = Throttle(RATE)

        async def swap() -> None:
            while True:
                await throttle.take(MESSAGE_BYTES)

        swaps = [asyncio.create_task(swap()) for _ in range(2)]
        await asyncio.sleep(0.01)
        began_s = now_s()
        for _ in range(3):
            await throttle.take_what_is_left(MESSAGE_BYTES)
        assert 3 * UPLOAD_WAIT_S < now_s() - began_s < 3 * (UPLOAD_WAIT_S + 4.0)
        for task in swaps:
            task.cancel()

    run_virtual(main())
