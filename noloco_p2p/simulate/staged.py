"""A swarm with stages on a virtual clock. It decides which peers are present, where they send, and what is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from noloco_p2p.errors import SettingsError
from noloco_p2p.flow.actions import Compute, Kind
from noloco_p2p.flow.frames import MicrobatchId
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.limits import VOTE_S
from noloco_p2p.flow.replica import Replica
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import LISTED_S, Event, peer_name
from noloco_p2p.simulate.shared_link import SharedLink
from noloco_p2p.simulate.stage_node import StageNode
from noloco_p2p.simulate.stage_plan import StagedPlan
from noloco_p2p.simulate.stage_work import LateStageWork, TaskFlops
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.testing.memory import MemoryNetwork
from noloco_p2p.trainer.cut import auto_cut
from noloco_p2p.trainer.model import build_on_meta
from noloco_p2p.trainer.stage import build_stage, measure
from noloco_p2p.trainer.stage_work import StageWork

STUCK_S = 3600.0  # the simulation fails if no microbatch reaches the loss for this long


def staged(spec: TrainerSpec, num_stages: int) -> TrainerSpec:
    """Return the spec with `num_stages` stages. A spec that already has `num_stages` stages keeps its cut. Raises
    SpecError.
    """
    if spec.pipeline.stages == num_stages and spec.pipeline.cut != "auto":
        return spec
    meta = build_on_meta(spec.model, sequence_length=spec.data.sequence_length)
    cut = auto_cut(measure(meta, sequence_length=spec.data.sequence_length), num_stages)
    changes = {"model.parameter_seeds": True, "pipeline.stages": num_stages, "pipeline.cut": cut}
    return spec.with_changes(changes, origin="--stages")


class StagedSwarm:
    """The `stage_node.Pipeline` of a simulation. `material` must belong to a spec from `staged`."""

    def __init__(self, material: Material, plan: StagedPlan) -> None:
        self.material, self.plan, self.spec = material, plan, material.spec
        assert self.spec.pipeline.stages == plan.num_stages
        assert self.spec.pipeline.cut != "auto"
        self.cut = self.spec.pipeline.cut
        model = build_on_meta(self.spec.model, sequence_length=self.spec.data.sequence_length)
        self.sizes = measure(model, sequence_length=self.spec.data.sequence_length)
        self.flops = [TaskFlops.of(self.sizes, self.cut, stage) for stage in range(plan.num_stages)]
        churn = plan.churn
        # Each stage has its own network for swaps, but a peer has only one link.
        self.networks = [
            MemoryNetwork(lose=churn.lose, seed=plan.seed * plan.num_stages + stage) for stage in range(plan.num_stages)
        ]
        self.rng = random.Random(f"swarm/{plan.seed}")
        self.nodes: dict[str, StageNode] = {}
        self.stages: list[list[StageNode]] = [[] for _ in plan.num_replicas]
        self.losses_s: list[float] = []  # when each microbatch reached its loss
        self.curve: list[tuple[float, float, float]] = []  # progress, virtual seconds, loss of the merged model
        self._events: list[asyncio.Task[None]] = []
        self._losses = random.Random(f"lost/{plan.seed}")
        self._lost_at: dict[MicrobatchId, tuple[Kind, int]] = {}

    async def train(self, on_made: Callable[[list[StageNode]], None] | None) -> None:
        """Run until the last head has finished, while peers join, leave and crash."""
        churn = self.plan.churn
        for stage, num in enumerate(self.plan.num_replicas):
            for number in range(num):
                if churn.joins_at_s(number, stage) is None:
                    await self._start(stage, number)
        if on_made:
            on_made(list(self.nodes.values()))
        for node in self.nodes.values():
            self.neighbours(node)
        self._events = [asyncio.create_task(self._at(event)) for event in churn.events]
        await self._until_heads_finish()

    async def finish(self) -> None:
        """Finish the microbatches in flight, and take part in closing swaps, without further churn."""
        for event in self._events:
            event.cancel()
        await asyncio.gather(*self._events, return_exceptions=True)
        await self._until_replicas_finish()
        for node in self.nodes.values():
            node.freeze()
        if self.plan.gossips:
            await asyncio.gather(*(self._close(node) for node in self.nodes.values() if node.is_alive))

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

    # the interface that nodes use

    def node(self, name: str) -> StageNode:
        return self.nodes[name]

    def neighbours(self, node: StageNode) -> None:
        last = self.plan.num_stages - 1
        if not node.is_alive:
            return
        if node.stage < last:
            node.downstream.update(self._candidates(node, node.stage + 1))
        if node.stage == last:
            before = set(node.ring.chosen)
            node.ring.update(self._candidates(node, 0))
            for head in self.living(0):
                if head.name in before ^ set(node.ring.chosen):
                    head.tell_neighbours(self._sinks(head))
        elif node.stage == 0:
            node.ring.update(self._candidates(node, last))
            node.tell_neighbours(self._sinks(node))
        else:
            node.tell_neighbours(())

    def launched(self, id: MicrobatchId) -> None:
        """Draw whether the microbatch is lost, and at which computation. It is never lost at its first computation."""
        if self._losses.random() < self.plan.lost_share:
            stages = range(self.plan.num_stages)
            forwards = [(Kind.FORWARD if stage else Kind.LOSS, stage) for stage in stages]
            self._lost_at[id] = self._losses.choice([*forwards, *((Kind.BACKWARD, stage) for stage in stages)])

    def is_lost_in(self, task: Compute, stage: int) -> bool:
        return self._lost_at.get(task.id) == (task.kind, stage)

    def loss_came(self) -> None:
        self.losses_s.append(asyncio.get_running_loop().time())

    def step_closed(self, node: StageNode) -> None:
        """Evaluate the merged model if the first head has passed the next point of the curve."""
        heads = self.living(0)
        if heads and node is heads[0] and node.progress * self.plan.evaluations >= len(self.curve) + 1 - 1e-6:
            loss = self.merged_loss([[each.current_weights() for each in self.living(s)] for s in range(len(self.cut))])
            self.curve.append((node.progress, asyncio.get_running_loop().time(), loss))

    # which peers are present

    async def _start(self, stage: int, number: int, donor: StageNode | None = None) -> StageNode:
        plan, spec = self.plan, self.spec
        name = peer_name(number) if stage == 0 else f"stage-{stage}-{peer_name(number)}"
        link = SharedLink(plan.link(stage, number))
        self.networks[stage].links[name] = link.for_swaps
        built = build_stage(spec.model, self.cut, index=stage, sequence_length=spec.data.sequence_length)
        node = StageNode(
            self,
            spec,
            LateStageWork(built, spec, late_steps=plan.late_steps) if plan.late_steps else StageWork(built, spec),
            name=name,
            number=number,
            network=self.networks[stage],
            link=link,
            flops=self.flops[stage],
            flops_per_s=plan.speed(stage, number) * self._flops_per_s(),
            is_absent=lambda step: not plan.gossips or plan.churn.is_absent(name, step, seed=plan.seed),
            seed=plan.seed,
        )
        await node.enter(donor)
        self.nodes[name] = node
        self.stages[stage].append(node)
        batches = self.material.batches(name, replica=number, batch_size=spec.pipeline.microbatch) if not stage else ()
        node.begin(self._machine(node), batches)
        return node

    def _machine(self, node: StageNode) -> Head | Replica:
        spec, rooms = self.spec, self.plan.num_rooms(self.spec)
        batch_tokens = spec.train.batch_size * (spec.data.sequence_length - 1)
        shared = {"num_stages": self.plan.num_stages, "batch_tokens": batch_tokens, "rng": node.rng}
        shared |= {"rule": spec.pipeline.routing, "progress": node.progress}
        if node.stage == 0:
            return Head(peer_id=node.name, max_in_flight=rooms, first_number=0, **shared)
        return Replica(stage=node.stage, heads=self.networks[0].listed, num_rooms=rooms, **shared)

    def _flops_per_s(self) -> float:
        """Return the FLOP/s of a peer at speed 1."""
        sizes, spec = self.sizes, self.spec
        flops = 0.75 * sizes.num_blocks * sizes.block.flops + sizes.vocabulary.flops  # without recomputation
        return flops * spec.train.batch_size * spec.data.sequence_length / self.plan.step_s

    def _candidates(self, node: StageNode, stage: int) -> list[str]:
        """Return the peers of a stage from which a node draws those to which it sends."""
        listed = [name for name in self.networks[stage].listed if name not in node.unreachable]
        return listed[node.number % len(listed) :][:1] if self.plan.paths == "fixed" and listed else listed

    def _sinks(self, head: StageNode) -> list[str]:
        """Return the replicas of the last stage that have a stream to this head, no matter which end opened it."""
        if self.plan.paths == "fixed":
            return sorted(head.ring.chosen)
        callers = {node.name for node in self.living(self.plan.num_stages - 1) if head.name in node.ring.chosen}
        return sorted(callers.union(head.ring.chosen))

    # churn

    async def _at(self, event: Event) -> None:
        await asyncio.sleep(event.at_s)
        node = next((node for node in self.living(event.stage) if node.number == event.replica), None)
        match event.kind:
            case "join":
                await self._join(event.stage, event.replica)
            case "leave" if node:
                node.leave()
            case "crash" if node:
                node.vanish()
                await node.stop()
                await asyncio.sleep(LISTED_S)
                self.networks[node.stage].listed.pop(node.name, None)

    async def _join(self, stage: int, number: int) -> None:
        donors = self.living(stage)
        if not donors:
            return
        donor = self.rng.choice(donors)
        rate = min(self.plan.link(stage, number).down_mbit_s, self.plan.link(stage, donor.number).up_mbit_s)
        await asyncio.sleep(donor.state_bytes / (rate * 1e6 / 8))
        if donor.progress >= 1:
            return  # training is over; a head that has no step to close would never finish
        self.neighbours(await self._start(stage, number, donor))

    # the end

    async def _until_heads_finish(self) -> None:
        num_losses = -1
        while not all(node.has_finished.is_set() for node in self.stages[0]):
            if len(self.losses_s) == num_losses:
                raise SettingsError(f"no microbatch passed through the pipeline for {STUCK_S:.0f} virtual seconds")
            num_losses = len(self.losses_s)
            await self._wait(self.stages[0], STUCK_S)

    async def _until_replicas_finish(self) -> None:
        """Wait for the replicas. A replica that receives no end mark finishes when it forgets the heads."""
        await self._wait([node for stage in range(1, self.plan.num_stages) for node in self.living(stage)], VOTE_S)

    async def _wait(self, nodes: Sequence[StageNode], timeout_s: float) -> None:
        """Wait until all nodes have finished, or until the timeout."""
        tasks = [asyncio.create_task(node.has_finished.wait()) for node in nodes]
        _, waiting = await asyncio.wait(tasks, timeout=timeout_s)
        for task in waiting:
            task.cancel()

    async def _close(self, node: StageNode) -> None:
        await node.close()
        await node.depart()
