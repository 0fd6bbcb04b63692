"""The bit-for-bit promise: peers over real gRPC end with the weights of their twins that swap in memory.

It holds for fp32 codecs, fixed identities, one thread, a large max_wait_s and no lonely round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn

from noloco_p2p.gossip.outcome import Swapped
from noloco_p2p.spec import CodecSpec, OuterSpec, RunSpec
from noloco_p2p.testing.loopback import LoopbackSwarm
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm
from noloco_p2p.testing.rounds import together
from noloco_p2p.train.outer import NoLoCo

INNER_STEPS, NUM_ROUNDS = 3, 5
NAMES = ("a", "b")
FP32 = CodecSpec(slow_weights="fp32", outer_momentum="fp32", outer_gradient="fp32")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def spec(*, swap_momentum: bool) -> RunSpec:
    return RunSpec(
        name="twin", codec=FP32, outer=OuterSpec(inner_steps=INNER_STEPS, max_wait_s=30.0, swap_momentum=swap_momentum)
    )


def model() -> nn.Module:
    """About 330,000 parameters: two chunks a section. All peers start equal. Seeds torch, for one thread at a time."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(16, 570), nn.Tanh(), nn.Linear(570, 560), nn.Tanh(), nn.Linear(560, 1))


def batch(peer: int, step: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * peer + step))
    return inputs, inputs.sin().sum(dim=1, keepdim=True)


def train(peer: MemoryPeer, net: nn.Module, number: int, step_together: Barrier) -> list[Tensor]:
    """Train NUM_ROUNDS rounds; returns all weights."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    outer = NoLoCo(net, peer, save_every_rounds=0)
    for step in range(INNER_STEPS * NUM_ROUNDS):
        inputs, wanted = batch(number, step)
        nn.functional.mse_loss(net(inputs), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        step_together.wait(30.0)  # so that no round is lonely
        result = outer.step()
        assert result is None or isinstance(result.outcome, Swapped), result
    return [param.detach().clone() for param in net.parameters()]


def trained(make_swarm: Callable[[RunSpec], MemorySwarm], run_spec: RunSpec, folder: Path) -> list[list[Tensor]]:
    step_together = Barrier(len(NAMES))
    with make_swarm(run_spec) as swarm:
        peers = [swarm.peer(name, run_folder=folder / name) for name in NAMES]
        models = [model() for _ in peers]
        return together(*(functools.partial(train, peer, models[n], n, step_together) for n, peer in enumerate(peers)))


@pytest.mark.parametrize("swap_momentum", [True, False], ids=["momentum-swapped", "paper"])
def test_two_peers_over_grpc_end_with_the_bits_of_their_twins_in_memory(tmp_path: Path, swap_momentum: bool) -> None:
    run_spec = spec(swap_momentum=swap_momentum)
    in_memory = trained(MemorySwarm, run_spec, tmp_path / "memory")
    over_grpc = trained(LoopbackSwarm, run_spec, tmp_path / "grpc")
    for ours, twins in zip(over_grpc, in_memory, strict=True):
        assert all(torch.equal(own, twin) for own, twin in zip(ours, twins, strict=True))
    first, second = over_grpc
    assert not all(torch.equal(own, other) for own, other in zip(first, second, strict=True)), "two replicas, not one"
    start = list(model().parameters())
    assert not any(torch.equal(own, initial) for own, initial in zip(first, start, strict=True)), "they have trained"
