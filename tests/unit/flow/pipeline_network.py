"""A pipeline in memory, on a virtual clock: heads and replicas of `noloco_p2p.flow`, and streams with faults.

Each stream keeps its order; frames are delayed and damaged; streams close; peers are killed and restart. A payload is
the id of its microbatch and the path that it took, so that each gradient is checked against the path of its microbatch.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from pipeline_table import MICROBATCH_TOKENS, spec_of

from noloco_p2p.flow.frames import Backward, Forward, Frame, MicrobatchId
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.limits import MAX_WANTS_PER_PEER
from noloco_p2p.flow.node import MicrobatchLost, Task
from noloco_p2p.flow.replica import Replica
from noloco_p2p.flow.rooms import Kind
from noloco_p2p.simulate.clock import run_virtual

DRAIN_S = 150.0  # longer than the first deadline


@dataclass(frozen=True)
class Rates:
    """Fractions of payloads that are damaged, of tasks that fail, and of Forwards whose stream breaks.

    A break gives a microbatch two paths: its sender draws another replica, while the first replica also continues.
    """

    damaged: float = 0.0
    failed: float = 0.0
    cut: float = 0.0


class Peer:
    """One life of a peer, between two restarts: the links and the computer of its node."""

    node: Any  # Head or Replica

    def __init__(self, network: Network, name: str, stage: int, life: int) -> None:
        self.name, self.stage, self.alias = name, stage, f"{name}#{life}"
        self.is_alive = True
        self.counted_tokens = 0  # tokens of the gradients accumulated since the last step
        self.num_steps = 0
        last = network.num_stages - 1
        self.stages = dict.fromkeys(network.stages[last], last)  # streams are always open
        self._network = network
        self._computing = asyncio.Lock()

    def send(self, to: str, frame: Frame) -> None:
        self._network.send(self, to, frame)

    def broadcast(self, frame: Frame, *, but: str = "") -> None:
        for other in self._network.peers.values():
            if other.name not in (self.name, but) and abs(other.stage - self.stage) in (
                1,
                len(self._network.stages) - 1,
            ):
                self.send(other.name, frame)

    async def next_microbatch(self) -> object:
        return "data"

    async def compute(self, task: Task) -> object:
        """Return the payload of the next frame. A head counts its loss, and the others their backward pass."""
        network, id = self._network, task.id
        async with self._computing:
            await asyncio.sleep(0.05 + 0.2 * network.rng.random())
            if network.rng.random() < network.rates.failed:
                raise MicrobatchLost("failed")
        network.step_of[task.kind, id, self.stage] = self.num_steps
        if task.kind is Kind.FORWARD and self.stage == 0:
            assert id not in network.launched, "a number is used twice"
            network.launched.add(id)
            return id, ()
        received: Any = task.data if task.kind is Kind.FORWARD else task.received
        assert received[0] == id
        if task.kind is Kind.FORWARD:
            return id, (*received[1], self.alias)
        if task.kind is Kind.LOSS:
            assert id not in network.losses, "two losses of one microbatch"
            network.losses[id] = received[1]
        else:
            network.counted[id, self.stage] += 1
            assert received[1] == network.losses[id]
            assert not self.stage or received[1][self.stage - 1] == self.alias, "it comes back on another path"
        if (task.kind is Kind.LOSS) == (self.stage == 0):
            self.counted_tokens += MICROBATCH_TOKENS
            return received
        return None

    async def encoded(self, kind: Kind, result: object) -> object:
        return result

    async def close_step(self, num_tokens: int, progress: float | None) -> float:
        async with self._computing:
            assert num_tokens == self.counted_tokens, "divided by other tokens than were counted"
            self.counted_tokens = 0
            self.num_steps += 1
            await asyncio.sleep(0.1)
        if progress is None:
            return min(1.0, round(self.node.progress + 1 / self._network.num_steps, 9))
        return progress


class Network:
    """Call its methods within `run_network`."""

    def __init__(
        self,
        *,
        seed: int,
        num_heads: int = 3,
        num_replicas: tuple[int, ...] = (3, 3),
        num_rooms: int = 1,
        max_in_flight: int = 4,
        batch_size: int = 4,
        num_steps: int = 1000,
        rates: Rates = Rates(),
    ) -> None:
        self.rng = random.Random(seed)
        self.rates = rates
        self.launched: set[MicrobatchId] = set()
        self.losses: dict[MicrobatchId, tuple[str, ...]] = {}  # with the path
        self.counted: Counter[tuple[MicrobatchId, int]] = Counter()  # gradients by stage
        self.step_of: dict[tuple[Kind, MicrobatchId, int], int] = {}  # by stage
        self.num_stages, self.num_rooms, self.num_steps = 1 + len(num_replicas), num_rooms, num_steps
        self.stages = [[f"h{i}" for i in range(num_heads)]]
        self.stages += [[f"s{s}r{i}" for i in range(num)] for s, num in enumerate(num_replicas, 1)]
        self.peers: dict[str, Peer] = {}
        self._spec, self._max_in_flight = spec_of(self.num_stages, batch_size=batch_size), max_in_flight
        self._lives: Counter[str] = Counter()
        self._generations: Counter[frozenset[str]] = Counter()  # of the stream between two peers
        self._views: dict[tuple[str, str], int] = defaultdict(int)  # the one that the first peer knows
        self._floor_s: dict[tuple[str, str], float] = defaultdict(float)  # earliest next arrival, which keeps the order
        for name in (name for names in self.stages for name in names):
            self.start(name)

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s and not until():
            await asyncio.sleep(0.25)
            self._check_memory()

    def delay_s(self) -> float:
        return self.rng.choice((0.01, 0.05, 0.2)) * self.rng.random()

    # peers

    @property
    def nodes(self) -> list[Any]:
        return [peer.node for peer in self.peers.values() if peer.is_alive]

    @property
    def heads(self) -> list[Head]:
        return [node for node in self.nodes if isinstance(node, Head)]

    @property
    def replicas(self) -> list[Replica]:
        return [node for node in self.nodes if isinstance(node, Replica)]

    def following(self, stage: int) -> list[str]:
        return self.stages[(stage + 1) % self.num_stages]

    def start(self, name: str) -> None:
        stage = next(stage for stage, names in enumerate(self.stages) if name in names)
        life, rng = self._lives[name], random.Random(self.rng.random())
        self._lives[name] += 1
        peer = Peer(self, name, stage, life)
        links: Any = peer
        if stage == 0:
            peer.node = Head(
                self._spec,
                links,
                links,
                peer_id=name,
                num_rooms=self._max_in_flight,
                first_number=int(1000 * self.now_s) + life,
                rng=rng,
                progress=max((head.progress for head in self.heads), default=0.0),  # as in the state of a newcomer
            )
        else:
            heads, rooms = self.stages[0], self.num_rooms
            peer.node = Replica(self._spec, links, links, stage=stage, heads=heads, num_rooms=rooms, rng=rng)
        self.peers[name] = peer
        for other in self.peers:
            self._views[name, other] = self._generations[frozenset((name, other))]
        peer.node.neighbours_changed(self.following(stage))
        peer.node.start()

    async def kill(self, name: str) -> None:
        if self.peers[name].is_alive:
            self.peers[name].is_alive = False
            for other in self.peers:
                if other != name:
                    self.cut(name, other)
            await self.peers[name].node.stop()

    def restart(self, name: str) -> None:
        if not self.peers[name].is_alive:
            self.start(name)

    # streams

    def send(self, sender: Peer, to: str, frame: Frame) -> None:
        if not sender.is_alive:
            return
        if not self.peers[to].is_alive:
            self._after(self.delay_s(), lambda: sender.is_alive and sender.node.closed(to))
            return
        generation = self._views[sender.name, to]
        if isinstance(frame, Forward | Backward) and self.rng.random() < self.rates.damaged:
            frame = replace(frame, payload=None)
        due_s = max(self.now_s + self.delay_s(), self._floor_s[sender.name, to] + 1e-6)
        self._floor_s[sender.name, to] = due_s
        self._after(due_s - self.now_s, lambda: self._deliver(sender, to, frame, generation))

    def _deliver(self, sender: Peer, to: str, frame: Frame, generation: int) -> None:
        receiver = self.peers[to]
        if receiver.is_alive and self._views[to, sender.name] == generation:
            receiver.node.received(sender.name, frame)
            if isinstance(frame, Forward) and self.rng.random() < self.rates.cut:
                self.cut(sender.name, to, late_s=5.0 * self.rng.random())

    def cut(self, one: str, other: str, *, late_s: float = 0.0) -> None:
        """Break the stream between two peers: frames on the way are lost, and each side notices after its own delay.

        late_s: additional delay of `other`, such as for its keepalive.
        """
        link = frozenset((one, other))
        self._generations[link] += 1
        generation = self._generations[link]
        for here, there in ((one, other), (other, one)):
            heard_s = self.now_s + self.delay_s() + (late_s if here == other else 0.0)
            self._floor_s[there, here] = max(heard_s, self._floor_s[there, here])
            peer = self.peers[here]
            self._after(heard_s - self.now_s, lambda peer=peer, there=there: self._closed(peer, there, generation))

    def _closed(self, peer: Peer, there: str, generation: int) -> None:
        if peer.is_alive and self._views[peer.name, there] < generation:
            self._views[peer.name, there] = generation
            peer.node.closed(there)

    def _after(self, seconds: float, call: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(seconds, call)

    # invariants

    def _check_memory(self) -> None:
        for peer in self.peers.values():
            node = peer.node
            if isinstance(node, Head):
                assert len(node.trips) <= self._max_in_flight
                continue
            assert len(node.rooms.held) <= self.num_rooms
            assert len(node.rooms) <= MAX_WANTS_PER_PEER * len(self.peers)
            assert len(node.trips) <= len(node.rooms.held) + len(node.rooms) + MAX_WANTS_PER_PEER
            assert len(node.seen) <= len(self.stages[0])
            assert len(node.steps) <= len(self.stages[0])

    def check_counts(self) -> None:
        """Check that a stage counts a gradient at most once, after its loss, and after all later stages."""
        for (id, stage), num in self.counted.items():
            assert num == 1, f"stage {stage} counted {id} {num} times"
            assert id in self.losses, f"{id} was counted without a loss"
            later = range(stage + 1, self.num_stages)
            assert all(self.counted[id, other] == 1 for other in later), f"{id} skipped a stage"


def run_network(test: Callable[[Network], Coroutine[Any, Any, None]], *, seed: int = 0, **settings: Any) -> None:
    """Run a test on the virtual clock, and drain the network: in the end, no peer may hold anything."""

    async def main() -> None:
        network = Network(seed=seed, **settings)
        await test(network)
        network.rates = Rates()
        for node in network.heads:
            node.leave()
        await network.run(DRAIN_S)
        network.check_counts()
        for node in network.nodes:
            assert node.is_idle, vars(node)
            assert not isinstance(node, Replica) or not len(node.rooms)
        for peer in network.peers.values():
            await peer.node.stop()

    run_virtual(main())
