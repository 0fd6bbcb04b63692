"""A replica that lies about its vectors, as badly as its attack says: to measure what the gates hold."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import torch
from torch import Tensor

from noloco_p2p.gossip.frames import Chunk, SectionName
from noloco_p2p.gossip.outcome import Alone, Outcome, Received
from noloco_p2p.simulate.replica import Replica
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
        self._attack = attack
        self._noise = torch.Generator().manual_seed(seed)
        self._first: dict[str, Tensor] = {}

    def _sent_state(self) -> dict[SectionName, Tensor]:
        return {name: self._altered(name.name, vector, 0) for name, vector in super()._sent_state().items()}

    def _sent_gradient(self) -> Iterator[Tensor]:
        for index, chunk in enumerate(super()._sent_gradient()):
            yield self._altered(f"gradient {index}", chunk, 1)

    def _apply(self, outcome: Outcome, *, is_closing: bool = False) -> Received | None:
        """What it is given does not change it."""
        return super()._apply(Alone("an attacker takes nothing"), is_closing=is_closing)

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
