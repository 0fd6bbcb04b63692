"""How many steps a demo takes, how long its rounds are, and how it gives the reasons for half and solo rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from noloco_p2p.demo import FEWEST_STEPS, DemoPlan, _half_reasons, report_lines, steps_that_fit
from noloco_p2p.errors import SpecError

ALONE = "alone: ..abc123 refused: I have a partner for round 3"
LATE = "its outer gradient is not here yet"


@pytest.mark.parametrize(
    ("seconds", "step_s", "peers", "cores", "least", "most"),
    [
        (230, 0.1, 4, 2, 700, 850),
        (230, 0.5, 4, 2, 110, 150),  # five times slower
        (230, 0.1, 4, 1, 330, 420),
        (230, 0.1, 4, 16, 1400, 1700),  # peers have a core each, and no more
        (230, 5.0, 4, 2, FEWEST_STEPS, FEWEST_STEPS),
    ],
)
def test_steps_fit_into_the_time(seconds: float, step_s: float, peers: int, cores: int, least: int, most: int) -> None:
    steps = steps_that_fit(seconds, step_s=step_s, num_peers=peers, num_cores=cores)
    assert least <= steps <= most
    assert steps % 10 == 0


@pytest.mark.parametrize("num_steps", [20, 60, 110, 480, 4000])
def test_there_are_a_dozen_rounds_at_least(num_steps: int) -> None:
    spec = DemoPlan(Path("unused")).spec(num_steps)
    assert spec.train.total_steps == num_steps
    assert spec.outer.max_inner_steps * 12 <= max(num_steps, 12)
    assert spec.outer.first_inner_steps * 12 <= max(num_steps, 12)
    assert spec.train.warmup_steps < num_steps


def test_changes_to_the_spec_come_last_and_are_checked() -> None:
    assert DemoPlan(Path("unused"), changes={"outer.inner_steps": 7}).spec(480).outer.inner_steps == 7
    with pytest.raises(SpecError, match=r"outer\.nothing"):
        DemoPlan(Path("unused"), changes={"outer.nothing": 7}).spec(480)


def test_reasons_for_half_rounds_are_counted() -> None:
    outcomes = [("round", f"half with ..abc123: {LATE}"), ("round", ALONE), ("closed", f"half with ..zz: {LATE}")]
    events = [{"event": kind, "last_outcome": text} for kind, text in outcomes]
    assert _half_reasons([*events, {"event": "started"}]) == {LATE: 2}


def test_the_report_gives_the_reasons() -> None:
    peer: dict[str, Any] = {
        "peer_id": "12D3KooWxyzabc",
        "rounds": 9,
        "swaps": 6,
        "halves": 1,
        "alone": 2,
        "half_reasons": {LATE: 1},
        "solo_reasons": {"no other peer trained": 2},
        "loss_start": 5.8,
        "loss_end": 1.3,
        "bytes_sent": 1,
        "bytes_received": 1,
        "kills": 0,
    }
    calm = peer | {"halves": 0, "alone": 0, "half_reasons": {}, "solo_reasons": {}}
    rest = {"merged_peers": 2, "merged_loss": 1.3, "spread": 0.001, "export_dir": "export", "wall_s": 100.0}
    lines = report_lines({"peers": [calm, peer], **rest})
    assert f"peer 1: 1 half ({LATE}: 1), 2 solo (no other peer trained: 2)" in lines
    assert not any(line.startswith("peer 0: ") for line in lines)
