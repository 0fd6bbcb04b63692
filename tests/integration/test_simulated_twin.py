"""A simulation of two replicas ends with the same bits as two peers that swap over real gRPC."""

from __future__ import annotations

import functools
from pathlib import Path
from threading import Barrier

import pytest
import torch
from harness.loopback import LoopbackSwarm
from harness.patience import PATIENCE_S
from harness.swapping import together, wait_until
from harness.specs import published, tiny_llama
from torch import Tensor
from transformers import PreTrainedModel

from noloco_p2p.gossip.outcome import Swapped
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.optim.mixing import closing_rounds
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.swarm import peer_name, simulate_swarm
from noloco_p2p.spec import TrainSpec
from noloco_p2p.testing.peers import MemoryPeer
from noloco_p2p.trainer.inner_step import InnerStep

INNER_STEPS, NUM_ROUNDS = 3, 4
SPEC = tiny_llama(
    "twin",
    train=TrainSpec(total_steps=INNER_STEPS * NUM_ROUNDS, batch_size=2, warmup_steps=2),
    outer=published(inner_steps=INNER_STEPS, max_wait_s=PATIENCE_S),
    num_sequences=4,
)


def train(peer: MemoryPeer, model: PreTrainedModel, material: Material, step_together: Barrier) -> Tensor:
    """Train one real peer and return its weights. It reaches each boundary with a partner, so no round is solo."""
    inner, batches = InnerStep(model, material.spec.train), material.batches(peer.peer_id)
    outer = NoLoCo(model, None, peer, save_every_rounds=0, end_at=1.0)
    for step in range(INNER_STEPS * NUM_ROUNDS):
        inner(next(batches), progress=outer.progress)
        if (step + 1) % INNER_STEPS == 0:
            wait_until(lambda: peer.driver.phase in (RoundPhase.EARLY, RoundPhase.DONE))
            step_together.wait(PATIENCE_S)
        result = outer.step()
        assert result is None or isinstance(result.outcome, Swapped), result
    for _ in range(closing_rounds(material.spec.outer, 2)):
        assert isinstance(outer.closing_round(wait_s=PATIENCE_S).outcome, Swapped)
    flat = FlatParameters(model)
    return flat.read(0, flat.num_elements)


@pytest.mark.parametrize(
    ("inner_optimizer", "gradient"), [("adamw", "int8"), ("muon", "int8"), ("muon", "int2"), ("muon", "none")]
)
def test_two_simulated_replicas_are_two_peers_over_grpc(tmp_path: Path, inner_optimizer: str, gradient: str) -> None:
    spec = SPEC.with_changes({"train.inner_optimizer": inner_optimizer, "codec.outer_gradient": gradient})
    material = Material.of(spec, {})
    simulated: list[SimulatedReplica] = []
    result = simulate_swarm(material, Plan(2), on_made=simulated.extend)
    assert (result.swapped, result.half, result.alone) == (2 * NUM_ROUNDS, 0, 0)

    step_together = Barrier(2)
    with LoopbackSwarm(spec) as swarm:
        peers = [swarm.peer(peer_name(number), run_folder=tmp_path / str(number)) for number in range(2)]
        models = [material.model() for _ in peers]  # sequential, as it seeds torch
        pairs = zip(peers, models, strict=True)
        real = together(*(functools.partial(train, *pair, material, step_together) for pair in pairs))
    for number, (weights, replica) in enumerate(zip(real, simulated, strict=True)):
        differ = int((weights != replica.state.slow_weights).sum())
        assert differ == 0, f"replica {number}: {differ} of {weights.numel()} numbers differ"
    assert not torch.equal(real[0], FlatParameters(material.model()).read(0, real[0].numel())), "they have trained"
