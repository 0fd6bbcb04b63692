"""Provide simulated replicas that lie about their weights or their progress, to measure what the filter prevents.

A filter that clips bounds the length of what a liar adds, so the most harmful lie is far away in a harmful direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor

from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.network import LinkNetwork
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedPeer, SimulatedReplica
from noloco_p2p.simulate.result import Result
from noloco_p2p.simulate.swarm import simulate_swarm

APART = 0.9  # of the largest difference in progress between two partners


class Attack(StrEnum):
    """What a liar sends in place of its weights, or claims in place of its progress."""

    SCALED = "scaled"  # its weights times 100
    FLIPPED = "sign-flipped"
    NOISE = "noise"  # Gaussian, with the norm of its weights
    STALE = "stale"  # always its first weights
    DRIFT = "drift"  # far away, always in the same direction
    FAR_AHEAD = "far-ahead"  # honest weights
    FAR_BEHIND = "far-behind"


CLAIMS = (Attack.FAR_AHEAD, Attack.FAR_BEHIND)


class HostileReplica(SimulatedReplica):
    """A replica that trains on its own and takes nothing from its partners. With a false claim, it is honest otherwise.

    `swaps` counts nothing, but `num_taken` is the number of swaps that its partners have taken.
    """

    def __init__(self, number: int, plan: Plan, material: Material, network: LinkNetwork, *, attack: Attack) -> None:
        super().__init__(number, plan, material, network)
        self.num_taken = 0
        self._attack = attack
        self._first = self.current_weights()
        self._noise = torch.Generator().manual_seed(plan.seed)
        self._drift = torch.randn(self._first.shape, generator=self._noise)

    async def enter(self, donor: SimulatedPeer | None = None) -> None:
        await super().enter(donor)
        if self._attack not in CLAIMS:
            self.exchange.read = self._lie

    def step_taken(self) -> None:
        super().step_taken()
        if self._attack in CLAIMS:
            apart = APART * self._spec.furthest * (1 if self._attack is Attack.FAR_AHEAD else -1)
            self.mixing.progress = max(0.0, self.steps / self._spec.schedule_steps + apart)

    def apply(self) -> bool:
        if self._attack in CLAIMS:
            return super().apply()
        swaps = self.exchange.collect()
        for swap in swaps:
            self.exchange.applied(swap, seconds=0.0)
        self.num_taken += len(swaps)
        return bool(swaps)

    def _lie(self, start: int, stop: int) -> Tensor:
        true = self.weights.read(start, stop)
        match self._attack:
            case Attack.SCALED:
                return 100 * true
            case Attack.FLIPPED:
                return -true
            case Attack.NOISE:
                noise = torch.randn(true.shape, generator=self._noise)
                return noise * (true.norm() / noise.norm())
            case Attack.STALE:
                return self._first[start:stop].clone()
            case _:
                return true + self._drift[start:stop]


def simulate_hostile(
    material: Material,
    plan: Plan,
    attacks: Mapping[int, Attack],
    *,
    on_made: Callable[[list[SimulatedReplica]], None] | None = None,
) -> Result:
    """Run `simulate_swarm` with liars, whose attacks are given by replica number. The result is of the others."""
    liars = {number: partial(HostileReplica, attack=attack) for number, attack in attacks.items()}
    return simulate_swarm(material, plan, on_made=on_made, liars=liars)
