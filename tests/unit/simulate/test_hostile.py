"""Liars among simulated replicas: the update filter bounds what they do, and their claims move nobody's schedule."""

from __future__ import annotations

import pytest
from harness.hostile import Attack, simulate_hostile
from harness.specs import tiny_llama

from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.result import Result
from noloco_p2p.spec import OuterSpec, TrainSpec

STEPS = 60


@pytest.fixture(scope="module")
def material() -> Material:
    train = TrainSpec(total_steps=STEPS, batch_size=2, warmup_steps=5)
    return Material.of(tiny_llama("hostile", train=train, outer=OuterSpec(closing_mixings=0)), {})


@pytest.fixture(scope="module")
def honest(material: Material) -> Result:
    return simulate_hostile(material, Plan(4), {})


@pytest.mark.parametrize("attack", [Attack.SCALED, Attack.CONSTANT, Attack.NOISE, Attack.FLIPPED])
def test_one_liar_of_four_does_not_stop_the_others_from_learning(
    attack: Attack, material: Material, honest: Result
) -> None:
    result = simulate_hostile(material, Plan(4), {3: attack})
    assert result.num_replicas == 3, "the liar is not counted"
    assert result.swaps.committed > 0.8 * honest.swaps.committed, "it keeps swapping"
    start = honest.curve[0].loss
    assert start - result.loss > 0.2 * (start - honest.loss)


@pytest.mark.parametrize("attack", [Attack.FAR_AHEAD, Attack.FAR_BEHIND])
def test_one_liar_does_not_move_the_schedule_of_the_others(attack: Attack, material: Material) -> None:
    made: list[SimulatedReplica] = []
    simulate_hostile(material, Plan(7, evaluations=1), {6: attack}, on_made=made.extend)
    trained = [peer.steps for peer in made[:-1]]
    partners = {swap.partner for peer in made[:-1] for swap in peer.swaps}
    assert made[-1].peer_id in partners
    assert 0.85 * STEPS <= min(trained) <= max(trained) <= 1.15 * STEPS, trained
