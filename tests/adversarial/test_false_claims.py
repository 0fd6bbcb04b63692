"""A greedy liar with honest weights claims to be far ahead of its partners in the schedule, or far behind them."""

from __future__ import annotations

import pytest
from harness.hostile import CLAIMS, Attack
from harness.hostile_swarm import simulate_hostile
from harness.specs import tiny_llama

from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.spec import OuterSpec, TrainSpec

NUM_PEERS, STEPS = 7, 120  # the last peer is the liar
LONGEST = 40
AUTO = OuterSpec(inner_steps="auto", min_inner_steps=4, max_inner_steps=LONGEST, max_wait_s=10.0, closing_rounds=0)
FIXED = OuterSpec(inner_steps=6, max_wait_s=10.0, closing_rounds=0)


@pytest.mark.parametrize("outer", [AUTO, FIXED], ids=["auto", "fixed"])
@pytest.mark.parametrize("attack", CLAIMS)
def test_one_liar_does_not_move_the_schedule_of_the_others(attack: Attack, outer: OuterSpec) -> None:
    spec = tiny_llama("claims", train=TrainSpec(total_steps=STEPS, batch_size=1, warmup_steps=10), outer=outer)
    made: list[SimulatedReplica] = []
    simulate_hostile(
        Material.of(spec, {}), Plan(NUM_PEERS, evaluations=1), {NUM_PEERS - 1: attack}, on_made=made.extend
    )
    honest = made[:-1]
    assert sum(peer.swapped + peer.half for peer in honest) > NUM_PEERS, "the liar and the others are partners"
    trained = [peer.steps for peer in honest]
    assert 0.85 * STEPS <= min(trained) <= max(trained) <= 1.15 * STEPS, trained
