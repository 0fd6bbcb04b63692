"""A fetched state is compared with records, and with fresh answers where records are too old to decide."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from noloco_p2p.errors import CheckpointError, TimedOut
from noloco_p2p.gossip.frames import PeerStatus, StateManifest
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.peer.state_admission import StateAdmission
from noloco_p2p.spec import OuterSpec, RunSpec

SPEC = RunSpec(name="admission", total_steps=10_000, outer=OuterSpec(alpha=0.5, beta=0.7))
LIMIT = 2 * SPEC.furthest
OWN = 0.4
DONOR = Candidate("donor", "donor")


class Others:
    """A directory with records at the positions `recorded`, whose peers answer with the position `told`."""

    def __init__(self, recorded: Sequence[float], *, told: float = OWN, num_silent: int = 0) -> None:
        self.candidates = [
            Candidate(f"peer {number}", "", progress=progress) for number, progress in enumerate(recorded)
        ]
        self.told = told
        self.silent = {each.peer_id for each in self.candidates[:num_silent]}
        self.num_asked = 0

    def live(self) -> Sequence[Candidate]:
        return self.candidates

    async def status(self, candidate: Candidate, *, timeout_s: float) -> PeerStatus:
        self.num_asked += 1
        if candidate.peer_id in self.silent:
            raise TimedOut("no answer", peer=candidate.peer_id)
        return PeerStatus(cast(Any, None), "training", self.told)

    def admission(self) -> StateAdmission:
        return StateAdmission(SPEC, cast(Any, self), live=self.live)


def manifest(progress: float) -> StateManifest:
    return StateManifest("", 1000, progress, 0, ())


def check_position(others: Others, progress: float) -> None:
    asyncio.run(others.admission().check_position(DONOR, manifest(progress)))


def test_a_place_near_the_median_of_the_records_is_believed_without_a_call() -> None:
    others = Others([OWN, OWN, 0.99])
    check_position(others, OWN + 0.9 * LIMIT)
    check_position(others, OWN - 0.9 * LIMIT)
    assert others.num_asked == 0


@pytest.mark.parametrize("progress", [OWN + 1.1 * LIMIT, OWN - 1.1 * LIMIT, 0.99, float("nan"), float("-inf")])
def test_another_place_is_refused(progress: float) -> None:
    with pytest.raises(CheckpointError, match=r"of the schedule, but the swarm is at 40\.0 %"):
        check_position(Others([OWN] * 5), progress)


def test_records_that_are_older_than_the_limit_do_not_refuse_an_honest_donor() -> None:
    """In a short run, the swarm has moved far since the last heartbeat."""
    now = OWN + 2 * LIMIT
    others = Others([OWN] * 4, told=now)
    check_position(others, now)
    assert others.num_asked == 4


def test_two_answers_are_too_few_to_overrule_the_records() -> None:
    with pytest.raises(CheckpointError):
        check_position(Others([OWN] * 4, told=0.99, num_silent=2), 0.99)


def test_with_two_peers_nobody_can_tell_whose_place_is_wrong() -> None:
    check_position(Others([OWN, 0.99]), OWN)


def test_the_whole_file_is_checked(tmp_path: Path) -> None:
    path, vector = tmp_path / "state.safetensors", torch.ones(1000)
    admission = Others([OWN]).admission()
    save_file({"weights": vector, "outer_momentum": vector.clone()}, path)
    asyncio.run(admission.check_state(DONOR, manifest(OWN), path))
    save_file({"weights": vector, "outer_momentum": vector.index_fill(0, torch.tensor(999), torch.nan)}, path)
    with pytest.raises(CheckpointError, match="outer_momentum in the state contains non-finite values"):
        asyncio.run(admission.check_state(DONOR, manifest(OWN), path))
