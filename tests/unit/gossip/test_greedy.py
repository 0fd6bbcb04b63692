"""A peer that makes offers to everybody all the time, and accepts every offer, gets at most its share of the swaps."""

from __future__ import annotations

from collections import Counter

from harness.hostile import GreedyGossip
from harness.swap_swarm import Swarm, Trainer, profile

from noloco_p2p.gossip.gossip import Gossip
from noloco_p2p.gossip.shares import FAIR_SHARES, START
from noloco_p2p.simulate.clock import run_virtual

NUM_HONEST, NUM_STEPS = 8, 60
LINKS = [profile(0.5)] * NUM_HONEST + [profile(50.0)]


async def train(last: type[Gossip]) -> list[Trainer]:
    """Return the honest trainers of a swarm whose last peer has another gossip."""
    gossip = [Gossip] * NUM_HONEST + [last]
    swarm = Swarm(LINKS, num_elements=60_000, codec="int8", gossip=gossip)
    await swarm.run(NUM_STEPS)
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
