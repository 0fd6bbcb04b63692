"""When a peer trains, from its settings and the state of the machine."""

from __future__ import annotations

from typing import Any

import pytest

from noloco_p2p.peer.free_time import BUSY_SHARE, QUIET_S, FreeTime, Seen
from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.records import PAUSED_BY

NOON = 12 * 60
BUSY, CALM = BUSY_SHARE + 0.01, BUSY_SHARE - 0.01
FULL = Seen(NOON, others_share=1.0)


@pytest.mark.parametrize(
    ("settings", "seen", "word"),
    [
        ({}, FULL, ""),
        ({"when": "always"}, FULL, ""),
        ({"when": "idle"}, Seen(NOON), ""),  # an unknown load does not stop training
        ({"when": "09:00-17:00"}, Seen(9 * 60 - 1), "hours"),
        ({"when": "09:00-17:00"}, Seen(9 * 60), ""),
        ({"when": "09:00-17:00"}, Seen(17 * 60 - 1), ""),
        ({"when": "09:00-17:00"}, Seen(17 * 60), "hours"),
        ({"when": "22:00-07:00"}, Seen(21 * 60 + 59), "hours"),
        ({"when": "22:00-07:00"}, Seen(22 * 60), ""),
        ({"when": "22:00-07:00"}, Seen(0), ""),
        ({"when": "22:00-07:00"}, Seen(7 * 60), "hours"),
        ({"when": "00:00-23:59"}, FULL, ""),
        ({"when": "idle"}, Seen(NOON, others_share=BUSY), "in use"),
        ({"when": "idle"}, Seen(NOON, others_share=CALM), ""),
    ],
)
def test_what_is_seen_at_once(settings: dict[str, Any], seen: Seen, word: str) -> None:
    reason = FreeTime(PeerSettings.load(settings)).why_not(seen, now_s=5.0)
    assert (reason.word if reason else "") == word
    assert word in PAUSED_BY


@pytest.mark.parametrize("calm", [Seen(NOON, others_share=CALM), Seen(NOON)])
def test_training_goes_on_after_two_minutes_of_quiet(calm: Seen) -> None:
    free_time, busy = FreeTime(PeerSettings.load({"when": "idle"})), Seen(NOON, others_share=BUSY)

    def at(now_s: float, seen: Seen) -> str:
        reason = free_time.why_not(seen, now_s=now_s)
        return reason.word if reason else ""

    assert at(0.0, calm) == ""
    assert at(5.0, busy) == "in use"
    assert at(5.0 + QUIET_S - 1.0, calm) == "in use"
    assert at(5.0 + QUIET_S, calm) == ""
    assert at(200.0, busy) == "in use"
    assert at(260.0, busy) == "in use"
    assert at(259.0 + QUIET_S, calm) == "in use", "counted from the last time"
    assert at(260.0 + QUIET_S, calm) == ""
