"""When a peer trains, from its settings and the state of the machine."""

from __future__ import annotations

from typing import Any

import pytest

from noloco_p2p.peer.free_time import BUSY_SHARE, GPU_BUSY_SHARE, QUIET_S, FreeTime, Seen
from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.records import PAUSED_BY

NOON = 12 * 60
BUSY, CALM = BUSY_SHARE + 0.01, BUSY_SHARE - 0.01
GPU_BUSY, GPU_CALM = GPU_BUSY_SHARE + 0.01, GPU_BUSY_SHARE - 0.01
UNKNOWN = Seen(NOON)
ALL_AT_ONCE = Seen(NOON, on_battery=True, others_share=1.0, gpu_others_share=1.0)
STRICT = {"when": "idle", "on_battery": "never", "on_busy_gpu": "never"}


@pytest.mark.parametrize(
    ("settings", "seen", "word"),
    [
        ({}, ALL_AT_ONCE, ""),
        ({"when": "always"}, ALL_AT_ONCE, ""),
        (STRICT, UNKNOWN, ""),  # unknown values never stop training
        ({"when": "09:00-17:00"}, Seen(9 * 60 - 1), "hours"),
        ({"when": "09:00-17:00"}, Seen(9 * 60), ""),
        ({"when": "09:00-17:00"}, Seen(17 * 60 - 1), ""),
        ({"when": "09:00-17:00"}, Seen(17 * 60), "hours"),
        ({"when": "22:00-07:00"}, Seen(21 * 60 + 59), "hours"),
        ({"when": "22:00-07:00"}, Seen(22 * 60), ""),
        ({"when": "22:00-07:00"}, Seen(0), ""),
        ({"when": "22:00-07:00"}, Seen(7 * 60), "hours"),
        ({"when": "00:00-23:59"}, ALL_AT_ONCE, ""),
        ({"on_battery": "never"}, Seen(NOON, on_battery=True), "battery"),
        ({"on_battery": "never"}, Seen(NOON, on_battery=False), ""),
        ({"when": "idle"}, Seen(NOON, on_battery=True), ""),
        ({"when": "idle"}, Seen(NOON, others_share=BUSY), "in use"),
        ({"when": "idle"}, Seen(NOON, others_share=CALM), ""),
        ({"when": "idle"}, Seen(NOON, gpu_others_share=GPU_BUSY), "GPU in use"),
        ({"on_busy_gpu": "never"}, Seen(NOON, others_share=BUSY), ""),
        ({"on_busy_gpu": "never"}, Seen(NOON, gpu_others_share=GPU_BUSY), "GPU in use"),
        ({"on_busy_gpu": "never"}, Seen(NOON, gpu_others_share=GPU_CALM), ""),
        ({"when": "13:00-14:00", "on_battery": "never"}, ALL_AT_ONCE, "hours"),
        (STRICT, ALL_AT_ONCE, "battery"),
    ],
)
def test_what_is_seen_at_once(settings: dict[str, Any], seen: Seen, word: str) -> None:
    free_time = FreeTime(PeerSettings.load(settings))
    reason = free_time.why_not(seen, now_s=5.0)
    assert (reason.word if reason else "") == word
    assert word in PAUSED_BY
    assert free_time.is_limited == any(value != "always" for value in settings.values())


@pytest.mark.parametrize(
    ("busy", "calm", "word"),
    [
        (Seen(NOON, others_share=BUSY), Seen(NOON, others_share=CALM), "in use"),
        (Seen(NOON, gpu_others_share=GPU_BUSY), Seen(NOON, gpu_others_share=GPU_CALM), "GPU in use"),
        (Seen(NOON, gpu_others_share=GPU_BUSY), UNKNOWN, "GPU in use"),
    ],
)
def test_training_goes_on_after_two_minutes_of_quiet(busy: Seen, calm: Seen, word: str) -> None:
    free_time = FreeTime(PeerSettings.load(STRICT))

    def at(now_s: float, seen: Seen) -> str:
        reason = free_time.why_not(seen, now_s=now_s)
        return reason.word if reason else ""

    assert at(0.0, calm) == ""
    assert at(5.0, busy) == word
    assert at(5.0 + QUIET_S - 1.0, calm) == word
    assert at(5.0 + QUIET_S, calm) == ""
    assert at(200.0, busy) == word
    assert at(260.0, busy) == word
    assert at(259.0 + QUIET_S, calm) == word, "counted from the last time"
    assert at(260.0 + QUIET_S, calm) == ""


def test_a_battery_is_heeded_at_once_both_ways() -> None:
    free_time = FreeTime(PeerSettings.load({"on_battery": "never"}))
    assert free_time.why_not(Seen(NOON, on_battery=True), now_s=0.0)
    assert free_time.why_not(Seen(NOON, on_battery=False), now_s=5.0) is None
