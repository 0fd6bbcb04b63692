"""Simulates a swarm of NoLoCo replicas on a virtual clock, and computes its result."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from statistics import median
from typing import Any

from noloco_p2p.codec import CHUNK_ELEMENTS, get_codec, num_chunks, section_bytes
from noloco_p2p.errors import SettingsError
from noloco_p2p.gossip.deadlines import INTERNET
from noloco_p2p.gossip.sections import section_plans
from noloco_p2p.optim.mixing import closing_rounds
from noloco_p2p.optim.rules import NOLOCO
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.network import Link, LinkNetwork
from noloco_p2p.simulate.plan import Event, Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.result import Result, judge
from noloco_p2p.simulate.shared_link import patient
from noloco_p2p.transfer.donor import state_file_bytes

LISTED_S = 60.0  # how long a peer stays listed after a crash: the lifetime of a record


def simulate_swarm(
    material: Material,
    plan: Plan,
    *,
    on_made: Callable[[list[SimulatedReplica]], None] | None = None,
    liars: Mapping[int, Callable[..., SimulatedReplica]] | None = None,
) -> Result:
    """Run the simulation. `on_made` is called with the replicas before they run, so that the caller can inspect them
    afterwards.

    `liars` maps the numbers of some replicas to functions that create them in place of `SimulatedReplica`. The result
    does not count these replicas.
    """
    return run_virtual(_Swarm(material, plan, liars or {}).run(on_made))


def peer_name(replica: int) -> str:
    """Return the peer id of a replica, which also determines the order of its data."""
    return f"replica-{replica}"


def _late_median(values: Sequence[float]) -> float:
    """Return the median of the second half of the values, when round lengths have settled, or 0 if there are none."""
    return median(values[len(values) // 2 :]) if values else 0.0


class _Swarm:
    def __init__(self, material: Material, plan: Plan, liars: Mapping[int, Callable[..., SimulatedReplica]]) -> None:
        self.material = material
        self.plan = plan
        self.liars = liars
        self.rng = random.Random(f"swarm/{plan.seed}")
        num_elements = FlatParameters(material.model()).num_elements
        plans = section_plans(
            material.spec.codec, swap_momentum=material.spec.outer.sends_momentum, num_elements=num_elements
        )
        self.state_bytes = state_file_bytes(num_elements, material.spec.outer)
        frames_a_swap = 1 + len(plans) * (3 + num_chunks(num_elements)) + 2
        self.network = LinkNetwork(lose=plan.churn.lose, frames_a_swap=frames_a_swap, seed=plan.seed)
        links = [plan.link(number) for number in range(plan.num_replicas)]
        self.deadlines = patient(
            INTERNET,
            chunk_bytes=section_bytes(get_codec("fp32"), min(num_elements, CHUNK_ELEMENTS)),
            mbit_s=min(min(link.up_mbit_s, link.down_mbit_s) for link in links),
        )
        self.replicas: dict[int, SimulatedReplica] = {}
        self.runs: dict[int, asyncio.Task[None]] = {}
        self.crashed: set[int] = set()

    async def run(self, on_made: Callable[[list[SimulatedReplica]], None] | None) -> Result:
        churn = self.plan.churn
        for number in range(self.plan.num_replicas):
            if churn.joins_at_s(number) is None:
                self._start(number)
        if on_made:
            on_made(list(self.replicas.values()))
        events = [asyncio.create_task(self._at(event)) for event in churn.events]
        while pending := [task for task in self.runs.values() if not task.done()]:
            await asyncio.wait(pending)
        for event in events:
            event.cancel()
        await asyncio.gather(*events, return_exceptions=True)
        for number, task in self.runs.items():
            if number not in self.crashed:
                task.result()
        await self.network.close()
        return self._result()

    def _start(self, number: int) -> SimulatedReplica:
        plan, name = self.plan, peer_name(number)
        self.network.links[name] = Link.of(plan.link(number), seed=number)
        replica = self.replicas[number] = self.liars.get(number, SimulatedReplica)(
            number,
            peer_id=name,
            material=self.material,
            network=self.network,
            step_s=plan.seconds_per_step(number),
            absent=plan.churn.absent,
            num_points=plan.evaluations,
            seed=plan.seed,
            gates=plan.gates,
            deadlines=self.deadlines,
        )
        self.runs[number] = asyncio.create_task(self._life(replica))
        return replica

    def _life(self, replica: SimulatedReplica) -> Coroutine[Any, Any, None]:
        return replica.run(closing_rounds=closing_rounds(self.material.spec.outer, self.plan.num_replicas))

    async def _at(self, event: Event) -> None:
        await asyncio.sleep(event.at_s)
        number = event.replica
        match event.kind:
            case "join":
                await self._join(number)
            case "leave" if number in self.replicas:
                self.replicas[number].leave()
            case "crash" if number in self.runs and not self.runs[number].done():
                await self._crash(number)

    async def _join(self, number: int) -> None:
        donors = [self.replicas[each] for each, task in self.runs.items() if not task.done()]
        if not donors:
            return  # the run is over
        donor = self.rng.choice(donors)
        ours, theirs = self.plan.link(number), self.plan.link(donor.number)
        bytes_per_s = min(ours.down_mbit_s, theirs.up_mbit_s) * 1e6 / 8
        await asyncio.sleep(self.state_bytes / bytes_per_s)
        self._start(number).take(donor)

    async def _crash(self, number: int) -> None:
        name = peer_name(number)
        self.crashed.add(number)
        self.network.vanish(name)
        self.runs[number].cancel()
        await asyncio.wait([self.runs[number]])
        self.network.listed[name] = None
        await asyncio.sleep(LISTED_S)
        self.network.listed.pop(name, None)

    def _result(self) -> Result:
        honest = {number: replica for number, replica in self.replicas.items() if number not in self.liars}
        everybody = list(honest.values())
        survivors = [replica for number, replica in honest.items() if number not in self.crashed]
        if not survivors:
            raise SettingsError("every replica has crashed, so there is no result; reduce --churn")
        traffic = [replica.driver.traffic for replica in everybody]
        steps = sum(replica.steps for replica in everybody)
        sent_bytes = sum(each.bytes_sent for each in traffic)
        judged = judge(self.material, [replica.state.slow_weights for replica in survivors])
        return Result(
            rule=NOLOCO,
            **judged,
            sent_bytes=sent_bytes / len(everybody),
            sent_per_parameter_step=sent_bytes / max(1, steps) / judged["num_parameters"],
            steps=steps / len(everybody),
            swapped=sum(replica.swapped for replica in everybody),
            half=sum(replica.half for replica in everybody),
            alone=sum(replica.alone for replica in everybody),
            refused=sum(replica.refused for replica in everybody),
            clipped=sum(replica.clipped for replica in everybody),
            cut_share=sum(replica.cut_share for replica in everybody)
            / max(1, sum(replica.swapped + replica.half for replica in everybody)),
            late=sum(replica.late for replica in everybody),
            modulo_chunks=sum(each.modulo_chunks for each in traffic),
            plain_chunks=sum(each.plain_chunks for each in traffic),
            extended_chunks=sum(each.extended_chunks for each in traffic),
            broken_chunks=sum(each.broken_chunks for each in traffic),
            virtual_s=asyncio.get_running_loop().time(),
            curve=tuple(point for replica in everybody for point in replica.curve),
            rounds_s=tuple(_late_median(replica.rounds_s) for replica in everybody),
        )
