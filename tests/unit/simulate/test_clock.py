"""Virtual time jumps: no wait takes real time, and events happen in the order of the virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

import pytest
from harness.patience import AT_ONCE_S

from noloco_p2p.simulate.clock import InlineExecutor, run_virtual


def test_hours_pass_in_a_moment_and_in_order() -> None:
    events: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        events.append((name, asyncio.get_running_loop().time()))

    async def main() -> float:
        await asyncio.gather(sleeper("late", 7200.0), sleeper("early", 0.5))
        return asyncio.get_running_loop().time()

    began_s = time.monotonic()
    assert run_virtual(main()) == pytest.approx(7200.0)
    assert time.monotonic() - began_s < AT_ONCE_S
    assert [name for name, _ in events] == ["early", "late"]
    assert events[0][1] == pytest.approx(0.5)


def test_a_deadline_ends_a_wait_at_its_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 15.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(15.0)


def test_a_wait_for_less_than_the_clock_can_tell_ends() -> None:
    """Waits for a passing refusal are differences of two times, which may be that small."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(4.2)
        until_s = math.nextafter(loop.time(), math.inf)
        for _ in range(10):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), until_s - loop.time())
            if loop.time() >= until_s:
                return
        raise AssertionError("the clock stands still")

    run_virtual(main())


def test_a_wait_that_nothing_can_end_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no timer is left"):
        run_virtual(asyncio.Event().wait())


def test_the_executor_runs_at_once_and_keeps_errors_for_the_one_who_asks() -> None:
    async def main() -> None:
        loop, executor = asyncio.get_running_loop(), InlineExecutor()
        assert await loop.run_in_executor(executor, pow, 2, 5) == 32
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(executor, divmod, 1, 0)
        assert loop.time() == 0.0

    run_virtual(main())
