"""Simulate swarms in which some replicas lie. Results are those of the honest replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from harness.adaptive import AdaptiveReplica
from harness.false_claims import ClaimingReplica
from harness.hostile import ADAPTIVE, CLAIMS, Attack, GreedyReplica, HostileReplica, streams_of
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.result import Result
from noloco_p2p.simulate.swarm import simulate_swarm


def simulate_hostile(
    material: Material,
    plan: Plan,
    attacks: Mapping[int, Attack],
    *,
    are_greedy: bool = False,
    on_made: Callable[[list[SimulatedReplica]], None] = lambda replicas: None,
) -> Result:
    """Run `simulate_swarm` with liars, whose attacks are given by replica number.

    If `are_greedy` is true, liars make offers to all peers at once.
    """

    def arm(replicas: list[SimulatedReplica]) -> None:
        swarm = {replica.peer_id: replica for replica in replicas}
        for replica in replicas:
            if isinstance(replica, HostileReplica | GreedyReplica):
                replica.attack_with(attacks[replica.number], seed=plan.seed, swarm=swarm)
        on_made(replicas)

    liars = {
        number: partial(_kind(attack, are_greedy=are_greedy), wrap=streams_of(attack))
        for number, attack in attacks.items()
    }
    return simulate_swarm(material, plan, on_made=arm, liars=liars)


def _kind(attack: Attack, *, are_greedy: bool) -> type[SimulatedReplica]:
    if attack in CLAIMS:
        return ClaimingReplica
    if attack in ADAPTIVE:
        return AdaptiveReplica
    return GreedyReplica if are_greedy else HostileReplica
