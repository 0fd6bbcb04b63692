"""A fetched state is compared with records, and with fresh answers where records are too old to decide."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from admitting import admission_of

from noloco_p2p.errors import CheckpointError, TimedOut
from noloco_p2p.gossip.frames import PeerStatus
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.spec import RunSpec

SPEC = RunSpec(name="admission", total_steps=10_000)
LIMIT = 2 * SPEC.furthest
OWN = 0.4


class Others:
    """A directory with records at the positions `recorded`, whose peers answer with the position `told`."""

    def __init__(self, recorded: Sequence[float], *, told: float = OWN, num_silent: int = 0) -> None:
        self.candidates = [Candidate(f"peer {number}", "", progress=each) for number, each in enumerate(recorded)]
        self.told = told
        self.silent = {each.peer_id for each in self.candidates[:num_silent]}
        self.num_asked = 0

    async def status(self, candidate: Candidate, *, timeout_s: float) -> PeerStatus:
        self.num_asked += 1
        if candidate.peer_id in self.silent:
            raise TimedOut("no answer", peer=candidate.peer_id)
        return PeerStatus(cast(Any, None), "training", self.told)

    def check(self, progress: float) -> None:
        admission = admission_of(SPEC, cast(Any, self), live=lambda: self.candidates)
        asyncio.run(admission.check_position(progress))


def test_a_place_near_the_median_of_the_records_is_believed_without_a_call() -> None:
    others = Others([OWN, OWN, 0.99])
    others.check(OWN + 0.9 * LIMIT)
    others.check(OWN - 0.9 * LIMIT)
    assert others.num_asked == 0


@pytest.mark.parametrize("progress", [OWN + 1.1 * LIMIT, OWN - 1.1 * LIMIT, float("nan"), float("-inf")])
def test_another_place_is_refused(progress: float) -> None:
    with pytest.raises(CheckpointError, match=r"of the schedule, but the swarm is at 40\.0 %"):
        Others([OWN] * 5).check(progress)


def test_records_that_are_older_than_the_limit_do_not_refuse_an_honest_donor() -> None:
    """In a short run, the swarm has moved far since the last heartbeat."""
    now = OWN + 2 * LIMIT
    others = Others([OWN] * 4, told=now)
    others.check(now)
    assert others.num_asked == 4


def test_few_answers_overrule_no_records_and_few_records_decide_nothing() -> None:
    with pytest.raises(CheckpointError):
        Others([OWN] * 4, told=0.99, num_silent=2).check(0.99)
    Others([OWN, 0.99]).check(OWN)
