"""A peer looks up an unknown peer that makes it an offer, a few times per minute."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from harness.swap_swarm import Swarm, profile

from noloco_p2p.gossip.gossip import LOOK_S, LOOKS_AT_ONCE, LOOKS_PER_S, Gossip
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.simulate.clock import run_virtual


class FakeDirectory:
    def __init__(self, *, known: Sequence[str] = (), stored: Sequence[str] = (), is_slow: bool = False) -> None:
        self.known, self.stored, self.is_slow = known, stored, is_slow
        self.looks = 0

    def live(self) -> Sequence[Candidate]:
        return []

    def num_live(self) -> int:
        return 1

    def knows(self, peer_id: str) -> bool:
        return peer_id in self.known

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        self.looks += 1
        if self.is_slow:
            await asyncio.Event().wait()
        return Candidate(peer_id, "") if peer_id in self.stored else None


def in_gossip(directory: FakeDirectory, test: Callable[[Gossip], Awaitable[None]]) -> None:
    """Run a test with the gossip of a peer that has this directory."""

    async def main() -> None:
        [trainer] = Swarm([profile(1.0)], num_elements=100).trainers
        trainer.service._outside = replace(trainer.service._outside, directory=directory)
        await trainer.begin()
        assert trainer.service.gossip
        await test(trainer.service.gossip)
        await trainer.service.stop()

    run_virtual(main())


def test_newcomers_are_looked_up_a_few_times_per_minute() -> None:
    directory = FakeDirectory(known=["old"], stored=["new"])

    async def test(gossip: Gossip) -> None:
        assert await gossip._is_listed("old")
        assert directory.looks == 0
        assert await gossip._is_listed("new")
        for number in range(100):
            assert not await gossip._is_listed(f"stranger{number}")
        assert directory.looks == LOOKS_AT_ONCE
        assert await gossip._is_listed("old")
        await asyncio.sleep(1 / LOOKS_PER_S)
        for _ in range(2):
            await gossip._is_listed("stranger")
        assert directory.looks == LOOKS_AT_ONCE + 1

    in_gossip(directory, test)


def test_a_directory_that_does_not_answer_is_not_waited_for() -> None:
    async def test(gossip: Gossip) -> None:
        assert not await gossip._is_listed("new")
        assert asyncio.get_running_loop().time() == pytest.approx(LOOK_S, abs=1e-3)

    in_gossip(FakeDirectory(is_slow=True), test)
