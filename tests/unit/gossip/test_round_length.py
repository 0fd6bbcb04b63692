"""The controller of the round length in a simulated loop fits in the swap, follows the link, and does not oscillate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from noloco_p2p.gossip.round_length import (
    CURVE_START,
    FILL,
    FILL_UNWAITED,
    LENGTH_EXPONENT,
    MAX_CHANGE,
    STEPS_EXPONENT,
    STILL,
    LinkMeasure,
    RoundLength,
    best_inner_steps,
    cautious,
    measure_link,
    usual_s,
)
from noloco_p2p.spec import OuterSpec

EARLY_BYTES, LATE_BYTES = 100_000_000, 50_000_000
EAGER = OuterSpec(inner_steps="auto", max_wait_s=0.0)


def link(early_s: float, *, late_s: float = 0.0) -> LinkMeasure:
    return LinkMeasure(early_s, late_s, is_whole=True)


def train(
    length: RoundLength,
    *,
    num_rounds: int,
    step_s: Callable[[int], float] | float,
    bytes_per_s: Callable[[int], float] | float,
    noise: random.Random | None = None,
    others_s: Sequence[float] = (),
) -> list[int]:
    """Simulate rounds over a link of this rate, with 10 % of each spent on matchmaking; return the chosen lengths."""
    lengths = []
    for index in range(num_rounds):
        spread = noise.lognormvariate(0.0, 0.25) if noise else 1.0
        rate = (bytes_per_s(index) if callable(bytes_per_s) else bytes_per_s) * spread
        seconds = step_s(index) if callable(step_s) else step_s
        lengths.append(length.next(seconds * (noise.uniform(0.95, 1.05) if noise else 1.0), others_s=others_s))
        time_s = 0.9 * lengths[-1] * seconds
        early_s = EARLY_BYTES / rate
        moved_bytes = round(rate * min(early_s, time_s))
        length.note(
            measure_link(
                early_bytes=EARLY_BYTES,
                late_bytes=LATE_BYTES,
                moved_bytes=moved_bytes,
                elapsed_s=min(early_s, time_s),
                late_s=LATE_BYTES / rate if early_s < time_s else None,
                is_whole=early_s < time_s,
            )
        )
    return lengths


def ideal(*, step_s: float, bytes_per_s: float) -> int:
    return math.ceil((EARLY_BYTES + LATE_BYTES) / bytes_per_s / FILL_UNWAITED / step_s)


def test_a_fixed_length_stays_whatever_is_measured() -> None:
    length = RoundLength(OuterSpec(inner_steps=20))
    assert train(length, num_rounds=30, step_s=1.0, bytes_per_s=1e6) == [20] * 30
    length.resume(77)
    assert length.next(1.0) == 20


@pytest.mark.parametrize("bytes_per_s", [4e6, 12.5e6, 40e6])
def test_the_swap_of_a_round_fills_a_third_of_it(bytes_per_s: float) -> None:
    lengths = train(RoundLength(EAGER), num_rounds=30, step_s=1.0, bytes_per_s=bytes_per_s)
    wanted = ideal(step_s=1.0, bytes_per_s=bytes_per_s)
    assert wanted / STILL <= lengths[-1] <= wanted * STILL
    assert len(set(lengths[12:])) == 1, "it has settled"


def test_no_round_is_shorter_or_longer_than_the_spec_allows() -> None:
    outer = OuterSpec(inner_steps="auto", max_wait_s=0.0, min_inner_steps=10, max_inner_steps=60)
    assert 10 <= train(RoundLength(outer), num_rounds=30, step_s=1.0, bytes_per_s=1e9)[-1] <= 10 * STILL
    assert 60 >= train(RoundLength(outer), num_rounds=30, step_s=1.0, bytes_per_s=1e5)[-1] >= 60 / STILL


@pytest.mark.parametrize("seed", range(5))
def test_a_link_with_noise_does_not_move_the_length_to_and_fro(seed: int) -> None:
    lengths = train(RoundLength(EAGER), num_rounds=300, step_s=1.0, bytes_per_s=12.5e6, noise=random.Random(seed))[20:]
    wanted = ideal(step_s=1.0, bytes_per_s=12.5e6)
    assert all(0.75 * wanted <= steps <= 2 * wanted for steps in lengths)
    changes = [b - a for a, b in pairwise(lengths) if a != b]
    assert len(changes) < 0.12 * len(lengths), changes


def test_a_link_that_drops_to_a_tenth_and_recovers_is_followed() -> None:
    def rate(index: int) -> float:
        return 2.5e6 if 40 <= index < 80 else 25e6  # rounds of 18 and of 180 steps, within the bounds

    lengths = train(RoundLength(EAGER), num_rounds=120, step_s=1.0, bytes_per_s=rate)
    fast, slow = (ideal(step_s=1.0, bytes_per_s=bytes_per_s) for bytes_per_s in (25e6, 2.5e6))
    assert fast / STILL <= lengths[39] <= fast * STILL
    assert slow / STILL <= lengths[56] <= slow * STILL, "sixteen rounds later at most"
    assert fast / STILL <= lengths[100] <= fast * STILL
    assert lengths[40:80] == sorted(lengths[40:80]), "it goes there straight"
    assert lengths[80:] == sorted(lengths[80:], reverse=True)
    for before, after in pairwise(lengths):
        assert max(after / before, before / after) <= MAX_CHANGE or abs(after - before) == 1


def test_a_peer_that_slows_down_takes_fewer_steps_a_round() -> None:
    def step_s(index: int) -> float:
        return 1.0 if index < 30 else 4.0

    lengths = train(RoundLength(EAGER), num_rounds=60, step_s=step_s, bytes_per_s=5e6)
    for steps, seconds in ((lengths[29], 1.0), (lengths[-1], 4.0)):
        wanted = ideal(step_s=seconds, bytes_per_s=5e6)
        assert wanted / STILL <= steps <= wanted * STILL
    assert lengths[30:] == sorted(lengths[30:], reverse=True)


@pytest.mark.parametrize(("wait_steps", "expected"), [(0.0, 0.0), (1.0, 2.6667), (10.0, 18.1370), (1000.0, 1668.2651)])
def test_the_best_length_by_hand(wait_steps: float, expected: float) -> None:
    """With a = 0.09, p = 0.24, c = 1, the best length is (0.15 w + sqrt((0.15 w)^2 + 0.0864 w)) / 0.18."""
    assert (LENGTH_EXPONENT, STEPS_EXPONENT, CURVE_START) == (0.09, 0.24, 1.0)
    assert best_inner_steps(wait_steps) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("wait_steps", [0.1, 1.0, 7.0, 50.0])
def test_no_other_length_has_a_lower_loss_in_equal_time(wait_steps: float) -> None:
    def loss(inner_steps: float) -> float:
        slowdown = 1 + wait_steps / inner_steps
        return (CURVE_START + inner_steps) ** LENGTH_EXPONENT * slowdown**STEPS_EXPONENT

    best = best_inner_steps(wait_steps)
    assert all(loss(best) <= loss(factor * best) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))


def test_where_training_waits_the_early_part_fits_into_its_share_of_a_round() -> None:
    length = RoundLength(OuterSpec(inner_steps="auto", max_wait_s=60.0))
    lengths = train(length, num_rounds=40, step_s=1.0, bytes_per_s=12.5e6)
    wanted = EARLY_BYTES / 12.5e6 / FILL
    assert wanted / STILL <= lengths[-1] <= wanted * STILL
    assert length.needed_s() == pytest.approx(wanted)
    assert length.shortest_s(1.0) == pytest.approx(wanted), "for the wait of 4 s 8.2 steps would be enough"


def test_where_the_wait_is_long_it_decides() -> None:
    """A partner that codes slowly has such a wait."""
    length = RoundLength(OuterSpec(inner_steps="auto", max_wait_s=60.0))
    length.note(link(2.0, late_s=10.0))
    assert length.shortest_s(1.0) == pytest.approx(best_inner_steps(10.0)), "more than 2 / FILL"
    assert length.shortest_s(10.0) == pytest.approx(50.0), "at least min_inner_steps"


def test_nobody_waits_longer_than_the_spec_says_and_what_is_left_travels_in_the_next_round() -> None:
    length = RoundLength(OuterSpec(inner_steps="auto", max_wait_s=1.0, min_inner_steps=1))
    length.note(link(8.0, late_s=4.0))
    assert length.needed_s() == pytest.approx((8.0 + 3.0) / FILL)
    assert length.shortest_s(20.0) == pytest.approx(length.needed_s()), "a wait of 1 s is a twentieth of a step"


def test_without_a_late_part_rounds_are_those_of_a_swarm_that_never_waits() -> None:
    waiting = OuterSpec(inner_steps="auto", max_wait_s=60.0)
    alike = [RoundLength(waiting, max_wait_s=0.0), RoundLength(EAGER)]
    one, other = (
        train(length, num_rounds=60, step_s=1.0, bytes_per_s=12.5e6, noise=random.Random(1)) for length in alike
    )
    assert one == other
    assert one != train(RoundLength(waiting), num_rounds=60, step_s=1.0, bytes_per_s=12.5e6, noise=random.Random(1))


# influence of other peers


def test_a_fast_peer_takes_rounds_as_long_as_the_others_can_keep_up_with() -> None:
    own = ideal(step_s=1.0, bytes_per_s=30e6)
    lengths = train(RoundLength(EAGER), num_rounds=40, step_s=1.0, bytes_per_s=30e6, others_s=[3.0 * own, 2.0 * own])
    assert 3 * own / STILL <= lengths[-1] <= 3 * own * STILL


def test_a_slow_link_is_never_hurried_by_others() -> None:
    lengths = train(RoundLength(EAGER), num_rounds=40, step_s=1.0, bytes_per_s=4e6, others_s=[5.0] * 5)
    assert lengths[-1] >= ideal(step_s=1.0, bytes_per_s=4e6) / STILL


def test_peers_that_are_alike_do_not_keep_each_others_rounds_long() -> None:
    lengths = [RoundLength(EAGER) for _ in range(4)]
    for each in lengths:
        each.inner_steps = 150
    for _ in range(60):
        told_s = [each.shortest_s(1.0) for each in lengths]
        for each in lengths:
            each.next(1.0, others_s=told_s)
            each.note(link(5.0))
    assert all(each.inner_steps <= 5.0 / FILL_UNWAITED * STILL**2 for each in lengths), [e.inner_steps for e in lengths]


@pytest.mark.parametrize("max_wait_s", [0.0, 60.0])
@pytest.mark.parametrize("seed", range(5))
def test_peers_of_one_to_four_times_the_speed_come_to_rounds_of_nearly_one_duration(
    seed: int, max_wait_s: float
) -> None:
    """Each round a peer reads eight of the twelve records; steps and swaps differ in duration by up to four times."""
    rng = random.Random(seed)
    outer = OuterSpec(inner_steps="auto", max_wait_s=max_wait_s, max_inner_steps=1000)
    peers = [RoundLength(outer) for _ in range(12)]
    steps_s = [1.0 / rng.uniform(1.0, 4.0) for _ in peers]
    swaps_s = [rng.uniform(1.0, 4.0) for _ in peers]
    for each in peers:
        each.resume(rng.randrange(10, 900))
    for _ in range(60):
        told_s = [each.shortest_s(step_s) for each, step_s in zip(peers, steps_s, strict=True)]
        for each, step_s, swap_s in zip(peers, steps_s, swaps_s, strict=True):
            each.next(step_s, others_s=rng.sample(told_s, 8))
            each.note(link(swap_s))
    rounds_s = [each.inner_steps * step_s for each, step_s in zip(peers, steps_s, strict=True)]
    assert max(rounds_s) / min(rounds_s) < 2.0, rounds_s


def test_one_that_is_far_slower_drags_nobody() -> None:
    assert usual_s([10.0, 10.0, 12.0, 11.0, 500.0]) == 12.0
    assert usual_s([10.0, 30.0]) == 30.0, "of two neither is the exception"
    assert usual_s([10.0, 500.0]) == 500.0
    assert usual_s([10.0, 20.0, 30.0, 40.0]) == 40.0
    assert usual_s([10.0]) == 10.0


@pytest.mark.parametrize("told_s", [0.0, -1e300, 1e300])
def test_what_a_partner_tells_cannot_break_it(told_s: float) -> None:
    length = RoundLength(EAGER)
    length.note(link(5.0))
    assert 5 <= length.next(1.0, others_s=[told_s]) <= 200
    assert 5 <= length.next(1e-9, others_s=[told_s]) <= 200


# measurements


def test_nothing_measured_changes_nothing() -> None:
    length = RoundLength(EAGER)
    assert [length.next(None), length.next(1.0)] == [32, 32]
    length.note(link(5.0))
    assert length.next(None) == 32


def test_a_swap_that_was_given_up_before_it_moved_anything_makes_rounds_longer() -> None:
    """This happens on a link whose round trip takes longer than the round."""
    length, lengths = RoundLength(EAGER), list[int]()
    for _ in range(20):
        lengths.append(length.next(0.05))
        length.note(
            measure_link(
                early_bytes=700,
                late_bytes=300,
                moved_bytes=0,
                elapsed_s=lengths[-1] * 0.05,
                late_s=None,
                is_whole=False,
            )
        )
    assert lengths[-1] >= 200 / STILL
    assert lengths == sorted(lengths)


def test_two_swaps_in_a_row_that_were_given_up_are_believed_at_once() -> None:
    length = RoundLength(EAGER)
    for _ in range(7):
        length.note(link(10.0))
    for given_up_s, needed_s in ((90.0, 10.0 / FILL_UNWAITED), (80.0, 80.0 / FILL_UNWAITED)):
        length.note(LinkMeasure(given_up_s, 0.0, is_whole=False))
        assert length.needed_s() == needed_s
    length.note(link(10.0))
    assert length.needed_s() == 10.0 / FILL_UNWAITED


def test_an_early_part_that_was_given_up_in_a_moment_tells_nothing() -> None:
    length = RoundLength(EAGER)
    length.note(link(30.0))
    length.note(LinkMeasure(0.01, 0.0, is_whole=False))
    assert length.needed_s() == 30.0 / FILL_UNWAITED


def test_a_resumed_peer_goes_on_with_its_length() -> None:
    length = RoundLength(EAGER)
    length.resume(90)
    assert (length.inner_steps, length.next(1.0)) == (90, 90)
    length.resume(10**9)
    assert length.inner_steps == 200


def test_cautious_is_above_most_and_not_moved_by_one() -> None:
    assert cautious([]) == 0.0
    assert cautious([5.0] * 6 + [1e6]) == 5.0
    assert cautious([1.0, 2.0, 3.0, 4.0, 5.0]) == 4.0
