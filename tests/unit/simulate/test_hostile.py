"""A liar among simulated replicas: the gates refuse crude attacks, and no attack breaks the honest replica."""

from __future__ import annotations

import pytest
from harness.hostile import ADAPTIVE, CLAIMS, Attack
from harness.hostile_swarm import simulate_hostile
from harness.specs import published, tiny_llama

from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.result import Result
from noloco_p2p.spec import TrainSpec

SPEC = tiny_llama(
    "hostile",
    train=TrainSpec(total_steps=6, batch_size=2, warmup_steps=1),
    outer=published(inner_steps=2, max_wait_s=100.0, closing_rounds=0),
)


@pytest.fixture(scope="module")
def material() -> Material:
    return Material.of(SPEC, {})


def swarm_with(attack: Attack, material: Material) -> Result:
    """Simulate two replicas, so that the honest one meets the liar in every round."""
    return simulate_hostile(material, Plan(2, evaluations=1), {1: attack})


@pytest.mark.parametrize("attack", Attack)
def test_the_honest_replica_is_never_broken(attack: Attack, material: Material) -> None:
    result = swarm_with(attack, material)
    assert result.num_replicas == 1, "the liar is not counted"
    assert result.loss < 6.5, "about ln 384 = 5.95 at the start"
    if attack in (Attack.SCALED, Attack.FLIPPED, Attack.FLIPPED_GRADIENT):
        assert (result.refused, result.alone) == (3, 3)
    elif attack is Attack.NAN:
        assert (result.swapped, result.alone) == (0, 3)
    elif attack in (Attack.ADAPTIVE_BACK, Attack.ADAPTIVE_DRIFT):  # the liar leaves before the last late part
        assert result.swapped + result.half >= 2, "most of what it sends passes the gates"
    elif attack in CLAIMS:
        assert result.half >= 1, "it sends no gradient"
    elif attack not in ADAPTIVE:
        assert result.swapped == 3


@pytest.mark.parametrize("attack", ADAPTIVE)
def test_an_adaptive_liar_passes_the_gates_now_and_then(attack: Attack) -> None:
    """How often depends on the arithmetic of the processor, so the run has ten rounds."""
    result = swarm_with(attack, Material.of(SPEC.with_changes({"train.total_steps": 20}), {}))
    assert result.swapped >= 2
