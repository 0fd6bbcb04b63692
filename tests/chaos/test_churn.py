"""Real peers for a minute and a half, of which one is killed, frozen or asked to leave every few seconds (seeded).

`make chaos` runs the same for eight minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import FREEZE_S, Soak

pytestmark = pytest.mark.slow

WITHOUT_S = 30.0


def test_whoever_lives_goes_on_swapping_while_others_come_go_and_die(tmp_path: Path) -> None:
    soak = Soak(tmp_path, num_peers=5, seed=11081, mtbf_s=6.0)
    try:
        soak.run(90.0)
        report = soak.report()
    finally:
        soak.stop()
    assert report["broken"] == []
    assert report["restarts"] >= 2, "some went before the end"
    assert report["checkpoints_read_after_kill"] >= 1
    assert report["counted"]["swaps"] > 0
    assert report["longest_time_without_a_swap_s"] < WITHOUT_S + FREEZE_S, report
