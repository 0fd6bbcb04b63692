"""Peers keep swapping: the mean is conserved, replicas stay together, and a fault leaves no trace."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from harness import swap_swarm
from harness.swap_swarm import Swarm, profile

from noloco_p2p.gossip.pairing import Shares
from noloco_p2p.simulate.clock import run_virtual

LINKS = [profile(0.5)] * 6
ROUNDING = 1e-4  # of fp32 sums


@pytest.mark.parametrize("at_steps", [False, True], ids=["snapshots at any time", "snapshots at inner steps"])
def test_training_swarms_stay_together_and_conserve_their_mean(at_steps: bool) -> None:
    async def main() -> None:
        swarm = Swarm(LINKS, num_elements=60_000, at_steps=at_steps)
        await swarm.run(30, at_rest=60)
        assert swarm.drift() < ROUNDING
        assert swarm.spread() < 1e-3 / 3  # a third of a single step
        assert all(trainer.counts.swaps > 20 for trainer in swarm.trainers)

    run_virtual(main())


def test_equal_links_are_used() -> None:
    async def main() -> None:
        swarm = Swarm([profile(0.5)] * 8, num_elements=240_000, codec="int8")
        await swarm.run(30)
        assert sum(swarm.use(31.0, [0.5] * 8)) / 8 > 0.5

    run_virtual(main())


def test_unequal_links_and_steps_keep_swapping() -> None:
    async def main() -> None:
        links = [profile(rate) for rate in (2.0, 2.0, 0.5, 0.5, 0.1, 0.1)]
        swarm = Swarm(links, num_elements=60_000, step_s=[0.5, 1.0, 1.0, 2.0, 4.0, 1.0])
        await swarm.run(20, at_rest=30)
        assert swarm.drift() < ROUNDING
        assert all(trainer.counts.swaps > 10 for trainer in swarm.trainers)

    run_virtual(main())


def test_two_peers_with_a_vector_of_one_unit_swap() -> None:
    async def main() -> None:
        swarm = Swarm(LINKS[:2], num_elements=100)
        await swarm.run(20)
        assert swarm.drift() < ROUNDING
        assert all(trainer.counts.swaps > 5 for trainer in swarm.trainers)

    run_virtual(main())


def test_two_peers_keep_swapping_beside_one_that_is_paused() -> None:
    """The paused peer is listed, so each of the two soon has had more than its share of the other's swaps."""

    async def main() -> None:
        swarm = Swarm(LINKS[:3], num_elements=60_000)
        swarm.trainers[2].service.state = "paused"
        await swarm.run(60)
        assert all(trainer.counts.swaps > 60 for trainer in swarm.trainers[:2])

    run_virtual(main())


def test_peers_with_a_least_interval_meet_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of equal peers end in the same order each time, so the same two could be free first in each round."""

    async def main() -> None:
        swarm = Swarm([profile(10.0)] * 4, num_elements=60_000, step_s=3.0)
        await swarm.run(60)
        for trainer in swarm.trainers:
            partners = Counter(swap.partner for swap in trainer.swaps)
            assert len(partners) == 3
            assert max(partners.values()) < 0.6 * partners.total()

    monkeypatch.setattr(swap_swarm, "SPEC", swap_swarm.SPEC.with_changes({"outer.min_inner_steps": 2}))
    run_virtual(main())


def test_peers_that_find_nobody_else_swap_beyond_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        swarm = Swarm(LINKS[:2], num_elements=60_000)
        await swarm.run(30)
        assert all(trainer.counts.swaps > 5 for trainer in swarm.trainers)

    monkeypatch.setattr(Shares, "has_had", lambda shares, peer_id: True)
    run_virtual(main())


def test_broken_connections_leave_no_trace() -> None:
    async def main() -> None:
        swarm = Swarm(LINKS, num_elements=60_000, lose=0.5, seed=3)
        await swarm.run(80, at_rest=1)
        assert sum(trainer.counts.failures.total() for trainer in swarm.trainers) > 10
        assert sum(trainer.counts.swaps for trainer in swarm.trainers) > 30
        assert swarm.drift() < ROUNDING

    run_virtual(main())


def test_killed_peers_leave_whole_swaps_or_none() -> None:
    """Both partners apply a swap, or neither does, at whatever moment one of them is killed."""

    async def main(kill_after_s: float) -> tuple[int, float]:
        swarm = Swarm(LINKS[:2], num_elements=50_000, noise=0.0)
        one, other = swarm.trainers
        other.vector += 1e-2
        total = one.vector + other.vector
        runs = asyncio.create_task(swarm.run(6))
        await asyncio.sleep(kill_after_s)
        swarm.network.vanish("peer-001")
        await runs
        return len(one.swaps) - len(other.swaps), float((one.vector + other.vector - total).abs().max())

    ends = [run_virtual(main(0.05 + 0.037 * number)) for number in range(60)]
    assert {unequal for unequal, _ in ends} == {0}
    assert max(error for _, error in ends) < 1e-5
