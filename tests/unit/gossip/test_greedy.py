"""A peer that makes offers to everybody all the time, and accepts every offer, gets at most its share of the swaps."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter

import pytest
from harness.hostile import GreedyGossip
from harness.swap_swarm import SlowStream, Swarm, Trainer, profile

from noloco_p2p.gossip.frames import Frame
from noloco_p2p.gossip.gossip import Gossip
from noloco_p2p.gossip.pairing import FAIR_SHARES, START, Shares
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.testing.memory import unchanged

NUM_HONEST, NUM_STEPS = 8, 60


async def train(last: type[Gossip], num_honest: int = NUM_HONEST, num_steps: int = NUM_STEPS) -> list[Trainer]:
    """Return the honest trainers of a swarm whose last peer has another gossip."""
    gossip, links = [Gossip] * num_honest + [last], [profile(0.5)] * num_honest + [profile(50.0)]
    swarm = Swarm(links, num_elements=60_000, codec="int8", gossip=gossip)
    await swarm.run(num_steps)
    assert swarm.drift() < 1e-4
    return swarm.trainers[:-1]


def test_a_greedy_peer_gets_one_and_a_half_times_its_share_at_most() -> None:
    peaceful, besieged = run_virtual(train(Gossip)), run_virtual(train(GreedyGossip))
    for trainer in besieged:
        partners = Counter(swap.partner for swap in trainer.swaps)
        most = FAIR_SHARES * partners.total() / NUM_HONEST
        # It begins with some credit, and a tenth of the agreements comes to nothing but earns credit as well.
        assert partners["peer-008"] <= START + 1 + 1.15 * most
        assert trainer.counts.refused["OVER_SHARE"] > 50
    before, after = (sum(len(trainer.swaps) for trainer in trainers) for trainers in (peaceful, besieged))
    assert after > 0.8 * before, "the others go on"


class StallingGossip(GreedyGossip):
    """A greedy liar that holds each partner up for as long as the partner waits."""

    stall_s = math.inf


class LateGossip(GreedyGossip):
    """A greedy liar whose swaps take as long as dozens of others, and are committed."""

    stall_s = 20.0


@pytest.mark.parametrize("liar", [StallingGossip, LateGossip])
def test_who_holds_others_up_is_a_partner_no_more(liar: type[Gossip]) -> None:
    peaceful, besieged = run_virtual(train(Gossip, 4, 150)), run_virtual(train(liar, 4, 150))
    before, after = (sum(len(trainer.swaps) for trainer in trainers) for trainers in (peaceful, besieged))
    assert after > 0.2 * before  # and without that charge, hardly any
    # It begins with credit for two swaps, and each takes the time of dozens of others.
    assert all(trainer.counts.failures["slow"] <= 4 for trainer in besieged)


@pytest.fixture
def charged(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how often each peer is charged for holding others up."""
    times, held_up = Counter[str](), Shares.held_up
    monkeypatch.setattr(Shares, "held_up", lambda own, peer, num: (times.update([peer]), held_up(own, peer, num)))
    return times


class BusyStream(SlowStream):
    """A stream of a machine that sometimes has no time for two seconds."""

    frames = itertools.count(1)  # of all streams

    async def send(self, frame: Frame) -> None:
        await asyncio.sleep(0.0 if next(self.frames) % 500 else 2.0)
        await self._stream.send(frame)


def test_a_busy_moment_costs_nobody_its_share(charged: Counter[str]) -> None:
    """Swaps of tiny models take a tenth of a second, so two seconds are many times as long as usual."""

    async def busy() -> None:
        await Swarm([profile(50.0)] * 4, num_elements=60_000, codec="int8", wrap=[BusyStream] * 4).run(60)

    run_virtual(busy())
    assert next(BusyStream.frames) > 5 * 500, "several moments were busy"
    assert not charged


def test_who_waits_behind_a_slow_swap_does_not_pay_for_it(charged: Counter[str]) -> None:
    async def besieged() -> None:
        links, gossip = [profile(0.5)] * 5 + [profile(50.0)], [Gossip] * 5 + [GreedyGossip]
        wrap = [unchanged] * 5 + [SlowStream]
        await Swarm(links, num_elements=60_000, codec="int8", gossip=gossip, wrap=wrap).run(100)

    run_virtual(besieged())
    liar = charged.pop("peer-005")
    assert charged.total() <= liar


class SpoilingGossip(GreedyGossip):
    """A peer with the highest peer id, whose offers are never accepted, because its current swap never ends."""

    def _free_in_s(self) -> float:
        return 1e6


def test_offers_that_are_refused_anyway_end_no_offers_of_others() -> None:
    peaceful, besieged = run_virtual(train(Gossip, num_steps=30)), run_virtual(train(SpoilingGossip, num_steps=30))
    before, after = (sum(len(trainer.swaps) for trainer in trainers) for trainers in (peaceful, besieged))
    assert after > 0.7 * before
