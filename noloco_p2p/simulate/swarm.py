"""Simulates a swarm of NoLoCo replicas on a virtual clock, and computes its result."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from noloco_p2p.errors import SettingsError
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import LISTED_S, Event, Plan, peer_name
from noloco_p2p.simulate.replica import SimulatedReplica, now_s
from noloco_p2p.simulate.result import Result, Swaps, judge
from noloco_p2p.testing.links import Link
from noloco_p2p.testing.memory import MemoryNetwork

NOLOCO = "noloco"  # the name of this rule
Make = Callable[[int, Plan, Material, MemoryNetwork], SimulatedReplica]


def simulate_swarm(
    material: Material,
    plan: Plan,
    *,
    on_made: Callable[[list[SimulatedReplica]], None] | None = None,
    liars: Mapping[int, Make] | None = None,
) -> Result:
    """Run the simulation. `on_made` is called with the replicas before they run, so that the caller can inspect them
    afterwards.

    `liars` maps the numbers of some replicas to what is called in place of `SimulatedReplica`. The result does not
    count these replicas.
    """
    return run_virtual(_Swarm(material, plan, liars or {}).run(on_made))


class _Swarm:
    def __init__(self, material: Material, plan: Plan, liars: Mapping[int, Make]) -> None:
        self.material = material
        self.plan = plan
        self.liars = liars
        self.rng = random.Random(f"swarm/{plan.seed}")
        self.network = MemoryNetwork(lose=plan.churn.lose, seed=plan.seed)
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

    def _start(self, number: int, donor: SimulatedReplica | None = None) -> None:
        self.network.links[peer_name(number)] = Link.of(self.plan.link(number), seed=number)
        make: Make = self.liars.get(number, SimulatedReplica)
        replica = self.replicas[number] = make(number, self.plan, self.material, self.network)
        self.runs[number] = asyncio.create_task(replica.run(donor))

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
        await asyncio.sleep(donor.state_bytes / bytes_per_s)
        self._start(number, donor)

    async def _crash(self, number: int) -> None:
        name = peer_name(number)
        self.crashed.add(number)
        self.network.vanish(name)
        self.runs[number].cancel()
        await asyncio.wait([self.runs[number]])
        await self.replicas[number].stop()
        await asyncio.sleep(LISTED_S)
        self.network.listed.pop(name, None)

    def _result(self) -> Result:
        honest = {number: replica for number, replica in self.replicas.items() if number not in self.liars}
        everybody = list(honest.values())
        survivors = [replica for number, replica in honest.items() if number not in self.crashed]
        if not survivors:
            raise SettingsError("every replica has crashed, so there is no result; reduce --churn")
        steps = sum(replica.steps for replica in everybody)
        sent_bytes = sum(replica.sent_bytes for replica in everybody)
        judged = judge(self.material, [replica.current_weights() for replica in survivors])
        return Result(
            rule=NOLOCO,
            **judged,
            sent_bytes=sent_bytes / len(everybody),
            sent_per_parameter_step=sent_bytes / max(1, steps) / judged["num_parameters"],
            steps=steps / len(everybody),
            virtual_s=now_s(),
            curve=tuple(point for replica in everybody for point in replica.curve),
            swaps=Swaps.mean(replica.swap_figures() for replica in everybody),
        )
