"""The lines of `noloco status`."""

from __future__ import annotations

from typing import Any

import pytest

from noloco_p2p.cli.local import status_lines
from noloco_p2p.telemetry.metrics import Metrics

REPLY: dict[str, Any] = {
    **Metrics(trained_s=7500.0, tokens=3_410_000, swaps=41).as_dict(),
    **dict.fromkeys(("peer_id", "pid", "software", "name", "run", "address", "ticket", "last_fault"), ""),
    "state": "training",
    "state_since_s": 60.0,
    "running_since_s": 60.0,
    "paused_because": "",
    "doing": None,
    "live_peers": 1,
    "live_peers_is_estimate": False,
    "is_announced": True,
    "neighbours": {},
    "peers": {"12D3KooWabcdef": "Ada"},
    "reach": {"state": "direct", "sentence": "others can call this peer"},
    "stage": None,
    "settings": {"hide_contribution": {"value": False, "origin": "default"}},
}
STAGE = {
    "stage": 1,
    "stages": 4,
    "waits_for_stages": [],
    "capacity": 4321.0,
    "queue": 2,
    "microbatches": 200,
    "late_microbatches": 10,
    "lost_microbatches": 3,
}
COUNTED = "can compute 4.32k tokens/s; microbatches: 200 done, 10 of them late, 3 lost, 2 held now"


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, ["given     2 h 5 min of training, 3.41M tokens, 41 swaps"]),
        (
            {"tokens": None, "settings": {"hide_contribution": {"value": True, "origin": "flag"}}},
            [
                "given     2 h 5 min of training, 41 swaps (time and tokens are hidden from other peers)",
                "settings  hide_contribution  True  (flag)",
                "          0 settings have their default values (shown by --json)",
            ],
        ),
        (
            {"neighbours": {"a": "punched", "b": "direct", "c": "direct"}},
            ["reach     direct: others can call this peer", "          neighbours: 2 direct, 1 punched"],
        ),
        (
            {"is_announced": False, "last_fault": "this peer has not been able to announce itself for 24 s: no answer"},
            [
                "swarm     1 other live peer; this peer cannot announce itself, see the line `fault`",
                "fault     this peer has not been able to announce itself for 24 s: no answer",
            ],
        ),
        (
            {"last_partner": "12D3KooWabcdef", "link_use": 0.5, "swap_s": 3.14},
            ["swaps     41 (0.0/min, 50 % of the link, 3.1 s each), last with ..abcdef Ada"],
        ),
        (
            {"loss": 2.3, "validation_loss": 2.41, "validation_progress": 0.3199},
            ["training  loss 2.300, validation 2.410 at 32 %, 0 tokens/s"],
        ),
        ({}, ["training  loss -, validation -, 0 tokens/s"]),
        (STAGE, [f"stage     1 of 4, {COUNTED}"]),
        ({**STAGE, "stage": 0}, [f"stage     0 of 4 (head), {COUNTED}"]),
        ({**STAGE, "stage": 0, "stages": 0}, [f"stage     0 (head), {COUNTED}"]),
        ({**STAGE, "waits_for_stages": [2]}, ["          waiting for stage 2, which no peer holds"]),
        ({**STAGE, "waits_for_stages": [0, 3]}, ["          waiting for stages 0, 3, which no peer holds"]),
        (
            {"apart": 0.0031, "age_steps": 2.14, "blocked_s": 12.0},
            ["          weights 0.31 % apart, half-differences 2.1 steps old; training waited for 12 s"],
        ),
        ({"live_peers": 0, "address": "A"}, ["swarm     training alone: no other live peer; this peer announces A"]),
    ],
)
def test_the_lines_of_a_status(changes: dict[str, Any], lines: list[str]) -> None:
    shown = status_lines(REPLY | changes)
    assert [line for line in shown if line in lines] == lines, shown


def test_a_peer_that_trains_alone_shows_no_old_measurements() -> None:
    measured = REPLY | {"apart": 0.0031, "age_steps": 2.14, "blocked_s": 12.0}
    assert "apart" in "\n".join(status_lines(measured))
    assert "apart" not in "\n".join(status_lines(measured | {"live_peers": 0}))


def test_what_there_is_nothing_to_say_about_has_no_line() -> None:
    heads = {line.split()[0] for line in status_lines(REPLY)}
    assert not heads & {"name", "why", "stage", "now"}
    assert {"peer", "run", "swaps", "fault", "ticket"} <= heads | {"ticket"}
