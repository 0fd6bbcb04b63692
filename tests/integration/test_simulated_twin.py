"""A simulation of two replicas ends with the same bits as two peers that swap over real gRPC."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.loopback import LoopbackSwarm
from harness.patience import PATIENCE_S
from harness.specs import published, tiny_llama
from harness.swapping import together
from torch import Tensor
from transformers import PreTrainedModel

from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.mixing import Swapped
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan, peer_name
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import TrainSpec
from noloco_p2p.testing.peers import MemoryPeer
from noloco_p2p.trainer.inner_step import InnerStep

INNER_STEPS, NUM_SWAPS = 3, 4
SPEC = tiny_llama(
    "twin",
    train=TrainSpec(total_steps=INNER_STEPS * NUM_SWAPS, batch_size=2, warmup_steps=2),
    outer=published(inner_steps=INNER_STEPS, wait=True, max_wait_s=PATIENCE_S),
    num_sequences=4,
)


def train(peer: MemoryPeer, model: PreTrainedModel, material: Material) -> tuple[Tensor, list[Swapped]]:
    """Train one real peer, and return its weights and its swaps."""
    inner, batches = InnerStep(model, material.spec.train), material.batches(peer.peer_id)
    swaps: list[Swapped] = []
    outer = NoLoCo(model, None, peer, save_every_s=0.0, on_swap=swaps.append)
    while outer.progress < 1:
        inner(next(batches), progress=outer.progress)
        outer.step()
    outer.close()
    flat = FlatParameters(model)
    return flat.read(0, flat.num_elements), swaps


@pytest.mark.parametrize(
    ("inner_optimizer", "changes"), [("adamw", {}), ("muon", {"outer.swap_momentum": True, "outer.gamma": 0.8})]
)
def test_two_simulated_replicas_are_two_peers_over_grpc(
    tmp_path: Path, inner_optimizer: str, changes: dict[str, Any]
) -> None:
    spec = SPEC.with_changes({"train.inner_optimizer": inner_optimizer, **changes})
    material = Material.of(spec, {})
    simulated: list[SimulatedReplica] = []
    simulate_swarm(material, Plan(2), on_made=simulated.extend)

    with LoopbackSwarm(spec) as swarm:
        peers = [swarm.peer(peer_name(number), run_folder=tmp_path / str(number)) for number in range(2)]
        models = [material.model() for _ in peers]  # sequential, as it seeds torch
        real = together(*(functools.partial(train, peer, models[n], material) for n, peer in enumerate(peers)))
    for number, ((weights, swaps), replica) in enumerate(zip(real, simulated, strict=True)):
        assert {swap.share for swap in (*swaps, *replica.swaps)} == {1.0}, "a swap carries everything"
        assert min(len(swaps), len(replica.swaps)) > NUM_SWAPS, "there are closing swaps, too"
        differ = int((weights != replica.current_weights()).sum())
        assert differ == 0, f"replica {number}: {differ} of {weights.numel()} numbers differ"
    assert not torch.equal(real[0][0], FlatParameters(material.model()).read(0, real[0][0].numel())), (
        "they have trained"
    )
