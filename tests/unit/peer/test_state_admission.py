"""A fetched state is compared with records, and with fresh answers where records are too old to decide."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from harness.specs import published
from safetensors.torch import save_file

from noloco_p2p.codec import sketch
from noloco_p2p.errors import CheckpointError, TimedOut
from noloco_p2p.gossip.frames import PeerStatus, StateManifest
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.gossip.staleness import STALE_ROUNDS
from noloco_p2p.peer.state_admission import StateAdmission
from noloco_p2p.spec import RunSpec

SPEC = RunSpec(name="admission", total_steps=10_000, outer=published(inner_steps=10))
LIMIT = STALE_ROUNDS * 10 / 10_000
OWN = 0.4
DONOR = Candidate("donor", "donor")


class Others:
    """A directory with records at the positions `recorded`, whose peers answer with the position `told`."""

    def __init__(
        self, recorded: Sequence[float], *, told: float = OWN, num_silent: int = 0, sketches: Sequence[str] = ()
    ):
        texts = [*sketches, *[""] * len(recorded)]
        self.candidates = [
            Candidate(f"peer {number}", "", round=400, progress=progress, sketch=texts[number])
            for number, progress in enumerate(recorded)
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
        return PeerStatus(cast(Any, None), "training", 400, self.told)

    def admission(self) -> StateAdmission:
        return StateAdmission(SPEC, cast(Any, self), live=self.live)


def manifest(progress: float, *, round_index: int = 400, num_elements: int = 1000) -> StateManifest:
    return StateManifest("", num_elements, round_index, progress, 0, ())


def check_position(others: Others, progress: float, *, round_index: int = 400) -> None:
    asyncio.run(others.admission().check_position(DONOR, manifest(progress, round_index=round_index)))


def test_a_place_near_the_median_of_the_records_is_believed_without_a_call() -> None:
    others = Others([OWN, OWN, 0.99])
    check_position(others, OWN + 0.9 * LIMIT)
    check_position(others, OWN - 0.9 * LIMIT)
    assert others.num_asked == 0


@pytest.mark.parametrize("progress", [OWN + 1.1 * LIMIT, OWN - 1.1 * LIMIT, 0.99, float("nan"), float("-inf")])
def test_another_place_is_refused(progress: float) -> None:
    with pytest.raises(CheckpointError, match=r"of the schedule, but the swarm is at 40\.0 %"):
        check_position(Others([OWN] * 5), progress)


def test_a_counter_that_no_peer_can_have_reached_is_refused() -> None:
    check_position(Others([OWN] * 3), OWN, round_index=1600)  # it may have been four times as fast
    for wrong in (10**6, -1):
        with pytest.raises(CheckpointError, match=f"round {wrong}"):
            check_position(Others([OWN] * 3), OWN, round_index=wrong)


def test_records_that_are_older_than_the_limit_do_not_refuse_an_honest_donor() -> None:
    """Rounds take a tenth of a second, so the swarm has moved by more than 32 of them since the last heartbeat."""
    now = OWN + 2 * LIMIT
    others = Others([OWN] * 4, told=now)
    check_position(others, now)
    assert others.num_asked == 4


def test_two_answers_are_too_few_to_overrule_the_records() -> None:
    with pytest.raises(CheckpointError):
        check_position(Others([OWN] * 4, told=0.99, num_silent=2), 0.99)


def test_with_two_peers_nobody_can_tell_whose_place_is_wrong() -> None:
    check_position(Others([OWN, 0.99]), OWN)


def packed(vector: torch.Tensor, mark: int = int(OWN * sketch.MARKS)) -> str:
    return sketch.pack(sketch.sketch(vector, run=SPEC.digest(), mark=mark), mark=mark, norm=sketch.norm(vector))


def check_state(folder: Path, vector: torch.Tensor, sketches: Sequence[str], *, donor: Candidate = DONOR) -> None:
    path = folder / "state.safetensors"
    save_file({"slow_weights": vector, "outer_momentum": torch.zeros_like(vector)}, path)
    admission = Others([OWN] * len(sketches), sketches=sketches).admission()
    asyncio.run(admission.check_state(donor, manifest(OWN, num_elements=len(vector)), path))


def test_weights_are_compared_with_what_most_others_publish(tmp_path: Path) -> None:
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    near, lie = packed(1.1 * vector), packed(-666 * vector)
    check_state(tmp_path, vector, [near, near, lie])
    with pytest.raises(CheckpointError, match="far from those published by 2 of 3 other peers"):
        check_state(tmp_path, -vector, [near, near, packed(-vector)])
    for wrong in (3 * vector, vector / 3, -vector, torch.zeros_like(vector)):
        with pytest.raises(CheckpointError, match="far from those published by 2 of 2 other peers"):
            check_state(tmp_path, wrong, [near, near])


def test_the_record_of_the_donor_itself_does_not_count(tmp_path: Path) -> None:
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    near, lie = packed(vector), packed(-vector)
    with pytest.raises(CheckpointError, match="far from those published by 2 of 3 other peers"):
        check_state(tmp_path, -vector, [near, near, lie, lie], donor=Candidate("peer 3", "peer 3"))


def test_one_record_refuses_nobody_and_half_of_them_neither(tmp_path: Path) -> None:
    """Otherwise a liar could keep newcomers out with a record."""
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    near, lie = packed(vector), packed(-666 * vector)
    check_state(tmp_path, vector, [lie])
    check_state(tmp_path, vector, [lie, near])


def test_sketches_of_a_distant_mark_and_nonsense_are_left_out(tmp_path: Path) -> None:
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    distant = packed(-vector, mark=int((OWN + 2 * LIMIT) * sketch.MARKS))
    check_state(tmp_path, vector, [distant, distant, distant, "nonsense"])
