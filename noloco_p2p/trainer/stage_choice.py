"""Decide which stages a machine can hold, which stage its peer takes, and when the peer switches to another stage.

A newcomer draws its stage at random, weighted by need, so that peers that arrive together do not all take the same one.
A peer switches only if that helps the whole run considerably, because it then has to fetch the state of the other
stage.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from statistics import fmean

from blake3 import blake3

from noloco_p2p.data.sources import check_bindings
from noloco_p2p.errors import DataError
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.records import SERVING
from noloco_p2p.telemetry.console import mib
from noloco_p2p.trainer.cut import cut_of
from noloco_p2p.trainer.needs import memory_limit
from noloco_p2p.trainer.stage_needs import StageNeeds

WORTH = 1.25  # after a switch, both stages must have this many times the capacity that the poorer one had before
LEFT_BEHIND = 2  # a stage that a peer leaves must keep at least this many replicas


def capacities(members: Sequence[Candidate], num_stages: int) -> list[float]:
    """Return the total capacity of the live peers of each stage, in tokens/s.

    A peer that has not measured its capacity counts as an average one. If no peer has measured it, each counts as 1.
    """
    serving = [peer for peer in members if peer.state in SERVING]
    measured = [peer.capacity for peer in serving if peer.capacity > 0]
    usual = fmean(measured) if measured else 1.0
    found = [0.0] * num_stages
    for peer in serving:
        if peer.stage < num_stages:
            found[peer.stage] += peer.capacity or usual
    return found


def missing_stages(members: Sequence[Candidate], *, own: int | None, num_stages: int) -> list[int]:
    """Return the stages that no peer holds. `own` is the stage of this peer."""
    held = {peer.stage for peer in members if peer.state in SERVING}
    return [stage for stage in range(num_stages) if stage not in held and stage != own]


def draw_stage(members: Sequence[Candidate], fitting: Collection[int], *, num_stages: int, rng: random.Random) -> int:
    """Draw one of the stages in `fitting` at random.

    Halving the capacity of a stage makes it four times as likely to be drawn. An empty stage counts as if it had half
    the capacity of an average peer.
    """
    assert fitting, "no stage fits"
    found = capacities(members, num_stages)
    num_peers = sum(peer.state in SERVING for peer in members)
    least = sum(found) / num_peers / 2 if num_peers else 1.0
    stages = sorted(fitting)
    weights = [1 / max(found[stage], least) ** 2 for stage in stages]
    return rng.choices(stages, weights)[0]


def needier_stage(
    members: Sequence[Candidate], own: Candidate, fitting: Collection[int], *, num_stages: int, epoch: int
) -> int | None:
    """Return the stage to which the peer `own` should switch, or None if it should stay.

    `members` are the other peers. `epoch` is a number that is the same for all peers and changes from time to time.
    Only one peer of a stage may switch in each epoch. Otherwise, two peers that see the same need could both leave.
    """
    mates = [peer.peer_id for peer in members if peer.stage == own.stage and peer.state in SERVING]
    if len(mates) < LEFT_BEHIND:
        return None
    if min([own.peer_id, *mates], key=lambda peer: blake3(f"{epoch} {peer}".encode()).digest()) != own.peer_id:
        return None
    now = capacities([*members, own], num_stages)
    target = now.index(min(now))
    then = list(now)
    then[own.stage] -= own.capacity
    then[target] += own.capacity
    # Comparing the minimum of all stages would not work: if two stages are equally poor, no single switch raises it.
    is_worth_it = min(then[own.stage], then[target]) >= WORTH * now[target]
    return target if target in fitting and target != own.stage and is_worth_it else None


class Fitting(list[int]):
    """The stages that this machine can hold. `reasons` explains why it cannot hold the other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[int, str] = {}

    @classmethod
    def of(cls, needs: StageNeeds, settings: PeerSettings) -> Fitting:
        """Select the stages that fit into memory. The head also requires that its data is available."""
        fitting, limit = cls(), memory_limit(settings)
        for stage in range(len(cut_of(needs.spec))):
            needed = needs.memory(stage)
            if needed > limit:
                fitting.reasons[stage] = (
                    f"stage {stage} needs at least {mib(needed)} of memory, but the limit is {mib(limit)}"
                )
            elif stage == 0 and (why := _why_no_head(needs, settings)):
                fitting.reasons[stage] = why
            else:
                fitting.append(stage)
        return fitting


def _why_no_head(needs: StageNeeds, settings: PeerSettings) -> str:
    try:
        check_bindings(needs.spec.data, settings.data)
    except DataError as error:
        return f"stage 0 reads the data, but {error}"
    return ""
