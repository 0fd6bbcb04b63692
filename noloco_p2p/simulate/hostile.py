"""A replica that lies about its vectors, as badly as its attack says: to measure what the gates hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import Chunk, SectionName
from noloco_p2p.gossip.outcome import Alone, Outcome
from noloco_p2p.simulate.replica import Around, Replica
from noloco_p2p.testing.faults import At, FaultPlan, NotFinite
from noloco_p2p.testing.memory import Wrap, unchanged


class Attack(StrEnum):
    """What is sent instead of slow weights, outer momentum and outer gradient."""

    SCALED = "scaled"  # all three 100 times as long
    SCALED_STATE = "scaled-state"  # the same for weights and momentum, with an honest gradient, which passes its gate
    FLIPPED = "sign-flipped"  # all three negated
    FLIPPED_GRADIENT = "flipped-gradient-x9"  # -9 times the gradient, just not refused; weights and momentum honest
    NOISE = "noise"  # Gaussian, as long as the true vectors
    STALE = "stale"  # those of its first round, for ever
    NAN = "nan"


SCALE = {
    Attack.SCALED: (100.0, 100.0),
    Attack.SCALED_STATE: (100.0, 1.0),
    Attack.FLIPPED: (-1.0, -1.0),
    Attack.FLIPPED_GRADIENT: (1.0, -9.0),
}  # of weights and momentum, and of the gradient
NAN_PLAN = FaultPlan().fail_at(At(Chunk, section=SectionName.SLOW_WEIGHTS), send=NotFinite())


def streams_of(attack: Attack) -> Wrap:
    """NaN has no code: it is put into the payload on its way."""
    return NAN_PLAN.wrapper() if attack is Attack.NAN else unchanged


class HostileReplica(Replica):
    """Trains alone, and gives its partners what `attack` makes of its vectors."""

    def attack_with(self, attack: Attack, *, seed: int) -> None:
        self._exchange = Lying(self._exchange, attack, seed=seed)


class Lying(Around):
    """Alters what is sent, and takes nothing."""

    def __init__(self, inner: Exchange, attack: Attack, *, seed: int) -> None:
        super().__init__(inner)
        self._attack = attack
        self._noise = torch.Generator().manual_seed(seed)
        self._first: dict[str, Tensor] = {}

    def open(self, round_index: int, *, state: dict[SectionName, Tensor], **options: Any) -> None:
        altered = {name: self._altered(name.name, vector, 0) for name, vector in state.items()}
        super().open(round_index, state=altered, **options)

    def stage(self, chunks: Callable[[], Iterable[Tensor]]) -> None:
        super().stage(lambda: (self._altered(f"gradient {i}", chunk, 1) for i, chunk in enumerate(chunks())))

    def poll(self, *, wait_s: float) -> Outcome | None:
        outcome = super().poll(wait_s=wait_s)
        return Alone("an attacker takes nothing") if outcome else None

    def _altered(self, name: str, vector: Tensor, part: int) -> Tensor:
        match self._attack:
            case Attack.NOISE:
                noise = torch.randn(vector.shape, generator=self._noise)
                return noise.mul_(vector.norm() / noise.norm())
            case Attack.STALE:
                return self._first.setdefault(name, vector.clone())
            case Attack.NAN:
                return vector
            case _:
                return vector * SCALE[self._attack][part]
