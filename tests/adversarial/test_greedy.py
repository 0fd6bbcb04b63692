"""A peer that makes offers to everybody at once, on many calls, and accepts every offer gets its share of swaps."""

from __future__ import annotations

from harness.greedy import NAME, meet_greedy

from noloco_p2p.gossip.shares import FAIR_SHARES, START
from noloco_p2p.simulate.clock import run_virtual

NUM_HONEST, NUM_STEPS = 8, 20


def test_a_greedy_peer_gets_its_share_at_most() -> None:
    swarm, greedy = run_virtual(meet_greedy(NUM_HONEST, NUM_STEPS, is_listed=True))
    for trainer in swarm.trainers:
        bad = sum(swap.partner == NAME for swap in trainer.swaps)
        # Its account begins with START, and this peer draws it until it owes a swap.
        assert bad <= START + 2 + FAIR_SHARES * len(trainer.swaps) / NUM_HONEST
        assert len(trainer.swaps) - bad > NUM_STEPS
    assert greedy.refusals["OVER_SHARE"] > 0


def test_a_greedy_peer_without_a_record_gets_nothing() -> None:
    swarm, greedy = run_virtual(meet_greedy(NUM_HONEST, NUM_STEPS // 4, is_listed=False))
    assert not any(swap.partner == NAME for trainer in swarm.trainers for swap in trainer.swaps)
    assert greedy.refusals["UNLISTED"] > 0
