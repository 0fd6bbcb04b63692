"""Provide a liar that sends its victim's own weights, which no gate can refuse, and lies about its place in the run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from harness.hostile import Attack, GreedyReplica
from noloco_p2p.gossip.frames import Boundary, SectionName
from noloco_p2p.gossip.staleness import FRESH_ROUNDS
from noloco_p2p.optim.mixing import agreed_inner_steps
from noloco_p2p.simulate.peer import now_s
from noloco_p2p.simulate.replica import SimulatedReplica

ROUNDS_APART = FRESH_ROUNDS - 0.1  # with a larger age, the swap would have less weight


class ClaimingReplica(GreedyReplica):
    """A `GreedyReplica` that claims to be ROUNDS_APART rounds ahead of its victim or behind it.

    It announces the longest round that the run allows, and never sends a gradient.
    """

    def attack_with(self, attack: Attack, *, seed: int, swarm: Mapping[str, SimulatedReplica]) -> None:
        super().attack_with(attack, seed=seed, swarm=swarm)
        self._swarm = swarm
        self._rounds_ahead = ROUNDS_APART if attack is Attack.FAR_AHEAD else -ROUNDS_APART

    def boundary(self, partner: str) -> Boundary:
        victim, longest = self._swarm[partner].driver.round.standing(now_s()), self._spec.outer.longest_round
        agreed = agreed_inner_steps(victim.inner_steps, longest) / self._spec.schedule_steps
        return Boundary(victim.round, None, None, max(0.0, victim.progress + self._rounds_ahead * agreed), longest)

    def vectors(self, partner: str) -> dict[SectionName, Tensor]:
        return {name: vector.clone() for name, vector in self._swarm[partner].state.sections().items()}

    def gradient(self, partner: str) -> Tensor | None:
        return None
