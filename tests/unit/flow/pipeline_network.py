"""A pipeline in memory, on a virtual clock: heads and replicas of `noloco_p2p.flow`, and streams with faults.

Each stream keeps its order; frames are delayed, lost and repeated; streams close; peers are killed and restart.
Payloads carry the path that they took, so that each gradient is checked against the path of its microbatch.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from noloco_p2p.flow.actions import Action, Broadcast, CloseStep, Compute, GaveUp, Kind, Send
from noloco_p2p.flow.frames import Backward, Forward, Frame, MicrobatchId
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.limits import MAX_WANTS_PER_PEER, TICK_S
from noloco_p2p.flow.replica import Replica

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
    """Fractions of frames that are lost, repeated or damaged, of tasks that fail, and of Forwards whose stream breaks.

    A break gives a microbatch two paths: its sender draws another replica, while the first replica also continues.
    """

    lost: float = 0.0
    repeated: float = 0.0
    damaged: float = 0.0
    failed: float = 0.0
    cut: float = 0.0


@dataclass
class Node:
    """One life of a peer, between two restarts, with the state of its driver."""

    name: str
    stage: int
    life: int
    machine: Any  # Head or Replica
    counted_tokens: int = 0  # tokens of the gradients accumulated since the last step
    num_steps: int = 0
    is_alive: bool = True

    @property
    def alias(self) -> str:
        return f"{self.name}#{self.life}"


@dataclass
class Book:
    """A record of events in the whole pipeline."""

    launched: set[MicrobatchId] = field(default_factory=set)
    losses: dict[MicrobatchId, tuple[str, ...]] = field(default_factory=dict)  # id -> path
    counted: Counter[tuple[MicrobatchId, int]] = field(default_factory=Counter)  # (id, stage) -> number of gradients
    step_of: dict[tuple[Kind, MicrobatchId, int], int] = field(default_factory=dict)  # counted by that stage
    gave_up: Counter[MicrobatchId] = field(default_factory=Counter)
    num_frames: Counter[str] = field(default_factory=Counter)


class Network:
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
        is_evaluating: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.book = Book()
        self.rates = rates
        self.is_launching = True
        self.is_evaluating = is_evaluating
        self.num_stages = 1 + len(num_replicas)
        self.num_rooms = num_rooms
        self.stages = [[f"h{i}" for i in range(num_heads)]]
        self.stages += [[f"s{s}r{i}" for i in range(num)] for s, num in enumerate(num_replicas, 1)]
        self.nodes: dict[str, Node] = {}
        self._batch_tokens = batch_tokens
        self._max_in_flight = max_in_flight
        self._num_steps = num_steps
        self._lives: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._links: Counter[frozenset[str]] = Counter()  # generation of the stream between two peers
        self._views: dict[tuple[str, str], int] = defaultdict(int)  # the one that the first peer knows
        self._floor_s: dict[tuple[str, str], float] = defaultdict(float)  # earliest next arrival, which keeps the order
        for names in self.stages:
            for name in names:
                self.start(name)

    # events and time

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end_s = self.now_s + seconds
        while self._events and self._events[0][0] <= end_s and not until():
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        if not until():
            self.now_s = end_s

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._sequence), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now_s + seconds, event)

    def delay_s(self) -> float:
        return self.rng.choice((0.01, 0.05, 0.2)) * self.rng.random()

    # peers

    def stage_of(self, name: str) -> int:
        return next(stage for stage, names in enumerate(self.stages) if name in names)

    def start(self, name: str) -> None:
        stage, life = self.stage_of(name), self._lives[name]
        self._lives[name] += 1
        rng = random.Random(self.rng.random())
        if stage == 0:
            machine: Head | Replica = Head(
                peer_id=name,
                num_stages=self.num_stages,
                max_in_flight=self._max_in_flight,
                batch_tokens=self._batch_tokens,
                first_number=int(1000 * self.now_s) + life,
                rng=rng,
                progress=max((head.progress for head in self.heads), default=0.0),  # as in the state of a newcomer
            )
        else:
            machine = Replica(
                stage=stage,
                num_stages=self.num_stages,
                heads=self.stages[0],
                num_rooms=self.num_rooms,
                batch_tokens=self._batch_tokens,
                rng=rng,
            )
        node = self.nodes[name] = Node(name, stage, life, machine)
        for other in self.nodes:
            self._views[name, other] = self._links[frozenset((name, other))]
        self.neighbours(name, self.stages[(stage + 1) % self.num_stages])
        self._tick(node)

    def neighbours(self, name: str, downstream: list[str]) -> None:
        node = self.nodes[name]
        if node.stage == 0:
            self._do(node, node.machine.neighbours_changed(downstream, self.stages[-1], self.now_s))
        elif node.stage < self.num_stages - 1:
            self._do(node, node.machine.neighbours_changed(downstream, self.now_s))

    def kill(self, name: str) -> None:
        self.nodes[name].is_alive = False
        for other in list(self.nodes):
            if other != name:
                self.cut(name, other)

    def restart(self, name: str) -> None:
        if not self.nodes[name].is_alive:
            self.start(name)

    def cut(self, one: str, other: str, *, late_s: float = 0.0) -> None:
        """Break the stream between two peers: frames on the way are lost, and each side notices after its own delay.

        late_s: additional delay of `other`, such as for its keepalive.
        """
        link = frozenset((one, other))
        self._links[link] += 1
        generation = self._links[link]
        for here, there in ((one, other), (other, one)):
            heard_s = self.now_s + self.delay_s() + (late_s if here == other else 0.0)
            self._floor_s[there, here] = max(heard_s, self._floor_s[there, here])
            self.at(
                heard_s, lambda here=here, there=there, node=self.nodes[here]: self._closed(node, there, generation)
            )

    def _closed(self, node: Node, peer: str, generation: int) -> None:
        if node.is_alive and self._views[node.name, peer] < generation:
            self._views[node.name, peer] = generation
            self._do(node, node.machine.stream_closed(peer, self.now_s))

    def _unreachable(self, node: Node, peer: str) -> None:
        if node.is_alive and not self.nodes[peer].is_alive:
            self._do(node, node.machine.stream_closed(peer, self.now_s))

    def _tick(self, node: Node) -> None:
        if node.is_alive:
            self._do(node, node.machine.tick(self.now_s))
            self.after(TICK_S, lambda: self._tick(node))

    # the driver of one peer

    def _do(self, node: Node, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(to, frame):
                    self._send(node, to, frame)
                case Broadcast(frame, but):
                    for other in self.nodes:
                        if other not in (node.name, but) and abs(self.stage_of(other) - node.stage) in (
                            1,
                            self.num_stages - 1,
                        ):
                            self._send(node, other, frame)
                case Compute():
                    self.after(0.05 + 0.2 * self.rng.random(), lambda task=action: self._compute(node, task))
                case CloseStep():
                    self._close_step(node, action)
                case GaveUp(id):
                    self.book.gave_up[id] += 1
                    assert id not in self.book.losses, "given up with a loss"
        self._check_memory(node)
        if node.stage == 0 and node.is_alive:
            self._launch(node)

    def _launch(self, node: Node) -> None:
        is_training = not self.is_evaluating
        if self.is_launching and node.machine.can_launch(self.now_s, is_training=is_training):
            data = f"data {len(self.book.launched)}"
            id, actions = node.machine.launch(data, MICROBATCH_TOKENS, self.now_s, is_training=is_training)
            assert id not in self.book.launched, "a number is used twice"
            self.book.launched.add(id)
            self._do(node, actions)

    def _compute(self, node: Node, task: Compute) -> None:
        if not node.is_alive:
            return
        if self.rng.random() < self.rates.failed:
            self._do(node, node.machine.compute_failed(task, self.now_s))
            return
        self._do(node, node.machine.computed(task, self._result(node, task), self.now_s))

    def _result(self, node: Node, task: Compute) -> object:
        id, received = task.id, task.received
        self.book.step_of[task.kind, id, node.stage] = node.num_steps
        if task.kind is Kind.FORWARD:
            if node.stage == 0:
                return Activations(id)
            assert isinstance(task.data, Activations)
            assert task.data.id == id
            return Activations(id, (*task.data.path, node.alias))
        if task.kind is Kind.LOSS:
            assert isinstance(received, Activations)
            assert received.id == id
            if task.is_training:
                assert id not in self.book.losses, "two losses of one microbatch"
                self.book.losses[id] = received.path
                node.counted_tokens += MICROBATCH_TOKENS
            return Gradient(id, received.path)
        assert isinstance(received, Gradient)
        assert task.is_training
        self.book.counted[id, node.stage] += 1
        if node.stage > 0:
            assert received.path[node.stage - 1] == node.alias, "a backward on another path than its forward"
            node.counted_tokens += MICROBATCH_TOKENS
        return received

    def _close_step(self, node: Node, step: CloseStep) -> None:
        assert step.num_tokens == node.counted_tokens, "divided by other tokens than were counted"
        node.counted_tokens = 0
        node.num_steps += 1

        def closed() -> None:
            if not node.is_alive:
                return
            assert node.machine.tasks.running is step, "a task ran while a step closed"
            if node.stage == 0:
                progress = min(1.0, round(node.machine.progress + 1 / self._num_steps, 9))
                self._do(node, node.machine.step_closed(progress, self.now_s))
            else:
                assert step.progress == node.machine.steps.progress
                self._do(node, node.machine.step_closed(self.now_s))

        self.after(0.1, closed)

    def _check_memory(self, node: Node) -> None:
        machine = node.machine
        if isinstance(machine, Head):
            assert len(machine.in_flight) <= self._max_in_flight
            assert len(machine.departures) <= len(machine.in_flight)
            assert len(machine.tasks) <= len(machine.in_flight)
            return
        assert len(machine.stash) <= self.num_rooms
        assert len(machine.departures) <= len(machine.stash)
        assert len(machine.tasks) <= len(machine.stash)
        assert len(machine.wants) <= MAX_WANTS_PER_PEER * len(self.nodes)
        assert len(machine.seen) <= len(self.stages[0])
        assert len(machine.steps) <= len(self.stages[0])

    # streams

    def _send(self, node: Node, to: str, frame: Frame) -> None:
        self.book.num_frames[type(frame).__name__] += 1
        if not self.nodes[to].is_alive:
            self.after(self.delay_s(), lambda: self._unreachable(node, to))
            return
        generation = self._views[node.name, to]
        if isinstance(frame, Forward | Backward) and self.rng.random() < self.rates.damaged:
            frame = replace(frame, payload=None)
        num_copies = 0 if self.rng.random() < self.rates.lost else 1
        num_copies += self.rng.random() < self.rates.repeated
        for is_repeat in range(num_copies):
            delay_s = self.delay_s() + 5.0 * is_repeat * self.rng.random()
            due_s = max(self.now_s + delay_s, self._floor_s[node.name, to])
            if not is_repeat:
                self._floor_s[node.name, to] = due_s
            self.at(due_s, lambda: self._deliver(node, to, frame, generation))

    def _deliver(self, sender: Node, to: str, frame: Frame, generation: int) -> None:
        receiver = self.nodes[to]
        if receiver.is_alive and self._views[to, sender.name] == generation:
            self._do(receiver, receiver.machine.received(sender.name, frame, self.now_s))
            if isinstance(frame, Forward) and self.rng.random() < self.rates.cut:
                self.cut(sender.name, to, late_s=5.0 * self.rng.random())

    # invariants

    @property
    def machines(self) -> list[Any]:
        return [node.machine for node in self.nodes.values() if node.is_alive]

    @property
    def heads(self) -> list[Head]:
        return [machine for machine in self.machines if isinstance(machine, Head)]

    @property
    def replicas(self) -> list[Replica]:
        return [machine for machine in self.machines if isinstance(machine, Replica)]

    def check_counts(self) -> None:
        """Check that a stage counts a gradient at most once, after its loss, and after all later stages."""
        last = self.num_stages - 1
        for (id, stage), num in self.book.counted.items():
            assert num == 1, f"stage {stage} counted {id} {num} times"
            assert id in self.book.losses, f"{id} was counted without a loss"
            later = range(stage + 1, self.num_stages) if stage else range(1, last + 1)
            assert all(self.book.counted[id, other] == 1 for other in later), f"{id} skipped a stage"
        assert all(num == 1 for num in self.book.gave_up.values())

    def check_quiet(self) -> None:
        """Check that no room, want, departure or task is left."""
        for machine in self.machines:
            assert machine.is_idle, vars(machine)
            assert not len(machine.tasks)
            assert not len(machine.departures)
            if isinstance(machine, Replica):
                assert not len(machine.wants)
