"""Simulates a replica from start to end in one coroutine, with the rounds, swaps and outer step of a real peer."""

from __future__ import annotations

import asyncio

from noloco_p2p.gossip.deadlines import INTERNET, Deadlines
from noloco_p2p.optim.gates import GateLimits
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.network import LinkNetwork
from noloco_p2p.simulate.peer import SimulatedPeer, now_s
from noloco_p2p.simulate.result import Point
from noloco_p2p.testing.memory import Wrap, unchanged

AT_POINT = 1e-6  # tolerance, because progress is a sum of fractions


class SimulatedReplica(SimulatedPeer):
    """A simulated replica. `run` trains until the schedule is done or `leave` is called."""

    def __init__(
        self,
        number: int,
        *,
        peer_id: str,
        material: Material,
        network: LinkNetwork,
        step_s: float,
        absent: float,
        num_points: int,
        seed: int,
        gates: GateLimits | None = None,
        wrap: Wrap = unchanged,
        deadlines: Deadlines = INTERNET,
    ) -> None:
        super().__init__(
            material.spec,
            material.model(),
            material.spec.train,
            peer_id=peer_id,
            network=network,
            absent=absent,
            seed=seed,
            gates=gates,
            wrap=wrap,
            deadlines=deadlines,
        )
        self.number = number
        self.curve: list[Point] = []
        self.rounds_s: list[float] = []  # virtual duration of each round, including waits
        self._material = material
        self._batches = material.batches(peer_id, replica=number)
        self._step_s = step_s
        self._num_points = num_points

    def leave(self) -> None:
        """Leave after the current inner step."""
        self._is_leaving = True

    async def run(self, *, closing_rounds: int = 0) -> None:
        """Train until the schedule is done, and then run `closing_rounds` rounds without training."""
        self._enter()
        try:
            while self.progress < 1 and not self._is_leaving:
                await self._round()
            for _ in range(0 if self._is_leaving else closing_rounds):
                await self._closing_round()
        finally:
            self._network.remove(self.peer_id)
            await self.driver.stop()

    async def _round(self) -> None:
        began_s = now_s()
        self._open_round()
        is_at_boundary = False
        while not is_at_boundary:
            self.inner(next(self._batches), progress=self.progress)
            await asyncio.sleep(self._step_s)
            self.steps += 1
            is_at_boundary = self._rounds.step_taken()
            if self._is_leaving:
                return
        self._rounds.reach_boundary()
        self._count(await self._end())
        self.rounds_s.append(now_s() - began_s)
        self._note_point()

    def _note_point(self) -> None:
        """Add the next point to the curve if the progress has reached it."""
        if self.progress * self._num_points >= len(self.curve) + 1 - AT_POINT:
            loss = self._material.loss(self.model)
            self.curve.append(Point(self.number, self.steps, now_s(), loss))
