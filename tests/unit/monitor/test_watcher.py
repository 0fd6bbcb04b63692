from __future__ import annotations

import time
from typing import Any, cast

import pytest
from harness.patience import PATIENCE_S
from recorded import changed

from noloco_p2p.monitor.notices import WINDOW_S
from noloco_p2p.monitor.watcher import FORGET_AFTER_S, MAX_PARTNERS, MAX_PEERS, Health, Own, Watcher
from noloco_p2p.swarm.directory import Headcount, SwarmDirectory
from noloco_p2p.swarm.records import TTL_S, PeerRecord
from noloco_p2p.ticket import Ticket

A = PeerRecord("12D3KooWaaaaaa", "r", "0" * 64, sequence=1, reachability="direct")
B = PeerRecord("12D3KooWbbbbbb", "r", "0" * 64, sequence=1, reachability="direct")
NOW_S = 1_800_000_000.0


class Watched:
    """A watcher, and what it last said. Times are seconds since the first look."""

    def __init__(self, *records: PeerRecord, age_s: float = 0.0, directory_age_s: float = 1.0) -> None:
        self.watcher = Watcher(Ticket("r", "0" * 64, ()))
        self.directory_age_s = directory_age_s
        self.look(*records, age_s=age_s)

    def look(self, *records: PeerRecord, age_s: float = 0.0, at_s: float = 0.0) -> None:
        told = [(record, age_s) for record in records]
        self.said = self.watcher.take(told, directory_age_s=self.directory_age_s, now_s=NOW_S + at_s)

    @property
    def peers(self) -> list[dict[str, Any]]:
        return self.said["peers"]

    @property
    def lately(self) -> dict[str, int]:
        return self.said["totals"]["lately"]

    @property
    def notices(self) -> list[str]:
        return [f"{notice['level']}: {notice['text']}" for notice in self.said["notices"]]


@pytest.mark.parametrize(
    ("state", "age_s", "health"),
    [
        ("training", 0.0, Health.ALIVE),
        ("done", 34.0, Health.ALIVE),
        ("training", 36.0, Health.SILENT),
        ("training", TTL_S + 1, Health.GONE),
        ("leaving", 5.0, Health.LEAVING),
        ("leaving", 25.0, Health.LEFT),
        ("leaving", 500.0, Health.LEFT),
    ],
)
def test_health_follows_the_last_words_and_their_age(state: str, age_s: float, health: Health) -> None:
    assert Health.of(state, age_s) is health


def test_a_peer_that_vanished_is_remembered_with_its_true_age_and_in_the_end_forgotten() -> None:
    made = Watched(A, B)
    made.look(changed(B, sequence=2), at_s=95.0)
    assert made.peers[0]["age_s"] == 95.0
    assert made.notices == [
        "warn: Lost 1 peer that left without notice: ..aaaaaa. The newest record is 1 min 35 s old.",
    ]
    made.look(changed(B, sequence=3), at_s=FORGET_AFTER_S + 1)
    assert [peer["peer_id"] for peer in made.peers] == [B.peer_id]


def test_a_peer_whose_clock_went_back_is_followed_again_as_soon_as_the_directory_takes_its_records() -> None:
    made = Watched(changed(A, sequence=2000, swaps=5))
    made.look(changed(A, sequence=1000, swaps=7), at_s=130.0)
    assert made.peers[0]["age_s"] == 0.0
    assert made.lately["swaps"] == 2


def test_an_old_record_seen_again_makes_nobody_younger() -> None:
    made = Watched(A)
    made.look(A, age_s=3.0, at_s=50.0)
    assert made.peers[0]["age_s"] == 50.0


def test_a_swap_is_a_meeting_and_swaps_are_counted_from_the_first_look_on() -> None:
    made = Watched(changed(A, swaps=100, failed_slow=7))
    grown = changed(A, sequence=2, swaps=101, failed_slow=8, failed_unreachable=1, last_partner=B.peer_id)
    made.look(grown, age_s=2.0, at_s=10.0)
    assert [*made.watcher.meetings] == [(NOW_S + 8.0, A.peer_id, B.peer_id)]
    lately = made.lately
    assert made.said["totals"]["lately_s"] == 10.0
    assert (lately["swaps"], lately["failed_slow"], lately["failed_unreachable"]) == (1, 1, 1)
    made.look(changed(grown, sequence=3, swaps=3, failed_slow=0), at_s=20.0)
    assert made.lately == lately, "a peer that begins anew takes nothing back"
    made.look(at_s=20.0 + WINDOW_S + 1)
    made.look(at_s=31.0 + WINDOW_S)
    assert made.lately["swaps"] == 0, "that was not lately"
    for at_s in range(1000, 1000 + 2 * int(WINDOW_S), 7):
        made.look(at_s=at_s)
    assert made.said["totals"]["lately_s"] == WINDOW_S


def test_who_moves_nobody_is_seen_in_the_reports_of_its_partners() -> None:
    others = [changed(A, peer_id=f"12D3KooWother{number}") for number in range(MAX_PARTNERS + 4)]
    made = Watched(A, B, *others)
    for number, other in enumerate(others):
        told = changed(other, sequence=2, swaps=1, last_partner=B.peer_id, moved=0.002 if number < 6 else 0.0)
        made.look(told, at_s=10.0 + number)
    moves = {peer["peer_id"]: peer["moves_others"] for peer in made.peers}
    assert moves[B.peer_id] == 0.0, "each partner's last report counts once, and old ones are forgotten"
    assert moves[A.peer_id] is None


