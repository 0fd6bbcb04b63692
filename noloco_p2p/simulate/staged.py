"""Simulates a pipeline: nodes that run the real `flow` code on a virtual clock, and swap with their stage."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from noloco_p2p.errors import SettingsError
from noloco_p2p.flow.frames import Backward, Forward, Frame
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.limits import TICK_S, VOTE_S, num_rooms
from noloco_p2p.flow.node import Task
from noloco_p2p.flow.replica import Replica
from noloco_p2p.flow.rooms import Kind
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import LISTED_S, Churn, Event, peer_name
from noloco_p2p.simulate.replica import SimulatedPeer, now_s
from noloco_p2p.simulate.shared_link import SharedLink, Urgency, transfer
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.testing.links import IDEAL, LinkProfile
from noloco_p2p.testing.memory import MemoryNetwork
from noloco_p2p.trainer.model import build_on_meta
from noloco_p2p.trainer.stage import build_stage, measure, train_of_stage
from noloco_p2p.trainer.stage_choice import StageNeeds
from noloco_p2p.trainer.stage_work import StageWork

T = TypeVar("T")

STUCK_S = 3600.0  # the simulation fails if no microbatch reaches the loss for this long
FORWARD_SHARE = 0.25  # a block takes 2 FLOPs per weight forward, 2 for recomputation and 4 backward


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """The input of a simulation of a pipeline.

    `num_replicas` has one number per stage, and includes replicas that join later. `step_s` is the virtual time in
    which a peer at speed 1 would take an inner step of the whole model without recomputation. Each task takes time in
    proportion to its FLOPs. `speeds` and `links` have the values of each stage in turn; the last ones also apply to all
    later stages.

    `window` is the number of microbatches that a head may have in flight, and that a replica may hold; None means as
    many as `flow.limits` allows. If `gossips` is False, replicas never mix.
    """

    num_replicas: tuple[int, ...]
    seed: int = 0
    step_s: float = 1.0
    speeds: tuple[tuple[float, ...], ...] = ((1.0,),)
    links: tuple[tuple[LinkProfile, ...], ...] = ((IDEAL,),)
    churn: Churn = field(default_factory=Churn)
    window: int | None = None
    gossips: bool = True
    evaluations: int = 4

    @property
    def num_stages(self) -> int:
        return len(self.num_replicas)

    def speed(self, stage: int, replica: int) -> float:
        return _of(self.speeds, stage, replica)

    def link(self, stage: int, replica: int) -> LinkProfile:
        return _of(self.links, stage, replica)


def _of(lists: tuple[tuple[T, ...], ...], stage: int, replica: int) -> T:
    own = lists[min(stage, len(lists) - 1)]
    return own[replica % len(own)]


def parse_replicas(text: str, *, num_stages: int) -> tuple[int, ...]:
    """Parse one number for all stages (`8`) or one per stage (`4,8,4`). Raises SettingsError if it is neither."""
    parts = text.split(",")
    numbers = tuple(int(part) for part in parts if part.strip().isdigit())
    if len(numbers) != len(parts) or not all(1 <= number <= 256 for number in numbers):
        raise SettingsError(
            f"--replicas {text} is invalid: give a number from 1 to 256, or one number per stage, such as 4,8,4"
        )
    if len(numbers) not in (1, num_stages):
        raise SettingsError(f"--replicas {text} has {len(numbers)} numbers, but the number of stages is {num_stages}")
    return numbers * (num_stages // len(numbers))


def by_stage(
    text: str, parse: Callable[[str], tuple[T, ...]], *, num_stages: int, flag: str
) -> tuple[tuple[T, ...], ...]:
    """Parse lists of values for each stage, separated by slashes. The last list also applies to all later stages.

    Raises SettingsError if there are more lists than stages.
    """
    lists = tuple(parse(part) for part in text.split("/"))
    if len(lists) > num_stages:
        raise SettingsError(f"{flag} {text} has lists for {len(lists)} stages, but there are only {num_stages}")
    return lists


def staged(spec: TrainerSpec, num_stages: int) -> TrainerSpec:
    """Return the spec with `num_stages` stages. If it has them already, its cut is kept. Raises SpecError."""
    if spec.pipeline.stages == num_stages and spec.pipeline.cut != "auto":
        return spec
    return StageNeeds.of(spec, num_stages).spec


class StageNode(SimulatedPeer):
    """A node of a pipeline. A node of stage 0 is a head. It is the `Links` and the `Computer` of its `flow.node.Node`.

    `flops` has the FLOPs per token of each kind of task. `has_finished` is set when the schedule of the node is done,
    or when it has left.
    """

    def __init__(self, swarm: StagedSwarm, stage: int, number: int) -> None:
        plan, spec, sizes = swarm.plan, swarm.spec, swarm.sizes
        name = peer_name(number) if stage == 0 else f"stage-{stage}-{peer_name(number)}"
        built = build_stage(spec.model, swarm.cut, index=stage, sequence_length=spec.data.sequence_length)
        super().__init__(
            spec,
            built.model,
            train_of_stage(spec),
            peer_id=name,
            network=swarm.networks[stage],
            is_absent=lambda step: not plan.gossips or plan.churn.is_absent(name, step, seed=plan.seed),
            seed=plan.seed,
            follows_caller=stage > 0,
        )
        self.name, self.stage, self.number = name, stage, number
        self.work = StageWork(built, spec)
        self.link = SharedLink(plan.link(stage, number))
        swarm.networks[stage].links[name] = self.link.for_swaps
        blocks = swarm.cut[stage] * sizes.block.flops
        self.flops = {
            Kind.FORWARD: FORWARD_SHARE * blocks,
            Kind.BACKWARD: (1 - FORWARD_SHARE) * blocks,
            Kind.LOSS: 0.0 if stage else sizes.vocabulary.flops,
        }
        # The FLOP/s of a peer at speed 1, which trains the whole model in `step_s`, without recomputation.
        whole = 0.75 * sizes.num_blocks * sizes.block.flops + sizes.vocabulary.flops
        whole *= spec.train.batch_size * spec.data.sequence_length / plan.step_s
        self.flops_per_s = plan.speed(stage, number) * whole
        self.stages: dict[str, int] = {}  # open streams, with the stages of the peers
        self.is_alive = True
        self.has_finished = asyncio.Event()
        self.busy_s = 0.0
        self.flow: Head | Replica  # from `begin` on
        self._swarm = swarm
        self._unreachable: set[str] = set()
        self._arriving = defaultdict[str, deque[Frame]](deque)
        self._is_frozen = False
        self._computing = asyncio.Lock()
        self._batches: Iterator[Tensor] = iter(())

    async def begin(self, donor: StageNode | None) -> None:
        """Enter the swarm and take part in the pipeline."""
        await self.enter(donor)
        self._swarm.nodes[self.name] = self
        self._swarm.stages[self.stage].append(self)
        swarm, spec = self._swarm, self._spec
        rooms, rng = swarm.plan.window or num_rooms(spec), random.Random(f"flow/{swarm.plan.seed}/{self.name}")
        if self.stage == 0:
            batches = swarm.material.batches(self.name, replica=self.number, batch_size=spec.pipeline.microbatch)
            self._batches = iter(batches)
            self.flow = Head(
                spec,
                self,
                self,
                peer_id=self.name,
                num_rooms=rooms,
                first_number=0,
                rng=rng,
                progress=self.progress,
            )
        else:
            self.flow = Replica(
                spec,
                self,
                self,
                stage=self.stage,
                heads=swarm.networks[0].listed,
                num_rooms=rooms,
                rng=rng,
                progress=self.progress,
            )
        self.flow.start()
        self.flow.follow(self._live)

    def busy_shares(self) -> tuple[float, float, float]:
        """Return the shares of time in which the compute, the up link and the down link have been busy."""
        return self.busy_s / now_s(), self.link.up.busy_s / now_s(), self.link.down.busy_s / now_s()

    async def leave(self) -> None:
        """Accept no new microbatches, finish those that this node holds, and leave."""
        self.flow.leave()
        while not self.flow.is_idle:  # noqa: ASYNC110 - the real peer polls, too
            await asyncio.sleep(TICK_S)
        await self.vanish()
        self._network.remove(self.name)

    async def vanish(self) -> None:
        """Crash the node. Each peer with a stream to this node notices the crash after the delay of their links."""
        self.is_alive = False
        self.has_finished.set()
        self._network.vanish(self.name)
        for name in self.stages:
            other = self._swarm.nodes[name]
            asyncio.get_running_loop().call_later(self._delay_s(other), other.stream_closed, self.name)
        await self.stop()

    def freeze(self) -> None:
        """Stop the node, so that it handles no more frames or inner steps, but can still swap."""
        self._is_frozen = True

    async def stop(self) -> None:
        self._is_frozen = True
        await self.flow.stop()
        await super().stop()

    def stream_closed(self, peer: str) -> None:
        self.stages.pop(peer, None)
        self._unreachable.add(peer)
        if not self._is_frozen:
            self.flow.closed(peer)

    def _live(self) -> Mapping[int, Sequence[str]]:
        networks = self._swarm.networks
        return {
            stage: [name for name in network.listed if name not in self._unreachable]
            for stage, network in enumerate(networks)
        }

    # the `Links` of the flow

    def send(self, to: str, frame: Frame) -> None:
        other = self._swarm.nodes[to]
        self.open(to)
        if not other.is_alive:
            asyncio.get_running_loop().call_later(self._delay_s(other), self.stream_closed, to)
        elif isinstance(frame, Forward | Backward):
            is_forward = isinstance(frame, Forward)
            num_bytes = self.work.forward_bytes if is_forward else self.work.backward_bytes
            urgency = Urgency.FORWARD if is_forward else Urgency.BACKWARD
            transfer(self.link, other.link, num_bytes, urgency, partial(other._arrive, self, frame))
        else:
            other._arriving[self.name].append(frame)  # because timers for the same moment may fire in any order
            asyncio.get_running_loop().call_later(self._delay_s(other), other._arrive, self, None)

    def broadcast(self, frame: Frame, *, but: str = "") -> None:
        for other in [name for name in self.stages if name != but]:
            self.send(other, frame)

    def open(self, peer: str) -> None:
        other = self._swarm.nodes[peer]
        for one, two in ((self, other), (other, self)):
            if two.name not in one.stages and self.is_alive and other.is_alive:
                one.stages[two.name] = two.stage
                one.flow.opened(two.name)

    def look(self) -> None:
        """Do nothing, because no stream grows too old."""

    def _arrive(self, sender: StageNode, frame: Frame | None) -> None:
        frame = frame or self._arriving[sender.name].popleft()
        if self.is_alive and sender.is_alive and not self._is_frozen:
            self.flow.received(sender.name, frame)

    def _delay_s(self, other: StageNode) -> float:
        return self.link.delay_s + other.link.delay_s

    # the `Computer` of the flow

    async def compute(self, task: Task) -> object:
        tokens = self._spec.pipeline.microbatch * self._spec.data.sequence_length
        seconds = self.flops[task.kind] * tokens / self.flops_per_s
        async with self._computing:
            self.busy_s += seconds
            await asyncio.sleep(seconds)
            result = self.work.compute(self.work.decoded(task))
        if task.kind is Kind.LOSS:
            self._swarm.losses_s.append(now_s())
        return result

    async def encoded(self, kind: Kind, result: object) -> object:
        assert isinstance(result, Tensor)
        return self.work.encoded(kind, result)

    async def close_step(self, num_tokens: int, progress: float | None) -> float:
        if self._is_frozen:
            return self.progress
        self.work.close(self.inner, num_tokens, progress=self.progress)
        self.step_taken()
        if self.mixing.is_due:
            self.mixing.outer_step()
        if progress is not None:
            self.mixing.progress = progress
        if self.progress >= 1:
            self.has_finished.set()
        self._swarm.step_closed(self)
        return self.progress

    async def next_microbatch(self) -> object:
        return next(self._batches)


class StagedSwarm:
    """A swarm with stages. It decides which peers are present. `material` must belong to a spec from `staged`."""

    def __init__(self, material: Material, plan: StagedPlan) -> None:
        self.material, self.plan, self.spec = material, plan, material.spec
        assert self.spec.pipeline.stages == plan.num_stages
        assert self.spec.pipeline.cut != "auto"
        self.cut = self.spec.pipeline.cut
        model = build_on_meta(self.spec.model, sequence_length=self.spec.data.sequence_length)
        self.sizes = measure(model, sequence_length=self.spec.data.sequence_length)
        # Each stage has its own network for swaps, but a peer has only one link.
        self.networks = [
            MemoryNetwork(lose=plan.churn.lose, seed=plan.seed * plan.num_stages + stage)
            for stage in range(plan.num_stages)
        ]
        self.nodes: dict[str, StageNode] = {}
        self.stages: list[list[StageNode]] = [[] for _ in plan.num_replicas]
        self.losses_s: list[float] = []  # when each microbatch reached its loss
        self.curve: list[tuple[float, float, float]] = []  # progress, virtual seconds, loss of the merged model
        self._rng = random.Random(f"swarm/{plan.seed}")
        self._events: list[asyncio.Task[None]] = []

    async def train(self, on_made: Callable[[list[StageNode]], None] | None) -> None:
        """Run until the last head has finished, while peers join, leave and crash."""
        churn = self.plan.churn
        for stage, num in enumerate(self.plan.num_replicas):
            for number in range(num):
                if churn.joins_at_s(number, stage) is None:
                    await self._start(stage, number)
        if on_made:
            on_made(list(self.nodes.values()))
        self._events = [asyncio.create_task(self._at(event)) for event in churn.events]
        num_losses = -1
        while not all(node.has_finished.is_set() for node in self.stages[0]):
            if len(self.losses_s) == num_losses:
                raise SettingsError(f"no microbatch passed through the pipeline for {STUCK_S:.0f} virtual seconds")
            num_losses = len(self.losses_s)
            await self._wait(self.stages[0], STUCK_S)

    async def finish(self) -> None:
        """Finish the microbatches in flight, and take part in closing swaps, without further churn."""
        for event in self._events:
            event.cancel()
        await asyncio.gather(*self._events, return_exceptions=True)
        # A replica that receives no end mark finishes when it forgets the heads.
        await self._wait([node for node in self.nodes.values() if node.stage and node.is_alive], VOTE_S)
        living = [node for node in self.nodes.values() if node.is_alive]
        for node in living:
            node.freeze()
        if self.plan.gossips:
            await asyncio.gather(*(self._close(node) for node in living))

    async def stop(self) -> None:
        for node in self.nodes.values():
            await node.stop()
        for network in self.networks:
            await network.close()

    def loss(self, weights: Sequence[Tensor]) -> float:
        """Return the validation loss of the model that consists of one flat vector per stage."""
        model = self.material.model()
        parts: dict[str, Tensor] = {}
        for stage, vector in enumerate(weights):
            parts |= self.stages[stage][0].weights.parameters.by_name(vector)
        FlatParameters(model).take(parts)
        return self.material.loss(model)

    def merged_loss(self, weights: Sequence[Sequence[Tensor]]) -> float:
        """Return the validation loss of the model that consists of each stage's mean weights."""
        return self.loss([torch.stack(list(own)).mean(0) for own in weights])

    def living(self, stage: int) -> list[StageNode]:
        return [node for node in self.stages[stage] if node.is_alive]

    def step_closed(self, node: StageNode) -> None:
        """Evaluate the merged model if the first head has passed the next point of the curve."""
        heads = self.living(0)
        if heads and node is heads[0] and node.progress * self.plan.evaluations >= len(self.curve) + 1 - 1e-6:
            loss = self.merged_loss([[each.current_weights() for each in self.living(s)] for s in range(len(self.cut))])
            self.curve.append((node.progress, now_s(), loss))

    async def _start(self, stage: int, number: int, donor: StageNode | None = None) -> None:
        await StageNode(self, stage, number).begin(donor)

    async def _at(self, event: Event) -> None:
        await asyncio.sleep(event.at_s)
        node = next((node for node in self.living(event.stage) if node.number == event.replica), None)
        match event.kind:
            case "join":
                await self._join(event.stage, event.replica)
            case "leave" if node:
                await node.leave()
            case "crash" if node:
                await node.vanish()
                await asyncio.sleep(LISTED_S)
                self.networks[node.stage].listed.pop(node.name, None)

    async def _join(self, stage: int, number: int) -> None:
        donors = self.living(stage)
        if not donors:
            return
        donor = self._rng.choice(donors)
        rate = min(self.plan.link(stage, number).down_mbit_s, self.plan.link(stage, donor.number).up_mbit_s)
        await asyncio.sleep(donor.state_bytes / (rate * 1e6 / 8))
        if donor.progress < 1:  # a head that has no step to close would never finish
            await self._start(stage, number, donor)

    async def _wait(self, nodes: Sequence[StageNode], timeout_s: float) -> None:
        """Wait until all nodes have finished, or until the timeout."""
        tasks = [asyncio.create_task(node.has_finished.wait()) for node in nodes]
        if tasks:
            _, waiting = await asyncio.wait(tasks, timeout=timeout_s)
            for task in waiting:
                task.cancel()

    async def _close(self, node: StageNode) -> None:
        await node.close()
        await node.depart()
