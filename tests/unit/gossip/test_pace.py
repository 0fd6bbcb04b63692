"""How far the boundary is: measured steps, whatever happens between two of them."""

from __future__ import annotations

import pytest

from noloco_p2p.gossip.frames import Boundary
from noloco_p2p.gossip.pace import WINDOW_STEPS, Pace


def paced(durations_s: list[float], *, inner_steps: int = 10, steps_done: int = 0) -> tuple[Pace, float]:
    pace, now_s = Pace(inner_steps), 100.0
    pace.open_round(now_s, steps_done=steps_done)
    for duration_s in durations_s:
        now_s += duration_s
        pace.step(now_s)
    return pace, now_s


def test_nothing_is_claimed_before_the_first_step() -> None:
    pace, now_s = paced([])
    assert pace.boundary(round_index=3, progress=0.5, now_s=now_s) == Boundary(3, None, None, 0.5, 10)


def test_the_boundary_comes_nearer_with_steps_and_with_time() -> None:
    pace, now_s = paced([2.0] * 4)
    assert pace.seconds_per_round() == pytest.approx(20.0)
    assert pace.seconds_to_boundary(now_s) == pytest.approx(12.0)
    assert pace.seconds_to_boundary(now_s + 1.5) == pytest.approx(10.5)
    assert pace.seconds_to_boundary(now_s + 1e6) == 0.0


def test_an_evaluation_between_two_steps_does_not_count() -> None:
    pace, _ = paced([1.0, 1.0, 600.0, 1.0, 1.0])
    assert pace.seconds_per_step == 1.0


def test_a_machine_that_slows_down_is_believed_after_a_window() -> None:
    pace, _ = paced([1.0] * 100 + [3.0] * WINDOW_STEPS, inner_steps=1000)
    assert pace.seconds_per_step == pytest.approx(3.0)


def test_a_round_that_was_begun_before_a_restart_is_shorter() -> None:
    pace, now_s = paced([1.0], steps_done=7)
    assert pace.seconds_to_boundary(now_s) == pytest.approx(2.0)


def test_a_round_of_another_length_is_told_and_moves_the_boundary() -> None:
    pace, now_s = paced([2.0] * 10)
    pace.open_round(now_s, inner_steps=25, steps_done=5)
    boundary = pace.boundary(round_index=1, progress=0.0, now_s=now_s)
    assert (boundary.inner_steps, boundary.seconds_per_round, boundary.seconds_to_boundary) == (25, 50.0, 40.0)


def test_the_speed_is_known_from_the_first_moment_of_the_next_round() -> None:
    pace, now_s = paced([0.5] * 10)
    pace.open_round(now_s + 5.0)
    assert pace.seconds_to_boundary(now_s + 5.0) == pytest.approx(5.0)
