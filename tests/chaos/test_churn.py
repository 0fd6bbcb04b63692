"""Six real peers for 90 seconds, of which some join, leave or are killed at random moments (seeded).

`benchmarks/churn.py` runs the same with twelve peers for five minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.churn import Churn, Plan
from harness.processes import small_spec

pytestmark = pytest.mark.slow

EXIT_S = WITHOUT_S = 30.0  # all peers leave at once; on a slow machine an exit takes at most twice as long as a start
PLAN = Plan(num_peers=6, min_living=3, seconds=90.0, mean_pause_s=5.0, seed=11081, min_gone=3)


def test_whoever_lives_goes_on_swapping_while_others_come_go_and_die(tmp_path: Path) -> None:
    report = Churn(small_spec("churn"), PLAN, tmp_path).run()
    assert report.living >= PLAN.min_living
    assert report.kills + report.leaves >= report.living + PLAN.min_gone, "some went before the end"
    assert report.longest_without_s < max(WITHOUT_S, 2 * report.start_s), f"they keep swapping: {report}"
    assert report.longest_exit_s < max(EXIT_S, 2 * report.start_s)
    assert (report.bad_exits, report.left_behind, report.tracebacks) == ([], [], []), report
