"""Six real peers for 90 seconds, of which some join, leave or are killed at random moments (seeded).

`benchmarks/churn.py` runs the same with twelve peers for five minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.churn import NETWORK_ANSWER_S, Churn, Plan
from harness.processes import small_spec

pytestmark = pytest.mark.slow

MAX_WAIT_S = 3.0
EXIT_S = 30.0  # all peers leave at once; on a slow machine an exit takes at most twice as long as a start
PLAN = Plan(num_peers=6, min_living=3, seconds=90.0, mean_pause_s=5.0, seed=11081, min_gone=3)


def test_whoever_lives_goes_on_swapping_while_others_come_go_and_die(tmp_path: Path) -> None:
    spec = small_spec("churn", outer__max_wait_s=MAX_WAIT_S, outer__inner_steps=40)
    report = Churn(spec, PLAN, tmp_path).run()
    assert report.living >= PLAN.min_living
    assert report.kills + report.leaves >= report.living + PLAN.min_gone, "some went before the end"
    assert len(report.longest_alone) < 5, f"a swap in any 5 rounds: {report}"
    assert report.longest_blocked_s <= MAX_WAIT_S + NETWORK_ANSWER_S
    assert report.longest_exit_s < max(EXIT_S, 2 * report.start_s)
    assert (report.bad_exits, report.left_behind, report.tracebacks) == ([], [], []), report
