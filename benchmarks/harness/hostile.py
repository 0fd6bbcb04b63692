"""Provide simulated replicas that lie to their partners, to measure what the update filter and fair shares prevent.

A filter that clips bounds the length of what a liar adds, so the most harmful lie is far away in a harmful direction:
each partner clips it to its own radius. Liars know more than real ones could: the exact weights of their partners.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor

from noloco_p2p.codec import Codec
from noloco_p2p.errors import PeerError
from noloco_p2p.gossip import service
from noloco_p2p.gossip.coder import UNKNOWN
from noloco_p2p.gossip.frames import Accept, Offer, Refuse, Standing
from noloco_p2p.gossip.gossip import STALE_FURTHEST, Gossip
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.gossip.swap import Swap
from noloco_p2p.gossip.units import Ages, Slice
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedPeer, SimulatedReplica
from noloco_p2p.simulate.result import Result
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.testing.memory import MemoryNetwork

FAR = 100.0
APART = 0.9  # of the largest difference in progress between two partners
SLOW_STEP_S = 3000.0
ASK_EVERY_S = 0.1  # how often a greedy liar makes offers to everybody


class Attack(StrEnum):
    """What a liar sends in place of its weights, or claims."""

    SCALED = "huge weights"  # a hundred times its own
    NAN = "NaN"  # not with `modulo`, whose payloads have no invalid values
    CONSTANT = "a constant"
    NOISE = "noise"  # Gaussian, with the norm of its weights
    FLIPPED = "flipped half-differences"
    STALE = "first weights"
    ECHO = "the partner's own weights"
    # far away from the partner, in a direction that harms it
    BACK = "back to the first weights"
    UPHILL = "against its last steps"
    DRIFT = "always in one direction"
    # honest weights
    FAR_AHEAD = "claims to be far ahead"
    FAR_BEHIND = "claims to be far behind"
    STALLS = "never sends, claims slow steps"


CLAIMS = (Attack.FAR_AHEAD, Attack.FAR_BEHIND, Attack.STALLS)


class Lies:
    """What a liar with these `first` weights tells each of its partners, whose weights it knows."""

    def __init__(self, attack: Attack, first: Tensor, *, seed: int) -> None:
        self._attack, self._first = attack, first
        self._noise = torch.Generator().manual_seed(seed)
        self._drift = torch.randn(first.shape, generator=self._noise)
        self._before: dict[str, Tensor] = {}  # the weights of each partner in the last swap

    def tell(self, partner: str, own: Tensor, victim: Tensor, start: int, stop: int) -> Tensor:
        """Return what a partner gets in place of `own`, elements [start, stop), where it has the values `victim`."""
        match self._attack:
            case Attack.SCALED:
                return FAR * own
            case Attack.CONSTANT:
                return torch.ones_like(own)
            case Attack.NOISE:
                noise = torch.randn(own.shape, generator=self._noise)
                return noise * (own.norm() / noise.norm())
            case Attack.FLIPPED:
                return 2 * victim - own
            case Attack.STALE:
                return self._first[start:stop].clone()
            case Attack.ECHO:
                return victim
            case Attack.BACK:
                return victim + FAR * (self._first[start:stop] - victim)
            case Attack.UPHILL:
                before = self._before.setdefault(partner, self._first.clone())
                lie = victim - FAR * (victim - before[start:stop])
                before[start:stop] = victim
                return lie
            case _:
                return victim + FAR * self._drift[start:stop]


class LyingGossip(Gossip):
    """The swaps of a liar. `lie` returns what a partner gets in place of elements [start, stop)."""

    lie: Callable[[str, int, int], Tensor] | None = None
    stall_s = 0.0  # before it sends

    def _agree(self, *agreed: Any, **further: Any) -> Swap:
        swap = super()._agree(*agreed, **further)
        honest = swap.snapshot

        async def snapshot() -> tuple[Tensor, int]:
            await asyncio.sleep(self.stall_s)
            values, step = await honest()
            return self.lie(swap.partner, *self._units.bounds(swap.part)) if self.lie else values, step

        swap.snapshot = snapshot
        return swap

    def _standing(self) -> Standing:
        standing = super()._standing()
        return replace(standing, step_s=SLOW_STEP_S) if self.stall_s else standing


class GreedyGossip(LyingGossip):
    """A liar that accepts every offer at once, and also makes offers to everybody all the time."""

    async def run(self) -> None:
        self._ages = _NeverBusy(self._units.num_units)
        calls: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for candidate in self._directory.live():
                    if (call := calls.get(candidate.peer_id)) is None or call.done():
                        calls[candidate.peer_id] = asyncio.create_task(self._besiege(candidate))
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            for call in calls.values():
                call.cancel()
            await asyncio.gather(*calls.values(), return_exceptions=True)

    async def _besiege(self, candidate: Candidate) -> None:
        try:
            swap = await self._ask(candidate, self._ages.tell(self._exchange.step))
        except PeerError:
            return
        if swap:
            await self._swap_of_ours(swap)

    def _free_in_s(self) -> float:
        return 0.0

    async def _accept(self, stream: FrameStream, offer: Offer) -> Refuse | None:
        part = self._ages.choose(offer.ages, self._exchange.step, at_most=offer.at_most)
        assert part
        self._shared.turn = asyncio.Lock()  # its swaps do not wait for each other
        swap = self._agree(stream, offer.swap_id, offer.hello.peer_id, offer.standing, part, told_step=0)
        await self._swap(swap, first=Accept(self._outside.hello(), self._standing(), part))
        return None


class _NeverBusy(Ages):
    def begin(self, part: Slice) -> None:
        pass


def not_finite(codec: Codec) -> Codec:
    """Return a codec whose payloads are NaN."""
    return Mock(
        num_bytes=codec.num_bytes,
        encode=lambda values: b"\xff" * codec.num_bytes(values.shape),
        decode=lambda payload, *, shape: torch.zeros(shape),
    )


def propose_nothing(part: Slice) -> bytes:
    """Propose no grid, so that int8 carries a lie of any size."""
    return bytes([UNKNOWN]) * part.count  # with a block a unit, as in any small model


class HostileReplica(SimulatedReplica):
    """A liar, which trains as the others do. `swarm` maps the peer ids of all replicas to them."""

    def __init__(
        self,
        number: int,
        plan: Plan,
        material: Material,
        network: MemoryNetwork,
        *,
        attack: Attack,
        is_greedy: bool,
        swarm: Mapping[str, SimulatedReplica],
    ) -> None:
        super().__init__(number, plan, material, network)
        self._attack, self._is_greedy, self._swarm = attack, is_greedy, swarm
        self._lies = Lies(attack, self.current_weights(), seed=plan.seed)

    async def enter(self, donor: SimulatedPeer | None = None) -> None:
        with patch.object(service, "Gossip", GreedyGossip if self._is_greedy else LyingGossip):
            await super().enter(donor)
        gossip = self._service.gossip
        assert isinstance(gossip, LyingGossip)
        gossip.stall_s = math.inf if self._attack is Attack.STALLS else 0.0
        if self._attack is Attack.NAN:
            gossip._shared.coder.plain = not_finite(gossip._shared.coder.plain)
        elif self._attack not in CLAIMS:
            gossip.lie = self._lie
            if gossip._shared.coder.passes:
                gossip._shared.coder.propose = propose_nothing

    def step_taken(self) -> None:
        super().step_taken()
        if self._attack in (Attack.FAR_AHEAD, Attack.FAR_BEHIND):
            apart = APART * STALE_FURTHEST * self._spec.furthest * (1 if self._attack is Attack.FAR_AHEAD else -1)
            self.mixing.progress = max(0.0, self.steps / self._spec.schedule_steps + apart)

    def apply(self) -> bool:
        """Apply what has arrived. A liar that sends lies takes nothing, as its swaps would not bring it closer."""
        if self._attack in CLAIMS:
            return super().apply()
        swaps = self.exchange.collect()
        for swap in swaps:
            self.exchange.step += self.exchange.is_at_rest  # as that of an honest peer
            self.exchange.applied(swap, seconds=0.0)
        return bool(swaps)

    def _lie(self, partner: str, start: int, stop: int) -> Tensor:
        own, victim = self.weights.read(start, stop), self._swarm[partner].weights.read(start, stop)
        return self._lies.tell(partner, own, victim, start, stop)


def simulate_hostile(
    material: Material,
    plan: Plan,
    attacks: Mapping[int, Attack],
    *,
    is_greedy: bool = False,
    on_made: Callable[[list[SimulatedReplica]], None] = lambda made: None,
) -> Result:
    """Run `simulate_swarm` with liars, whose attacks are given by replica number. The result is of the others."""
    swarm: dict[str, SimulatedReplica] = {}
    liars = {
        number: partial(HostileReplica, attack=attack, is_greedy=is_greedy, swarm=swarm)
        for number, attack in attacks.items()
    }

    def made(replicas: list[SimulatedReplica]) -> None:
        swarm.update({replica.peer_id: replica for replica in replicas})
        on_made(replicas)

    return simulate_swarm(material, plan, on_made=made, liars=liars)
