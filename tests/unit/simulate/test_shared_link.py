"""A link that the pipeline shares with swaps: the order and the share of each, and the duration of a frame."""

from __future__ import annotations

import asyncio

import pytest

from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.simulate.plan import parse_links
from noloco_p2p.simulate.shared_link import SharedLink, SharedWay, Urgency, transfer

MEGABYTE = 1_000_000


def carried(*cargos: tuple[float, str, int]) -> dict[str, float]:
    """Send cargos of (time, name, bytes) over a way of 1 MB/s; return the arrival time of each."""
    came: dict[str, float] = {}

    async def run() -> None:
        loop = asyncio.get_running_loop()
        way = SharedWay(8.0)

        def enter(name: str, num_bytes: int) -> None:
            if name.startswith("swap"):
                way.carry_swap(num_bytes, lambda: came.setdefault(name, loop.time()))
            else:
                urgency = Urgency.BACKWARD if name.startswith("backward") else Urgency.FORWARD
                way.carry(num_bytes, urgency, lambda: came.setdefault(name, loop.time()))

        for at_s, name, num_bytes in cargos:
            loop.call_later(at_s, enter, name, num_bytes)
        await asyncio.sleep(60.0)
        assert way.flow_bytes + way.swap_bytes == sum(num_bytes for _, _, num_bytes in cargos)
        assert way.busy_s == pytest.approx(way.flow_bytes / 1e6 + way.swap_bytes / 1e6)

    run_virtual(run())
    return came


def test_backwards_overtake_forwards_that_are_on_their_way() -> None:
    came = carried((0, "forward", MEGABYTE), (0, "forward 2", MEGABYTE), (0.5, "backward", MEGABYTE))
    assert came == pytest.approx({"backward": 1.5, "forward": 2, "forward 2": 3})


def test_a_swap_gets_a_fifth_while_the_pipeline_waits_and_all_of_it_otherwise() -> None:
    came = carried((0, "swap", MEGABYTE), (0.5, "forward", MEGABYTE))
    assert came == pytest.approx({"forward": 0.5 + 1 / 0.8, "swap": 2.0})
    assert carried((0, "swap", MEGABYTE), (0, "swap 2", MEGABYTE)) == pytest.approx({"swap": 1, "swap 2": 2})


def test_the_bytes_of_a_frame_do_not_wait_for_its_last_on_the_other_link() -> None:
    async def run() -> float:
        (profile,) = parse_links(["8mbit-50ms"])
        loop, came = asyncio.get_running_loop(), loop_future()
        here, there = SharedLink(profile), SharedLink(profile)
        transfer(here, there, MEGABYTE, Urgency.FORWARD, lambda: came.set_result(loop.time()))
        return await came

    assert run_virtual(run()) == pytest.approx(1.05)


def loop_future() -> asyncio.Future[float]:
    return asyncio.get_running_loop().create_future()
