"""Measured rates, not constants, decide what a peer waits for and when it gives up a swap for another partner."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from threading import Timer

import pytest
from harness.patience import AT_ONCE_S, PATIENCE_S, PATIENT
from harness.rounds import Vectors, end_round, open_round, together, wait_until
from harness.specs import published

from noloco_p2p.gossip.frames import Chunk, Frame
from noloco_p2p.gossip.outcome import Half, Swapped
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.gossip.seams import FrameStream
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm

STEPS = 50
SPEC = RunSpec(name="in-time", outer=published(inner_steps=STEPS))
A, B = Vectors.random(1), Vectors.random(2)


def open_at(peer: MemoryPeer, vectors: Vectors, *, seconds_per_step: float, steps_left: int, index: int = 0) -> None:
    """Open a round of a peer that has measured its steps, `steps_left` steps before the boundary."""
    now_s = time.monotonic()
    peer.exchange.step_rate.open_round(now_s)
    for step in range(32):
        peer.exchange.step_rate.step(now_s + (step + 1) * seconds_per_step)
    peer.exchange.open(
        index,
        progress=0.0,
        state=vectors.state(),
        steps_done=STEPS - steps_left,
    )


def both_early(*peers: MemoryPeer) -> None:
    wait_until(lambda: all(peer.driver.phase is RoundPhase.EARLY for peer in peers))


def paired(swarm: MemorySwarm, *, seconds_per_step: float, steps_left: tuple[int, int]) -> list[MemoryPeer]:
    """Return two peers on the way to their boundaries, which have each other's early part."""
    peers = [swarm.peer("a"), swarm.peer("b")]
    for peer, vectors, left in zip(peers, (A, B), steps_left, strict=True):
        open_at(peer, vectors, seconds_per_step=seconds_per_step, steps_left=left)
    both_early(*peers)
    return peers


def test_a_partner_that_comes_too_late_is_not_waited_for() -> None:
    with MemorySwarm(SPEC, deadlines=PATIENT) as swarm:
        a, b = paired(swarm, seconds_per_step=200.0, steps_left=(1, 15))
        began_s = time.monotonic()
        outcome = end_round(a, A, wait_s=PATIENCE_S)
        assert time.monotonic() - began_s < AT_ONCE_S
        assert isinstance(outcome, Half)
        assert isinstance(end_round(b, B, wait_s=PATIENCE_S), Swapped), "b has what a staged, and needs not wait"


def test_who_is_asked_to_leave_waits_for_nobody() -> None:
    with MemorySwarm(SPEC, deadlines=PATIENT) as swarm:
        a, _ = paired(swarm, seconds_per_step=1.0, steps_left=(1, 1))
        asked = Timer(0.2, a.driver.hurry)
        asked.start()
        began_s = time.monotonic()
        outcome = end_round(a, A, wait_s=PATIENCE_S)
        asked.join()
        assert isinstance(outcome, Half)
        assert 0.2 <= time.monotonic() - began_s < AT_ONCE_S


def test_the_partners_lateness_is_told_apart_from_the_transfer() -> None:
    with MemorySwarm(SPEC) as swarm:
        a, b = swarm.peer("a"), swarm.peer("b")
        open_round(a, A)
        open_round(b, B)
        both_early(a, b)
        began_s = time.monotonic()
        late_s = 0.3

        def late() -> object:
            nonlocal late_s
            wait_until(lambda: time.monotonic() > began_s + late_s)
            late_s = time.monotonic() - began_s
            return end_round(b, B, wait_s=PATIENCE_S)

        of_a, of_b = together(lambda: end_round(a, A, wait_s=PATIENCE_S), late)
        rest_s = time.monotonic() - began_s - late_s
    assert isinstance(of_a, Swapped)
    assert isinstance(of_b, Swapped)
    assert of_a.received.lateness_s == pytest.approx(late_s, abs=0.15 + rest_s)
    assert of_a.received.transfer_s < 0.2 + rest_s
    assert of_b.received.lateness_s == 0.0


class Slow:
    """A stream that takes a second for each chunk."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self.peer = stream.peer

    async def send(self, frame: Frame) -> None:
        if isinstance(frame, Chunk):
            await asyncio.sleep(1.0)
        await self._stream.send(frame)

    async def receive(self, timeout_s: float) -> Frame:
        return await self._stream.receive(timeout_s)

    async def close(self) -> None:
        await self._stream.close()


def test_an_early_part_that_will_miss_the_boundary_gives_way_to_another_partner() -> None:
    large_a, large_b = (Vectors.random(seed, num_elements=20 * 262_144) for seed in (1, 2))
    with MemorySwarm(SPEC) as swarm:
        a, fast = swarm.peer("a"), swarm.peer("fast")
        for index in range(3):  # a measures its link
            open_round(a, large_a, round_index=index)
            open_round(fast, large_b, round_index=index)
            both_early(a, fast)
            ends = [partial(end_round, *both, wait_s=PATIENCE_S) for both in ((a, large_a), (fast, large_b))]
            together(*ends)
        slow = swarm.peer("slow", wrap=Slow, wrap_accepted=Slow)
        open_at(a, large_a, seconds_per_step=0.4, steps_left=45, index=3)
        open_at(slow, large_b, seconds_per_step=0.4, steps_left=45)
        wait_until(lambda: a.driver.phase is RoundPhase.SWAPPING)
        open_at(fast, large_b, seconds_per_step=0.4, steps_left=45, index=3)
        wait_until(lambda: a.driver.phase is RoundPhase.EARLY)
        assert "slow" in a.driver.last_fault
        assert "the early part would arrive too late for this round" in a.driver.last_fault
