"""When a peer trains, from its settings and the state of the machine."""

from __future__ import annotations

from typing import Any

import pytest

from noloco_p2p.peer.pausing import BUSY_SHARE, QUIET_S, FreeTime
from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.records import PAUSED_BY

NOON = 12 * 60
BUSY, CALM = BUSY_SHARE + 0.01, BUSY_SHARE - 0.01


@pytest.mark.parametrize(
    ("settings", "minute", "others_share", "word"),
    [
        ({}, NOON, 1.0, ""),
        ({"when": "always"}, NOON, 1.0, ""),
        ({"when": "idle"}, NOON, None, ""),  # an unknown load does not stop training
        ({"when": "09:00-17:00"}, 9 * 60 - 1, None, "hours"),
        ({"when": "09:00-17:00"}, 9 * 60, None, ""),
        ({"when": "09:00-17:00"}, 17 * 60 - 1, None, ""),
        ({"when": "09:00-17:00"}, 17 * 60, None, "hours"),
        ({"when": "22:00-07:00"}, 21 * 60 + 59, None, "hours"),
        ({"when": "22:00-07:00"}, 22 * 60, None, ""),
        ({"when": "22:00-07:00"}, 0, None, ""),
        ({"when": "22:00-07:00"}, 7 * 60, None, "hours"),
        ({"when": "00:00-23:59"}, NOON, 1.0, ""),
        ({"when": "idle"}, NOON, BUSY, "in use"),
        ({"when": "idle"}, NOON, CALM, ""),
    ],
)
def test_what_is_seen_at_once(settings: dict[str, Any], minute: int, others_share: float | None, word: str) -> None:
    reason = FreeTime(PeerSettings.load(settings)).why_not(minute=minute, others_share=others_share, now_s=5.0)
    assert (reason.word if reason else "") == word
    assert word in PAUSED_BY


@pytest.mark.parametrize("calm", [CALM, None])
def test_training_goes_on_after_two_minutes_of_quiet(calm: float | None) -> None:
    free_time, busy = FreeTime(PeerSettings.load({"when": "idle"})), BUSY

    def at(now_s: float, others_share: float | None) -> str:
        reason = free_time.why_not(minute=NOON, others_share=others_share, now_s=now_s)
        return reason.word if reason else ""

    assert at(0.0, calm) == ""
    assert at(5.0, busy) == "in use"
    assert at(5.0 + QUIET_S - 1.0, calm) == "in use"
    assert at(5.0 + QUIET_S, calm) == ""
    assert at(200.0, busy) == "in use"
    assert at(260.0, busy) == "in use"
    assert at(259.0 + QUIET_S, calm) == "in use", "counted from the last time"
    assert at(260.0 + QUIET_S, calm) == ""
