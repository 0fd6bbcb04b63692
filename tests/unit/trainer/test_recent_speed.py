"""The measured speed of a pipeline, which may stand still."""

from __future__ import annotations

import pytest

from noloco_p2p.trainer.stage_trainer import RECENT_S, RecentSpeed


def test_speed_is_that_of_the_last_half_minute_and_falls_to_zero_when_nothing_moves() -> None:
    speed = RecentSpeed(100.0, 0, 0)
    assert speed.at(102.0, 4, 20) == (2.0, 10.0)
    found = [speed.at(100.0 + second, 2 * second, 10 * second) for second in range(3, 61)]
    assert found[-1] == pytest.approx((2.0, 10.0))
    stalled = [speed.at(160.0 + second, 120, 600)[1] for second in range(1, int(RECENT_S) + 1)]
    assert stalled == sorted(stalled, reverse=True)
    assert stalled[-1] == 0
    assert speed.at(161.0 + RECENT_S, 120, 610)[1] == pytest.approx(10 / RECENT_S, rel=0.1)
