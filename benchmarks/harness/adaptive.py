"""Provide a liar that knows the gates of its victims, and sends the most harmful vectors that still pass.

It knows more than a real liar could: the exact vectors of its victim, and the state of the victim's gates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.hostile import Attack, GreedyReplica
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.simulate.replica import SimulatedReplica

BELOW, MARGIN = 0.9, 0.02  # of thresholds, because codecs add errors


class AdaptiveReplica(GreedyReplica):
    """A `GreedyReplica` that makes new vectors for each partner. `swarm` maps peer ids to all replicas."""

    def attack_with(self, attack: Attack, *, seed: int, swarm: Mapping[str, SimulatedReplica]) -> None:
        super().attack_with(attack, seed=seed, swarm=swarm)
        self._attack, self._swarm = attack, swarm
        self._first = self.state.slow_weights.clone()
        self._drift = torch.randn(self._first.shape, generator=torch.Generator().manual_seed(seed))
        self._downhill: dict[str, Tensor] = {}  # the last outer gradient of each victim

    def vectors(self, partner: str) -> dict[SectionName, Tensor]:
        """Return the victim's vectors, shifted in the harmful direction as far as its gates allow."""
        victim = self._swarm[partner]
        offset = self._harm(victim)
        for norm, (start, stop) in zip(victim.state.gating.own.usual(), _pieces(victim), strict=True):
            _stretch_(offset[start:stop], 2 * BELOW * victim.state.gating.limits.offset_most * norm)
        return {name: vector + offset for name, vector in victim.state.sections().items()}

    def gradient(self, partner: str) -> Tensor | None:
        """Return a gradient with the lowest cosine to the victim's, and the largest norm, that its gates allow."""
        victim = self._swarm[partner]
        if not victim.is_at_boundary:
            return None
        own = torch.cat([chunk.clone() for chunk in victim.state.outer_gradient()])
        self._downhill[partner] = own
        limits = victim.state.gating.limits
        aside, cosine = self._harm(victim), limits.least_cosine + MARGIN
        for start, stop in _pieces(victim):
            piece, lie = own[start:stop], aside[start:stop]
            lie.sub_(piece * (lie @ piece / piece.square().sum().clamp(min=1e-30)))
            _stretch_(lie, float(piece.norm()))
        return limits.clip_above * (cosine * own + (1 - cosine**2) ** 0.5 * aside)

    def _harm(self, victim: SimulatedReplica) -> Tensor:
        """Return the harmful direction, with any length."""
        match self._attack:
            case Attack.ADAPTIVE_BACK:
                return self._first - victim.state.slow_weights
            case Attack.ADAPTIVE_UPHILL if victim.peer_id in self._downhill:
                return -self._downhill[victim.peer_id]
            case _:
                return self._drift.clone()


def _pieces(victim: SimulatedReplica) -> list[tuple[int, int]]:
    """Return (start, stop) of the pieces of the flat vector that the gates judge separately."""
    ends, start = [], 0
    for places in victim.state.gating.pieces.in_chunk:
        ends += [(start + place.start, start + place.stop) for _, place in places]
        start = ends[-1][1]
    return ends


def _stretch_(vector: Tensor, norm: float) -> None:
    length = float(vector.norm())
    vector.mul_(norm / length if length else 0.0)
