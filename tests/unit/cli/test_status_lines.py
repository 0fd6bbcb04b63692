"""The lines of `noloco status` on the stage of a peer and on the connections to its neighbours."""

from __future__ import annotations

from typing import Any

from noloco_p2p.cli.status import contribution, stage_lines, ways

REPLY: dict[str, Any] = {
    "stage": 1,
    "stages": 4,
    "waits_for_stages": [],
    "capacity": 4321.0,
    "microbatches": 200,
    "late_microbatches": 10,
    "lost_microbatches": 3,
    "queue": 2,
}


def test_a_peer_of_a_stage_tells_it_with_its_microbatches() -> None:
    [line] = stage_lines(REPLY)
    assert line == (
        "stage     1 of 4, can compute 4.32k tokens/s; microbatches: 200 done, 10 of them late, 3 lost, 2 held now"
    )
    assert stage_lines({**REPLY, "stage": 0})[0].startswith("stage     0 of 4 (head), ")
    assert stage_lines({**REPLY, "stage": 0, "stages": 0})[0].startswith("stage     0 (head), "), "before it begins"


def test_it_says_what_it_waits_for() -> None:
    assert stage_lines({**REPLY, "waits_for_stages": [2]})[1].strip() == "waiting for stage 2, which no peer holds"
    assert (
        stage_lines({**REPLY, "waits_for_stages": [0, 3]})[1].strip() == "waiting for stages 0, 3, which no peer holds"
    )


def test_a_peer_with_a_whole_model_has_no_stage() -> None:
    assert stage_lines({**REPLY, "stage": None}) == []


def test_neighbours_are_counted_by_how_they_are_reached() -> None:
    assert ways({"a": "punched", "b": "direct", "c": "direct"}) == "2 direct, 1 punched"


def test_what_a_peer_has_given() -> None:
    reply = {"trained_s": 7500.0, "tokens": 3_410_000, "swaps": 41, "settings": {"hide_contribution": {"value": False}}}
    assert contribution(reply) == "2 h 5 min of training, 3.41M tokens, 41 swaps"
    hidden = {**reply, "tokens": None, "settings": {"hide_contribution": {"value": True}}}
    assert contribution(hidden) == "2 h 5 min of training, 41 swaps (time and tokens are hidden from other peers)"
