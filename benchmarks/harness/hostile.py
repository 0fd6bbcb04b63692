"""Provide replicas that lie about their vectors according to an attack, to measure what gates and shares prevent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from harness.greedy import GreedyPeer
from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import Boundary, Chunk, SectionName
from noloco_p2p.gossip.outcome import Alone, Outcome
from noloco_p2p.gossip.sections import section_plans
from noloco_p2p.simulate.clock import InlineExecutor
from noloco_p2p.simulate.network import LinkTransport
from noloco_p2p.simulate.peer import Absent, Around
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.testing.faults import At, FaultPlan, NotFinite
from noloco_p2p.testing.memory import Wrap, unchanged


class Attack(StrEnum):
    """The lie that replaces slow weights, outer momentum and outer gradient."""

    SCALED = "scaled"  # all three times 100
    SCALED_STATE = "scaled-state"  # the same for weights and momentum, with an honest gradient, which passes its gate
    FLIPPED = "sign-flipped"  # all three negated
    FLIPPED_GRADIENT = "flipped-gradient-x9"  # gradient times -9, just not refused; weights and momentum honest
    NOISE = "noise"  # Gaussian, with the norms of the true vectors
    STALE = "stale"  # always those of its first round
    NAN = "nan"
    # Vectors that just pass the gates of the partner (`adaptive.py`), and pull it
    ADAPTIVE_BACK = "adaptive-back"  # towards the weights before any training
    ADAPTIVE_UPHILL = "adaptive-uphill"  # against its last outer gradient
    ADAPTIVE_DRIFT = "adaptive-drift"  # always in one direction, the same for all partners
    # Honest weights, and false claims about the schedule (`false_claims.py`)
    FAR_AHEAD = "far-ahead"
    FAR_BEHIND = "far-behind"


ADAPTIVE = (Attack.ADAPTIVE_BACK, Attack.ADAPTIVE_UPHILL, Attack.ADAPTIVE_DRIFT)
CLAIMS = (Attack.FAR_AHEAD, Attack.FAR_BEHIND)
SCALE = {
    Attack.SCALED: (100.0, 100.0),
    Attack.SCALED_STATE: (100.0, 1.0),
    Attack.FLIPPED: (-1.0, -1.0),
    Attack.FLIPPED_GRADIENT: (1.0, -9.0),
}  # of weights and momentum, and of the gradient
NAN_PLAN = FaultPlan().fail_at(At(Chunk, section=SectionName.SLOW_WEIGHTS), send=NotFinite())


def streams_of(attack: Attack) -> Wrap:
    """Return the wrapper of the liar's streams, which puts NaN into payloads, because codecs cannot encode NaN."""
    return NAN_PLAN.wrapper() if attack is Attack.NAN else unchanged


class Alteration:
    """Alters the true vectors according to an attack."""

    def __init__(self, attack: Attack, *, seed: int) -> None:
        self._attack = attack
        self._noise = torch.Generator().manual_seed(seed)
        self._first: dict[str, Tensor] = {}

    def state(self, true: dict[SectionName, Tensor]) -> dict[SectionName, Tensor]:
        return {name: self._altered(name.name, vector, 0) for name, vector in true.items()}

    def gradient(self, true: Iterable[Tensor]) -> Iterable[Tensor]:
        """Yield the altered outer gradient, chunk by chunk."""
        return (self._altered(f"gradient {i}", chunk, 1) for i, chunk in enumerate(true))

    def _altered(self, name: str, vector: Tensor, part: int) -> Tensor:
        match self._attack:
            case Attack.NOISE:
                noise = torch.randn(vector.shape, generator=self._noise)
                return noise.mul_(vector.norm() / noise.norm())
            case Attack.STALE:
                return self._first.setdefault(name, vector.clone())
            case _ if self._attack in SCALE:
                return vector * SCALE[self._attack][part]
            case _:
                return vector


class HostileReplica(SimulatedReplica):
    """A replica that trains without partners, and sends them its vectors as altered by `attack`."""

    def attack_with(self, attack: Attack, *, seed: int, swarm: Mapping[str, SimulatedReplica]) -> None:
        self._exchange = Lying(self._exchange, Alteration(attack, seed=seed))


class Lying(Around):
    """An exchange that alters what is sent, and ignores what is received."""

    def __init__(self, inner: Exchange, alteration: Alteration) -> None:
        super().__init__(inner)
        self._alteration = alteration

    def open(self, round_index: int, *, state: dict[SectionName, Tensor], **options: Any) -> None:
        super().open(round_index, state=self._alteration.state(state), **options)

    def stage(self, chunks: Callable[[], Iterable[Tensor]]) -> None:
        super().stage(lambda: self._alteration.gradient(chunks()))

    def poll(self, *, wait_s: float) -> Outcome | None:
        outcome = super().poll(wait_s=wait_s)
        return Alone("an attacker takes nothing") if outcome else None


class GreedyReplica(SimulatedReplica):
    """A liar that makes offers to all peers at once while it trains, and accepts every offer."""

    def attack_with(self, attack: Attack, *, seed: int, swarm: Mapping[str, SimulatedReplica]) -> None:
        self._hidden = Hidden(self._exchange, Alteration(attack, seed=seed))
        self.greedy = GreedyPeer(
            self,
            hello=self._hello,
            transport=LinkTransport(self._network, lambda: self._hello, wrap=self._wrap),
            victims=self.directory.live,
            plans=lambda: section_plans(
                self._spec.codec,
                swap_momentum=self._spec.outer.sends_momentum,
                num_elements=self.state.slow_weights.numel(),
            ),
            executor=InlineExecutor(),
        )

    async def run(self, *, closing_rounds: int = 0) -> None:
        offers = asyncio.create_task(self.greedy.run())
        try:
            await super().run(closing_rounds=0)
        finally:
            offers.cancel()
            await asyncio.gather(offers, return_exceptions=True)

    def _enter(self) -> None:
        self._network.add(self.peer_id, self.greedy, wrap=self._wrap)

    def _open_round(self) -> None:
        self._rounds.exchange = self._hidden
        self._rounds.open()

    # a `Liar`

    def boundary(self, partner: str) -> Boundary:
        """Return a boundary that suits every partner."""
        return Boundary(self._rounds.round, None, None, self.progress)

    def vectors(self, partner: str) -> dict[SectionName, Tensor]:
        return self._hidden.vectors

    def gradient(self, partner: str) -> Tensor | None:
        return self._hidden.gradient


class Hidden(Absent):
    """Keeps the altered vectors of the open round, and the altered outer gradient of the last one."""

    def __init__(self, inner: Exchange, alteration: Alteration) -> None:
        super().__init__(inner)
        self.vectors: dict[SectionName, Tensor] = {}
        self.gradient: Tensor | None = None
        self._alteration = alteration

    def open(self, round_index: int, *, state: dict[SectionName, Tensor], **options: Any) -> None:
        super().open(round_index, state=state, **options)
        self.vectors = {name: vector.clone() for name, vector in self._alteration.state(state).items()}

    def stage(self, chunks: Callable[[], Iterable[Tensor]]) -> None:
        self.gradient = torch.cat([chunk.clone() for chunk in self._alteration.gradient(chunks())])
