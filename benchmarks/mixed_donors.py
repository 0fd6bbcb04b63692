"""Measure how much higher the loss of a state is if its halves come from two donors.

    python benchmarks/mixed_donors.py [--quick] [--json FILE]

Eight simulated replicas of the toy model (benchmarks/study/toy.toml) train at the peak learning rate, where the
distance between replicas is largest. For some pairs of replicas, a mixed state consists of the first half of one and
the second half of the other. The benchmark measures the validation losses of both replicas, of the mixed state and of
the mean of both, and the losses after 20 more inner steps on the same text.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import mean

import torch
from claims import Claim, run

from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.inner_step import InnerStep

TOY = Path(__file__).parent / "study" / "toy.toml"
MORE_STEPS = 20


def spec(steps: int) -> TrainerSpec:
    """Return the spec of the toy with a constant learning rate, because `min_learning_rate` is a share of the peak."""
    changes = {"train.total_steps": steps, "train.min_learning_rate": 1.0}
    return TrainerSpec.load(TOY).with_changes(changes, origin="mixed donors")


def after(material: Material, weights: torch.Tensor) -> tuple[float, float]:
    """Return the validation loss of these weights before and after MORE_STEPS further steps."""
    model = material.model()
    at_once = material.loss_of(weights, model)
    inner, batches = InnerStep(model, material.spec.train), material.batches("newcomer")
    for _ in range(MORE_STEPS):
        inner(next(batches), progress=0.5)
    return at_once, material.loss(model)


def half_and_half(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    middle = len(one) // 2
    return torch.cat([one[:middle], other[middle:]])


def measure(quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    material = Material.of(spec(100 if quick else 400), {})
    made: list[SimulatedReplica] = []
    result = simulate_swarm(material, Plan(8), on_made=made.extend)
    pairs = list(itertools.combinations([replica.state.slow_weights for replica in made], 2))[:: 14 if quick else 4]
    donors = [after(material, each) for pair in pairs for each in pair]
    mixed = [after(material, half_and_half(*pair)) for pair in pairs]
    in_middle = [after(material, (one + other) / 2) for one, other in pairs]
    rows = [("one donor", donors), ("half and half", mixed), ("their mean, for comparison", in_middle)]
    claims = [Claim("spread of the donors", 100 * result.spread, "%")]
    for name, losses in rows:
        claims.append(Claim(f"{name}: validation loss at once", mean(loss for loss, _ in losses), "nats a token"))
        claims.append(
            Claim(f"{name}: after {MORE_STEPS} steps alone", mean(later for _, later in losses), "nats a token")
        )
    for index, when in enumerate(("at once", f"after {MORE_STEPS} steps")):
        cost = mean(losses[index] for losses in mixed) / mean(losses[index] for losses in donors) - 1
        claims.append(Claim(f"half and half against one donor, {when}", 100 * cost, "% of loss"))
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
