"""A peer follows the median of its partners on the schedule, and no single partner moves it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from harness.specs import published
from harness.swapped import received
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Swapped
from noloco_p2p.optim.gates import HISTORY_ROUNDS, LEAST_PARTNERS
from noloco_p2p.optim.mixing import Agreement
from noloco_p2p.outer.progress import PartnerPositions, next_progress
from noloco_p2p.outer.rounds import Rounds
from noloco_p2p.spec import RunSpec

ROUND = 0.01  # the length of a round, as a fraction of the schedule
PROGRESS = st.floats(0.0, 1.0)
NAMES = [f"peer-{number}" for number in range(20)]


def moved(claims: list[float], *, progress: float = 0.5, at_most: float = ROUND, num_live: int = 20) -> float:
    """Return by how much a peer moves that knows one claim of each of several partners."""
    partners = PartnerPositions()
    for name, claim in zip(NAMES, claims, strict=False):
        partners.note(name, claim, trained=0.0)
    return partners.move(progress, trained=0.0, at_most=at_most, num_live=num_live) - progress


@pytest.mark.parametrize(
    ("claims", "by"),
    [
        ([0.504, 0.504, 0.504], 0.004),
        ([0.504, 0.502, 0.1], 0.001),  # own voice: 0.5
        ([0.504, 0.502, 1.0, 0.503], 0.003),
        ([0.6, 0.7, 0.8], ROUND),
        ([0.0, 0.0, 0.0], -ROUND),
    ],
)
def test_a_peer_moves_to_the_median_within_one_round(claims: list[float], by: float) -> None:
    assert moved(claims) == pytest.approx(by)


@given(st.lists(st.floats(0.45, 0.55), min_size=2, max_size=7), PROGRESS)
def test_one_liar_moves_a_peer_no_further_than_an_honest_partner_could(honest: list[float], lie: float) -> None:
    by = moved([*honest, lie], at_most=1.0)
    assert min(0.5, *honest) - 1e-9 <= 0.5 + by <= max(0.5, *honest) + 1e-9


def test_a_peer_does_not_move_before_it_has_met_three_partners() -> None:
    assert [moved([0.6] * number) for number in range(LEAST_PARTNERS)] == [0.0] * LEAST_PARTNERS
    assert moved([0.6] * LEAST_PARTNERS) == pytest.approx(ROUND)


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
    for _ in range(HISTORY_ROUNDS):
        partners.note("liar", 0.9, trained=0.0)
    partners.note("c", 0.502, trained=0.0)
    target = partners.move(0.5, trained=0.0, at_most=1.0, num_live=20)
    assert target == pytest.approx(0.504)  # of 0.5, 0.502, 0.504, 0.504 and 0.9


def test_only_the_last_eight_partners_count() -> None:
    assert moved([0.9] * 8 + [0.504] * HISTORY_ROUNDS, at_most=1.0) == pytest.approx(0.004)


def test_partners_that_are_twice_as_fast_are_followed_between_their_claims() -> None:
    """After the last claims, this peer trains for three rounds, and the others for six."""
    partners = PartnerPositions()
    for trained in (0.0, ROUND):
        for name in ("a", "b", "c"):
            partners.note(name, 0.5 + 2 * trained, trained=trained)
    trained = 4 * ROUND
    target = partners.move(0.5 + trained, trained=trained, at_most=1.0, num_live=20)
    assert target == pytest.approx(0.5 + 8 * ROUND)


def test_one_liar_that_is_met_often_does_not_set_the_speed() -> None:
    """Only its speed is known, because the others have been met once."""
    partners = PartnerPositions()
    for name in ("a", "b", "c"):
        partners.note(name, 0.5, trained=0.0)
    for number in range(3):
        partners.note("liar", 0.3 * number, trained=number * ROUND)
    target = partners.move(0.5 + 3 * ROUND, trained=3 * ROUND, at_most=1.0, num_live=20)
    assert target == pytest.approx(0.5 + 3 * ROUND)


@pytest.mark.parametrize("total_steps", [7, 480, 2_000, 20_000, 60_000])
def test_the_schedule_ends_at_one_however_its_fractions_are_rounded(total_steps: int) -> None:
    progress = 0.0
    for _ in range(total_steps):
        assert progress < 1
        progress = next_progress(progress, total_steps)
    assert progress == 1.0
    assert moved([1.0, 1.0, 1.0], progress=1 - 1e-12) == pytest.approx(1e-12)


def rounds_of(steps: int) -> Rounds:
    """Return the rounds of a peer whose exchange and outer step do nothing."""
    nothing = SimpleNamespace(
        open=lambda *args, **options: None,
        late=lambda round_index: None,
        step_rate=SimpleNamespace(seconds_per_step=None, others_s=lambda now_s: (), step=lambda now_s: None),
    )
    outer_step = SimpleNamespace(step=lambda outcome, *, is_closing: (outcome, False))
    spec = RunSpec(name="rounds", outer=published(inner_steps=steps), total_steps=1000)
    return Rounds(spec, cast(Any, nothing), cast(Any, SimpleNamespace(sections=dict)), cast(Any, outer_step))


def swap(rounds: Rounds, partner: str, *, ahead: float) -> float:
    """Train for a round, swap with a partner that claims to be `ahead`, and return the move."""
    claim = rounds.progress + ahead
    rounds.open()
    while not rounds.step_taken():
        pass
    trained = rounds.progress
    own = {SectionName.SLOW_WEIGHTS: torch.zeros(4)}
    agreed = Agreement(200, weight=1.0)  # of two such rounds
    rounds.finish(
        Swapped(replace(received(own, own, agreed=agreed), partner=partner, partner_progress=claim, num_live=9))
    )
    return rounds.progress - trained


@pytest.mark.parametrize("ahead", [0.5, -0.5])
def test_a_round_moves_a_peer_by_its_own_length_at_most(ahead: float) -> None:
    rounds = rounds_of(steps=10)
    rounds.progress = 0.6
    moves = [swap(rounds, name, ahead=ahead) for name in ("a", "b", "c", "d")]
    assert moves == pytest.approx([0.0, 0.0, *[math.copysign(0.01, ahead)] * 2])


def test_after_a_restart_the_old_claims_are_forgotten() -> None:
    rounds = rounds_of(steps=10)
    for name in ("a", "b", "c"):
        swap(rounds, name, ahead=0.005)
    rounds.restart(round_index=50, progress=0.5)
    assert [swap(rounds, name, ahead=0.005) for name in ("a", "b", "c")] == pytest.approx([0.0, 0.0, 0.005])
