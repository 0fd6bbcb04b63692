"""Peers over real gRPC end with bit-identical weights to their twins that swap in memory.

This promise holds for all codecs but modulo (whose dither is random), with fixed identities, one thread, a large
max_wait_s and no solo round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from threading import Barrier

import pytest
import torch
from harness.loopback import LoopbackSwarm
from harness.patience import PATIENCE_S
from harness.swapping import together, wait_until
from harness.specs import FP32, published
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from noloco_p2p.gossip.outcome import Swapped
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.spec import CodecSpec, RunSpec
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm

INNER_STEPS, NUM_ROUNDS = 3, 5
NAMES = ("a", "b")


def spec(gradient: str, *, swap_momentum: bool) -> RunSpec:
    return RunSpec(
        name="twin",
        codec=CodecSpec.model_validate({**FP32.model_dump(), "outer_gradient": gradient}),
        outer=published(inner_steps=INNER_STEPS, max_wait_s=PATIENCE_S, swap_momentum=swap_momentum),
    )


def model() -> nn.Module:
    """Build a model of about 330,000 parameters (two chunks a section), the same for all peers.

    Not thread-safe, as it seeds torch.
    """
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(16, 570), nn.Tanh(), nn.Linear(570, 560), nn.Tanh(), nn.Linear(560, 1))


def batch(peer: int, step: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * peer + step))
    return inputs, inputs.sin().sum(dim=1, keepdim=True)


def train(peer: MemoryPeer, net: nn.Module, number: int, step_together: Barrier) -> list[Tensor]:
    """Train NUM_ROUNDS rounds; return all weights as one vector, at the start and after each round."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    outer = NoLoCo(net, None, peer, save_every_rounds=0)
    weights = [parameters_to_vector(net.parameters()).detach()]
    for step in range(INNER_STEPS * NUM_ROUNDS):
        inputs, wanted = batch(number, step)
        nn.functional.mse_loss(net(inputs), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % INNER_STEPS == 0:  # no solo round: both have a partner before the boundary
            wait_until(lambda: peer.driver.phase in (RoundPhase.EARLY, RoundPhase.DONE))
            step_together.wait(PATIENCE_S)
        result = outer.step()
        if result:
            assert isinstance(result.outcome, Swapped), result
            weights.append(parameters_to_vector(net.parameters()).detach())
    return weights


def trained(make_swarm: Callable[[RunSpec], MemorySwarm], run_spec: RunSpec, folder: Path) -> list[list[Tensor]]:
    step_together = Barrier(len(NAMES))
    with make_swarm(run_spec) as swarm:
        peers = [swarm.peer(name, run_folder=folder / name) for name in NAMES]
        models = [model() for _ in peers]
        return together(*(functools.partial(train, peer, models[n], n, step_together) for n, peer in enumerate(peers)))


@pytest.mark.parametrize(
    ("swap_momentum", "gradient"),
    [(True, "fp32"), *((False, gradient) for gradient in ("fp32", "int4", "int2", "none"))],
)
def test_two_peers_over_grpc_end_with_the_bits_of_their_twins_in_memory(
    tmp_path: Path, swap_momentum: bool, gradient: str
) -> None:
    run_spec = spec(gradient, swap_momentum=swap_momentum)
    in_memory = trained(MemorySwarm, run_spec, tmp_path / "memory")
    over_grpc = trained(LoopbackSwarm, run_spec, tmp_path / "grpc")
    for name, ours, twins in zip(NAMES, over_grpc, in_memory, strict=True):
        for rounds, (own, twin) in enumerate(zip(ours, twins, strict=True)):
            assert torch.equal(own, twin), f"{name} after {rounds} rounds: {int((own != twin).sum())} numbers differ"
    first, second = over_grpc
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[-1], second[-1]), "two replicas, not one"
    assert not torch.equal(first[0], first[-1]), "they have trained"
