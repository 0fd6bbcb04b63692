"""A peer looks up an unknown peer that makes it an offer, a few times per minute."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from noloco_p2p.gossip import gossip
from noloco_p2p.gossip.gossip import LOOKS_AT_ONCE, LOOKS_PER_S, Introductions
from noloco_p2p.gossip.seams import Candidate


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


def test_a_known_peer_is_not_looked_up_and_a_newcomer_is() -> None:
    async def run() -> None:
        directory = FakeDirectory(known=["old"], stored=["new"])
        introduced = Introductions(directory, clock=lambda: 0.0)
        assert await introduced.is_listed("old")
        assert directory.looks == 0
        assert await introduced.is_listed("new")
        assert not await introduced.is_listed("stranger")
        assert directory.looks == 2

    asyncio.run(run())


def test_strangers_cannot_make_it_search_all_the_time() -> None:
    async def run() -> None:
        now_s, directory = [0.0], FakeDirectory(known=["old"])
        introduced = Introductions(directory, clock=lambda: now_s[0])
        for number in range(100):
            assert not await introduced.is_listed(f"stranger{number}")
        assert directory.looks == LOOKS_AT_ONCE
        assert await introduced.is_listed("old")
        now_s[0] = 1 / LOOKS_PER_S
        await introduced.is_listed("stranger")
        await introduced.is_listed("stranger")
        assert directory.looks == LOOKS_AT_ONCE + 1

    asyncio.run(run())


def test_a_directory_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(gossip, "LOOK_S", 0.01)
        assert not await Introductions(FakeDirectory(is_slow=True), clock=lambda: 0.0).is_listed("new")

    asyncio.run(run())
