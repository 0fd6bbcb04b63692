"""A peer follows the median of its partners on the schedule, and no single partner moves it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.outer.position import LEAST_PARTNERS, PARTNERS, PartnerPositions, next_progress

STEPS = 0.01  # some inner steps, as a fraction of the schedule
PROGRESS = st.floats(0.0, 1.0)
NAMES = [f"peer-{number}" for number in range(20)]


def moved(claims: list[float], *, progress: float = 0.5, share: float = 2.0, num_live: int = 20) -> float:
    """Return by how much a peer moves that knows one claim of each of several partners."""
    partners = PartnerPositions()
    for name, claim in zip(NAMES, claims, strict=False):
        partners.note(name, claim, trained=0.0)
    return partners.move(progress, trained=0.0, share=share, num_live=num_live) - progress


@pytest.mark.parametrize(
    ("claims", "by"),
    [
        ([0.504, 0.504, 0.504], 0.004),
        ([0.504, 0.502, 0.1], 0.001),  # own voice: 0.5
        ([0.504, 0.502, 1.0, 0.503], 0.003),
    ],
)
def test_a_peer_moves_towards_the_median_by_half_of_the_share(claims: list[float], by: float) -> None:
    assert moved(claims) == pytest.approx(by)  # a share of 2 reaches it
    assert moved(claims, share=0.1) == pytest.approx(0.05 * by)


@given(st.lists(st.floats(0.45, 0.55), min_size=2, max_size=7), PROGRESS)
def test_one_liar_moves_a_peer_no_further_than_an_honest_partner_could(honest: list[float], lie: float) -> None:
    by = moved([*honest, lie], share=2.0)
    assert min(0.5, *honest) - 1e-9 <= 0.5 + by <= max(0.5, *honest) + 1e-9


def test_a_peer_does_not_move_before_it_has_met_three_partners() -> None:
    assert [moved([0.6] * number) for number in range(LEAST_PARTNERS)] == [0.0] * LEAST_PARTNERS
    assert moved([0.6] * LEAST_PARTNERS) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("num_live", "claims", "by"), [(2, [0.504], 0.002), (3, [0.504], 0.0), (3, [0.504, 0.9], 0.004)]
)
def test_where_fewer_are_live_all_others_are_enough(num_live: int, claims: list[float], by: float) -> None:
    """Two peers meet at the midpoint of their positions."""
    assert moved(claims, num_live=num_live) == pytest.approx(by)


def test_each_partner_has_one_voice_which_is_its_newest() -> None:
    partners = PartnerPositions()
    for name in ("a", "b", "c"):
        partners.note(name, 0.504, trained=0.0)
    for _ in range(PARTNERS):
        partners.note("liar", 0.9, trained=0.0)
    partners.note("c", 0.502, trained=0.0)
    target = partners.move(0.5, trained=0.0, share=2.0, num_live=20)
    assert target == pytest.approx(0.504)  # of 0.5, 0.502, 0.504, 0.504 and 0.9


def test_only_the_last_eight_partners_count() -> None:
    assert moved([0.9] * 8 + [0.504] * PARTNERS, share=2.0) == pytest.approx(0.004)


def test_partners_that_are_twice_as_fast_are_followed_between_their_claims() -> None:
    """After the last claims, this peer trains for a while, and the others twice as far."""
    partners = PartnerPositions()
    for trained in (0.0, STEPS):
        for name in ("a", "b", "c"):
            partners.note(name, 0.5 + 2 * trained, trained=trained)
    trained = 4 * STEPS
    target = partners.move(0.5 + trained, trained=trained, share=2.0, num_live=20)
    assert target == pytest.approx(0.5 + 8 * STEPS)


def test_one_liar_that_is_met_often_does_not_set_the_speed() -> None:
    """Only its speed is known, because the others have been met once."""
    partners = PartnerPositions()
    for name in ("a", "b", "c"):
        partners.note(name, 0.5, trained=0.0)
    for number in range(3):
        partners.note("liar", 0.3 * number, trained=number * STEPS)
    target = partners.move(0.5 + 3 * STEPS, trained=3 * STEPS, share=2.0, num_live=20)
    assert target == pytest.approx(0.5 + 3 * STEPS)


@pytest.mark.parametrize("total_steps", [7, 480, 2_000, 20_000, 60_000])
def test_the_schedule_ends_at_one_however_its_fractions_are_rounded(total_steps: int) -> None:
    progress = 0.0
    for _ in range(total_steps):
        assert progress < 1
        progress = next_progress(progress, total_steps)
    assert progress == 1.0
    assert moved([1.0, 1.0, 1.0], progress=1 - 1e-12) == pytest.approx(1e-12)
