from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from recorded import changed

from noloco_p2p.monitor.notices import notices
from noloco_p2p.monitor.roster import FORGET_AFTER_S, MAX_PEERS, WINDOW_S, Health, Roster, describe, health_of
from noloco_p2p.monitor.stages import Stage, stage_rows
from noloco_p2p.swarm.records import TTL_S, PeerRecord

A = PeerRecord("12D3KooWaaaaaa", "r", "0" * 64, sequence=1, reachability="direct")
B = PeerRecord("12D3KooWbbbbbb", "r", "0" * 64, sequence=1, reachability="direct")
NOW_S = 1_800_000_000.0


def roster(*records: PeerRecord, age_s: float = 0.0) -> Roster:
    made = Roster()
    made.take([(record, age_s) for record in records], now_s=NOW_S)
    return made


def rows_of(*records: PeerRecord) -> list[dict[str, Any]]:
    return [describe(record, 0.0) for record in records]


def told(
    made: Roster,
    *,
    after_s: float = 0.0,
    stages: Sequence[Stage] = (),
    directory_age_s: float = 1.0,
) -> list[str]:
    rows = made.rows(now_s=NOW_S + after_s)
    found = notices(rows, stages=stages, lately=made.lately(), directory_age_s=directory_age_s)
    return [f"{notice.level}: {notice.text}" for notice in found]


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
    assert health_of(state, age_s) is health


def test_a_peer_that_vanished_is_remembered_with_its_true_age_and_in_the_end_forgotten() -> None:
    made = roster(A, B)
    made.take([(changed(B, sequence=2), 0.0)], now_s=NOW_S + 95.0)
    assert made.rows(now_s=NOW_S + 95.0)[0]["age_s"] == 95.0
    assert told(made, after_s=95.0) == [
        "warn: Lost 1 peer that left without notice: ..aaaaaa. The newest record is 1 min 35 s old.",
    ]
    made.take([(changed(B, sequence=3), 0.0)], now_s=NOW_S + FORGET_AFTER_S + 1)
    assert set(made.members) == {B.peer_id}


def test_an_old_record_seen_again_makes_nobody_younger() -> None:
    made = roster(A)
    made.take([(A, 3.0)], now_s=NOW_S + 50.0)
    assert made.rows(now_s=NOW_S + 50.0)[0]["age_s"] == 50.0


def test_a_swap_is_a_meeting_and_swaps_are_counted_from_the_first_look_on() -> None:
    made = roster(changed(A, swaps=100, failed_slow=7))
    grown = changed(A, sequence=2, swaps=101, failed_slow=8, failed_unreachable=1, last_partner=B.peer_id)
    made.take([(grown, 2.0)], now_s=NOW_S + 10.0)
    assert [(m.at_s, m.peer, m.partner) for m in made.meetings] == [(NOW_S + 8.0, A.peer_id, B.peer_id)]
    lately = made.lately()
    assert (lately["swaps"], lately["failed_slow"], lately["failed_unreachable"]) == (1, 1, 1)
    made.take([(changed(grown, sequence=3, swaps=3, failed_slow=0), 0.0)], now_s=NOW_S + 20.0)
    assert made.lately() == lately, "a peer that begins anew takes nothing back"
    made.take([], now_s=NOW_S + 20.0 + WINDOW_S + 1)
    made.take([], now_s=NOW_S + 31.0 + WINDOW_S)
    assert made.lately()["swaps"] == 0, "that was not lately"


def test_failed_swaps_are_told_with_their_main_cause() -> None:
    made = roster(A)
    made.take([(changed(A, sequence=2, swaps=6, failed_slow=3, failed_abandoned=1), 0.0)], now_s=NOW_S + 10.0)
    assert told(made, after_s=10.0) == [
        "warn: 40 % of the swaps in the last 10 min 0 s failed, mostly because partners did not answer in time."
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
    made, after_s = roster(A, B), WINDOW_S + 20.0
    steps = ((1, WINDOW_S / 2, 0), (2, after_s, 1))
    for sequence, at_s, swaps in steps:
        mine = changed(A, **{"sequence": sequence + 1, **changes})
        other = changed(B, **{"sequence": sequence + 1, "swaps": swaps, **others})
        made.take([(mine, 0.0), (other, 0.0)], now_s=NOW_S + at_s)
    lines = told(made, after_s=after_s)
    assert any("1 peer did not swap for 10 min 0 s: ..aaaaaa." in line for line in lines) == is_told, lines


def test_stages_that_nobody_computes_are_told_while_somebody_trains() -> None:
    head, inner = changed(A, stages=4), changed(B, stages=4, stage=2)
    for state, lines in (
        ("training", ["bad: No peer holds stages 1, 3, so no microbatch can be completed."]),
        ("done", []),
    ):
        records = [changed(head, state=state), changed(inner, state="done")]
        assert told(roster(*records), stages=stage_rows(rows_of(*records))) == lines
    paused = [head, changed(inner, state="paused")]
    assert "stages 1, 2, 3," in told(roster(*paused), stages=stage_rows(rows_of(*paused)))[0]


def test_all_is_well() -> None:
    assert told(roster(A, B)) == []


def test_what_is_wrong_is_told_the_worst_first() -> None:
    old = roster(changed(A, reachability="unknown", swaps=20), changed(B, software="9.9"), age_s=36.0)
    lines = told(old, directory_age_s=40.0)
    assert lines[0] == "bad: The directory has not answered for 40 s, so the values shown are out of date."
    assert lines[1] == "warn: 2 peers missed two announcements and may be gone."
    assert "1 peer may be behind a firewall" in lines[2]
    assert "2 versions" in lines[3]
    assert told(Roster()) == ["bad: No peer is alive."]


def test_a_replica_that_went_astray_is_named() -> None:
    apart = {"a": 0.004, "b": 0.0041, "c": 0.0039, "12D3KooWstray!": 0.05}
    peers = [changed(A, peer_id=peer, apart=distance) for peer, distance in apart.items()]
    assert told(roster(*peers)) == ["warn: The weights of ..stray! are far from those of the other replicas."]
    elsewhere = [changed(peer, stages=2, stage=int(peer.metrics.apart == 0.05)) for peer in peers]
    assert told(roster(*elsewhere)) == [], "peers of another stage hold other weights"


def test_a_flood_of_peers_is_bounded() -> None:
    made = Roster()
    crowd = [(changed(A, peer_id=f"peer-{index}"), 30.0 - 30.0 * index / MAX_PEERS) for index in range(MAX_PEERS + 50)]
    made.take(crowd, now_s=NOW_S)
    assert len(made.members) == MAX_PEERS
    assert "peer-0" not in made.members, "the oldest words go first"
