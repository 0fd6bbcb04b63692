"""A pipeline in memory, on a virtual clock: heads and replicas of `noloco_p2p.flow`, and streams with faults.

Each stream keeps its order; frames are delayed and damaged; streams close; peers are killed and restart. Payloads carry
the path that they took, so that each gradient is checked against the path of its microbatch.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from noloco_p2p.flow.frames import Backward, Forward, Frame, MicrobatchId
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.limits import MAX_WANTS_PER_PEER
from noloco_p2p.flow.node import MicrobatchLost, Node, Task
from noloco_p2p.flow.replica import Replica
from noloco_p2p.flow.rooms import Kind
from noloco_p2p.simulate.clock import run_virtual

MICROBATCH_TOKENS = 10


@dataclass(frozen=True)
class Activations:
    id: MicrobatchId
    path: tuple[str, ...] = ()  # the peers on the way, from stage 1 on


@dataclass(frozen=True)
class Gradient:
    id: MicrobatchId
    path: tuple[str, ...]


@dataclass(frozen=True)
class Rates:
    """Fractions of payloads that are damaged, of tasks that fail, and of Forwards whose stream breaks.

    A break gives a microbatch two paths: its sender draws another replica, while the first replica also continues.
    """

    damaged: float = 0.0
    failed: float = 0.0
    cut: float = 0.0


@dataclass
class Book:
    """A record of events in the whole pipeline."""

    launched: set[MicrobatchId] = field(default_factory=set)
    losses: dict[MicrobatchId, tuple[str, ...]] = field(default_factory=dict)  # id -> path
    counted: Counter[tuple[MicrobatchId, int]] = field(default_factory=Counter)  # (id, stage) -> number of gradients
    step_of: dict[tuple[Kind, MicrobatchId, int], int] = field(default_factory=dict)  # counted by that stage


class Peer:
    """One life of a peer, between two restarts: the links and the computer of its node."""

    def __init__(self, network: Network, name: str, stage: int, life: int) -> None:
        self.name, self.stage, self.alias = name, stage, f"{name}#{life}"
        self.is_alive = True
        self.counted_tokens = 0  # tokens of the gradients accumulated since the last step
        self.num_steps = 0
        self.node: Any  # Head or Replica
        self._network = network
        self._computing = asyncio.Lock()

    @property
    def stages(self) -> dict[str, int]:
        last = self._network.num_stages - 1
        return dict.fromkeys(self._network.stages[last], last)

    def send(self, to: str, frame: Frame) -> None:
        self._network.send(self, to, frame)

    def broadcast(self, frame: Frame, *, but: str = "") -> None:
        for other in self._network.peers.values():
            if other.name not in (self.name, but) and abs(other.stage - self.stage) in (
                1,
                self._network.num_stages - 1,
            ):
                self.send(other.name, frame)

    def open(self, peer: str) -> None:
        """Streams are always open."""

    def look(self) -> None:
        """Streams never grow too old."""

    async def compute(self, task: Task) -> object:
        async with self._computing:
            await asyncio.sleep(0.05 + 0.2 * self._network.rng.random())
            if self._network.rng.random() < self._network.rates.failed:
                raise MicrobatchLost("failed")
            return self._result(task)

    def _result(self, task: Task) -> object:
        id, received, book = task.id, task.received, self._network.book
        book.step_of[task.kind, id, self.stage] = self.num_steps
        if task.kind is Kind.FORWARD:
            if self.stage == 0:
                assert id not in book.launched, "a number is used twice"
                book.launched.add(id)
                return Activations(id)
            assert isinstance(task.data, Activations)
            assert task.data.id == id
            return Activations(id, (*task.data.path, self.alias))
        if task.kind is Kind.LOSS:
            assert isinstance(received, Activations)
            assert received.id == id
            assert id not in book.losses, "two losses of one microbatch"
            book.losses[id] = received.path
            self.counted_tokens += MICROBATCH_TOKENS
            return Gradient(id, received.path)
        assert isinstance(received, Gradient)
        book.counted[id, self.stage] += 1
        if self.stage > 0:
            assert received.path[self.stage - 1] == self.alias, "a backward on another path than its forward"
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
        if self.stage:
            assert progress is not None
            return progress
        return min(1.0, round(self.node.progress + 1 / self._network.num_steps, 9))


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
        batch_tokens: int = 4 * MICROBATCH_TOKENS,
        num_steps: int = 1000,
        rates: Rates = Rates(),
    ) -> None:
        self.rng = random.Random(seed)
        self.book = Book()
        self.rates = rates
        self.num_stages, self.num_rooms, self.num_steps = 1 + len(num_replicas), num_rooms, num_steps
        self.stages = [[f"h{i}" for i in range(num_heads)]]
        self.stages += [[f"s{s}r{i}" for i in range(num)] for s, num in enumerate(num_replicas, 1)]
        self.peers: dict[str, Peer] = {}
        self._batch_tokens = batch_tokens
        self._max_in_flight = max_in_flight
        self._lives: Counter[str] = Counter()
        self._generations: Counter[frozenset[str]] = Counter()  # of the stream between two peers
        self._views: dict[tuple[str, str], int] = defaultdict(int)  # the one that the first peer knows
        self._floor_s: dict[tuple[str, str], float] = defaultdict(float)  # earliest next arrival, which keeps the order
        for names in self.stages:
            for name in names:
                self.start(name)

    # time

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s and not until():
            await asyncio.sleep(0.25)
            for peer in self.peers.values():
                self._check_memory(peer)

    def delay_s(self) -> float:
        return self.rng.choice((0.01, 0.05, 0.2)) * self.rng.random()

    # peers

    def stage_of(self, name: str) -> int:
        return next(stage for stage, names in enumerate(self.stages) if name in names)

    def start(self, name: str) -> None:
        stage, life = self.stage_of(name), self._lives[name]
        self._lives[name] += 1
        peer = Peer(self, name, stage, life)
        shared: dict[str, Any] = {
            "num_stages": self.num_stages,
            "batch_tokens": self._batch_tokens,
            "rng": random.Random(self.rng.random()),
        }

        async def next_microbatch() -> object:
            return "data"

        if stage == 0:
            peer.node = Head(
                peer,
                peer,
                peer_id=name,
                max_in_flight=self._max_in_flight,
                microbatch_tokens=MICROBATCH_TOKENS,
                next_microbatch=next_microbatch,
                first_number=int(1000 * self.now_s) + life,
                progress=max((head.progress for head in self.heads), default=0.0),  # as in the state of a newcomer
                **shared,
            )
        else:
            peer.node = Replica(peer, peer, stage=stage, heads=self.stages[0], num_rooms=self.num_rooms, **shared)
        self.peers[name] = peer
        for other in self.peers:
            self._views[name, other] = self._generations[frozenset((name, other))]
        peer.node.neighbours_changed(self.stages[(stage + 1) % self.num_stages])
        peer.node.start()

    async def kill(self, name: str) -> None:
        if not self.peers[name].is_alive:
            return
        self.peers[name].is_alive = False
        for other in list(self.peers):
            if other != name:
                self.cut(name, other)
        await self.peers[name].node.stop()

    def restart(self, name: str) -> None:
        if not self.peers[name].is_alive:
            self.start(name)

    async def stop(self) -> None:
        for peer in self.peers.values():
            await peer.node.stop()

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

    @property
    def nodes(self) -> list[Node]:
        return [peer.node for peer in self.peers.values() if peer.is_alive]

    @property
    def heads(self) -> list[Head]:
        return [node for node in self.nodes if isinstance(node, Head)]

    @property
    def replicas(self) -> list[Replica]:
        return [node for node in self.nodes if isinstance(node, Replica)]

    def _check_memory(self, peer: Peer) -> None:
        node = peer.node
        if isinstance(node, Head):
            assert len(node.trips) <= self._max_in_flight
            return
        assert len(node.rooms.held) <= self.num_rooms
        assert len(node.rooms) <= MAX_WANTS_PER_PEER * len(self.peers)
        assert len(node.trips) <= len(node.rooms.held) + len(node.rooms) + MAX_WANTS_PER_PEER
        assert len(node.seen) <= len(self.stages[0])
        assert len(node.steps) <= len(self.stages[0])

    def check_counts(self) -> None:
        """Check that a stage counts a gradient at most once, after its loss, and after all later stages."""
        last = self.num_stages - 1
        for (id, stage), num in self.book.counted.items():
            assert num == 1, f"stage {stage} counted {id} {num} times"
            assert id in self.book.losses, f"{id} was counted without a loss"
            later = range(stage + 1, self.num_stages) if stage else range(1, last + 1)
            assert all(self.book.counted[id, other] == 1 for other in later), f"{id} skipped a stage"


def run_network(
    test: Callable[[Network], Coroutine[Any, Any, None]],
    *,
    seed: int = 0,
    **settings: Any,
) -> None:
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
        await network.stop()

    run_virtual(main())


DRAIN_S = 150.0  # longer than the first deadline
