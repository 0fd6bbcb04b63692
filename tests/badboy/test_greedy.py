"""A peer that offers to everybody at once, on many calls and with forged times, gets no more than its share of swaps.

Eight honest peers over real gRPC, and a liar that accepts every offer, too. Rounds are counted and not waited for: an
honest peer that finds nobody is alone in that round, and the test goes on.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import Tensor

from noloco_p2p.gossip.frames import Boundary, Hello, SectionName
from noloco_p2p.gossip.outcome import Alone
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.gossip.sections import section_plans
from noloco_p2p.gossip.shares import FAIR_SHARES, START
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.greedy import GreedyPeer
from noloco_p2p.testing.loopback import LoopbackSwarm
from noloco_p2p.testing.patience import PATIENCE_S
from noloco_p2p.testing.peers import MemoryPeer
from noloco_p2p.testing.rounds import Vectors, one_round
from noloco_p2p.testing.specs import FP32, published

SPEC = RunSpec(name="greedy", codec=FP32, outer=published(inner_steps=1, max_wait_s=PATIENCE_S))
NUM_HONEST, WAIT_S = 8, 2.0
LIE = Vectors.random(666)


class Noise:
    """Vectors from a seed, no times, and a place in the run that fits everybody."""

    def boundary(self, partner: str) -> Boundary:
        return Boundary(0, None, None, 0.0)

    def vectors(self, partner: str) -> dict[SectionName, Tensor]:
        return LIE.state()

    def gradient(self, partner: str) -> Tensor:
        return LIE.outer_gradient


class Greedy:
    """A `GreedyPeer` on the loop of a swarm, each of whose calls is a connection of its own."""

    def __init__(self, swarm: LoopbackSwarm, *, is_listed: bool) -> None:
        self._swarm = swarm
        self._is_listed = is_listed
        hello = Hello("the-greedy", SPEC.name, SPEC.digest())
        num_elements = LIE.slow_weights.numel()
        self._executor = ThreadPoolExecutor(1)
        self.peer = GreedyPeer(
            Noise(),
            hello=hello,
            transport=GrpcTransport(lambda: hello),
            victims=lambda: [Candidate(peer.peer_id, swarm.addresses[peer.peer_id]) for peer in swarm.peers],
            plans=lambda: section_plans(SPEC.codec, swap_momentum=True, num_elements=num_elements),
            executor=self._executor,
            pause_s=0.02,
        )

    async def _start(self) -> tuple[GrpcServer, asyncio.Task[None]]:
        server = GrpcServer(self.peer)
        await server.start("127.0.0.1", 0)
        if self._is_listed:
            self._swarm.addresses["the-greedy"] = f"127.0.0.1:{server.port}"
        return server, asyncio.create_task(self.peer.run())

    async def _stop(self, server: GrpcServer, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(0.0)

    def __enter__(self) -> GreedyPeer:
        self._running = asyncio.run_coroutine_threadsafe(self._start(), self._swarm.loop).result(PATIENCE_S)
        return self.peer

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(*self._running), self._swarm.loop).result(PATIENCE_S)
        self._executor.shutdown()


def walk(peers: list[MemoryPeer], num_rounds: int) -> tuple[int, int]:
    """(swaps of all honest peers, those with the liar) in so many rounds."""
    swaps = bad = 0
    vectors = [Vectors.random(seed) for seed in range(len(peers))]
    for index in range(num_rounds):
        for outcome in one_round(peers, vectors, wait_s=WAIT_S, round_index=index):
            if not isinstance(outcome, Alone):
                swaps += 1
                bad += outcome.received.partner == "the-greedy"
    return swaps, bad


@pytest.mark.parametrize(("is_listed", "num_rounds"), [(True, 18), (False, 6)])
def test_a_greedy_peer_gets_its_share_at_most(is_listed: bool, num_rounds: int) -> None:
    with LoopbackSwarm(SPEC) as swarm:
        peers = [swarm.peer(f"honest-{number}") for number in range(NUM_HONEST)]
        with Greedy(swarm, is_listed=is_listed):
            swaps, bad = walk(peers, num_rounds)
        refused = sum(peer.driver.traffic.refused_over_share for peer in peers)
        unlisted = sum(peer.driver.traffic.refused_unlisted for peer in peers)
    assert swaps >= NUM_HONEST * num_rounds / 2, "the honest ones go on"
    if not is_listed:
        assert bad == 0
        assert unlisted > 0
        return
    most = START + 1 + FAIR_SHARES * num_rounds / NUM_HONEST  # of one honest peer, which draws it until it owes one
    assert bad <= NUM_HONEST * most
    assert refused > 0