def test_failed_swaps_are_told_with_their_main_cause() -> None:
    made = Watched(A)
    made.look(changed(A, sequence=2, swaps=6, failed_slow=3, failed_abandoned=1), at_s=10.0)
    assert made.notices == [
        "warn: 40 % of the swaps in the last 10 s failed, mostly because partners did not answer in time."
    ]


@pytest.mark.parametrize(
    ("changes", "others", "is_told"),
    [
        ({}, {}, True),
        ({"state": "paused"}, {}, False),
        ({"swaps": 1}, {}, False),
        ({}, {"state": "done"}, False),
        ({"stages": 2}, {"stages": 2, "stage": 1}, False),
    ],
    ids=["trains", "paused", "swaps", "nobody else trains", "nobody else has its stage"],
)
def test_a_peer_that_trains_beside_others_and_does_not_swap_is_named(
    changes: dict[str, object], others: dict[str, object], is_told: bool
) -> None:
    made = Watched(A, B)
    for sequence, at_s, swaps in ((1, WINDOW_S / 2, 0), (2, WINDOW_S + 20.0, 1)):
        mine = changed(A, **{"sequence": sequence + 1, **changes})
        other = changed(B, **{"sequence": sequence + 1, "swaps": swaps, **others})
        made.look(mine, other, at_s=at_s)
    lines = made.notices
    assert any("1 peer did not swap for 10 min 0 s: ..aaaaaa." in line for line in lines) == is_told, lines


def test_stages_that_nobody_computes_are_told_while_somebody_trains() -> None:
    head, inner = changed(A, stages=4), changed(B, stages=4, stage=2)
    for state, lines in (
        ("training", ["bad: No peer holds stages 1, 3, so no microbatch can be completed."]),
        ("done", []),
    ):
        records = [changed(head, state=state), changed(inner, state="done")]
        assert Watched(*records).notices == lines
    paused = [head, changed(inner, state="paused")]
    assert "stages 1, 2, 3," in Watched(*paused).notices[0]


def test_all_is_well() -> None:
    assert Watched(A, B).notices == []
    paused = [changed(each, state="paused", paused_by="asked") for each in (A, B)]
    assert Watched(*paused).notices == ["info: All peers are paused, so nobody trains."]
    assert Watched(A, paused[1]).notices == []


def test_what_is_wrong_is_told_the_worst_first() -> None:
    blocked, newer = changed(A, reachability="unknown", swaps=20), changed(B, software="9.9")
    lines = Watched(blocked, newer, age_s=36.0, directory_age_s=40.0).notices
    assert lines[0] == "bad: The directory has not answered for 40 s, so the values shown are out of date."
    assert lines[1] == "warn: 2 peers missed two announcements and may be gone."
    assert "1 peer may be behind a firewall" in lines[2]
    assert "2 versions" in lines[3]
    assert Watched().notices == ["bad: No peer is alive."]


def test_a_replica_that_went_astray_is_named() -> None:
    apart = {"a": 0.004, "b": 0.0041, "c": 0.0039, "12D3KooWstray!": 0.05}
    peers = [changed(A, peer_id=peer, apart=distance) for peer, distance in apart.items()]
    assert Watched(*peers).notices == ["warn: The weights of ..stray! are far from those of the other replicas."]
    elsewhere = [changed(peer, stages=2, stage=int(peer.metrics.apart == 0.05)) for peer in peers]
    assert not any("far from" in notice for notice in Watched(*elsewhere).notices), (
        "peers of another stage hold other weights"
    )


def test_a_flood_of_peers_is_bounded() -> None:
    made = Watcher(Ticket("r", "0" * 64, ()))
    crowd = [(changed(A, peer_id=f"peer-{index}"), 30.0 - 30.0 * index / MAX_PEERS) for index in range(MAX_PEERS + 50)]
    made.take(crowd, directory_age_s=1.0, now_s=NOW_S)
    assert len(made.members) == MAX_PEERS
    assert "peer-0" not in made.members, "the oldest words go first"


class OneRecord:
    """A directory that has just read the record of A."""

    def records(self) -> list[tuple[PeerRecord, float]]:
        return [(A, 5.0)]

    def headcount(self) -> Headcount:
        return Headcount(1, is_estimate=False)

    def read_age_s(self) -> float:
        return 1.0


def test_a_clock_that_is_set_back_makes_no_peer_older_or_younger(monkeypatch: pytest.MonkeyPatch) -> None:
    directory, made = cast(SwarmDirectory, OneRecord()), Watcher(Ticket("r", "0" * 64, ()))
    before, right = made.look(directory), time.time
    monkeypatch.setattr(time, "time", lambda: right() - 365 * 86400.0)
    after = made.look(directory)
    assert abs(after["time_s"] - before["time_s"]) < PATIENCE_S
    assert after["peers"][0]["health"] == "alive"


def test_the_monitor_says_that_the_peer_on_its_machine_cannot_announce_itself() -> None:
    fault = "this peer has not been able to announce itself for 24 s"
    made = Watcher(Ticket("r", "0" * 64, ()), lambda: Own("12D3KooW", fault))
    [notice, *_] = made.look(cast(SwarmDirectory, OneRecord()))["notices"]
    assert notice == {
        "level": "bad",
        "text": "On this machine, this peer has not been able to announce itself for 24 s.",
    }
