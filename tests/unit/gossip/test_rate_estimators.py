"""Estimates of the time to the boundary and of the duration of a transfer, from earlier steps and transfers."""

from __future__ import annotations

import pytest

from noloco_p2p.gossip.frames import Boundary
from noloco_p2p.gossip.rate_estimators import REMEMBERED, WINDOW_STEPS, Goodput, StepRate


def paced(durations_s: list[float], *, inner_steps: int = 10, steps_done: int = 0) -> tuple[StepRate, float]:
    step_rate, now_s = StepRate(inner_steps), 100.0
    step_rate.open_round(now_s, steps_done=steps_done)
    for duration_s in durations_s:
        now_s += duration_s
        step_rate.step(now_s)
    return step_rate, now_s


def test_nothing_is_claimed_before_the_first_step() -> None:
    step_rate, now_s = paced([])
    assert step_rate.boundary(round_index=3, progress=0.5, now_s=now_s) == Boundary(3, None, None, 0.5, 10)


def test_the_boundary_comes_nearer_with_steps_and_with_time() -> None:
    step_rate, now_s = paced([2.0] * 4)
    assert step_rate.seconds_per_round() == pytest.approx(20.0)
    assert step_rate.seconds_to_boundary(now_s) == pytest.approx(12.0)
    assert step_rate.seconds_to_boundary(now_s + 1.5) == pytest.approx(10.5)
    assert step_rate.seconds_to_boundary(now_s + 1e6) == 0.0


def test_an_evaluation_between_two_steps_does_not_count() -> None:
    step_rate, _ = paced([1.0, 1.0, 600.0, 1.0, 1.0])
    assert step_rate.seconds_per_step == 1.0


def test_a_machine_that_slows_down_is_believed_after_a_window() -> None:
    step_rate, _ = paced([1.0] * 100 + [3.0] * WINDOW_STEPS, inner_steps=1000)
    assert step_rate.seconds_per_step == pytest.approx(3.0)


def test_a_round_that_was_begun_before_a_restart_is_shorter() -> None:
    step_rate, now_s = paced([1.0], steps_done=7)
    assert step_rate.seconds_to_boundary(now_s) == pytest.approx(2.0)


def test_a_round_of_another_length_is_told_and_moves_the_boundary() -> None:
    step_rate, now_s = paced([2.0] * 10)
    step_rate.open_round(now_s, inner_steps=25, steps_done=5)
    boundary = step_rate.boundary(round_index=1, progress=0.0, now_s=now_s)
    assert (boundary.inner_steps, boundary.seconds_per_round, boundary.seconds_to_boundary) == (25, 50.0, 40.0)


def test_the_speed_is_known_from_the_first_moment_of_the_next_round() -> None:
    step_rate, now_s = paced([0.5] * 10)
    step_rate.open_round(now_s + 5.0)
    assert step_rate.seconds_to_boundary(now_s + 5.0) == pytest.approx(5.0)


def measured(*seconds: float) -> Goodput:
    goodput = Goodput()
    for each in seconds:
        goodput.note(1000, each)
    return goodput


def test_nothing_is_claimed_before_the_first_transfer() -> None:
    assert Goodput().seconds_for(10) is None
    empty = measured()
    empty.note(0, 5.0)
    assert empty.seconds_for(10) is None


def test_one_transfer_leaves_room_as_its_spread_is_not_known() -> None:
    assert measured(2.0).seconds_for(1000) == pytest.approx(4.0)


def test_a_steady_link_needs_no_room_and_an_unsteady_one_gets_it() -> None:
    assert measured(2.0, 2.0, 2.0).seconds_for(500) == pytest.approx(1.0)
    assert measured(1.0, 2.0, 3.0).seconds_for(1000) == pytest.approx(3.0)


def test_one_slow_partner_is_no_slow_link_but_half_of_all_are() -> None:
    steady = [1.0] * REMEMBERED
    assert measured(*steady, 50.0).seconds_for(1000) == pytest.approx(1.0)
    changed = measured(*steady, *[50.0] * (REMEMBERED // 2 + 1)).seconds_for(1000)
    assert changed is not None
    assert changed >= 50.0
