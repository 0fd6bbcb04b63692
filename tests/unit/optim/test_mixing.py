"""Strengths that follow the round length: the tried settings, inside every bound, the same for both partners."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.optim.halves import half_difference
from noloco_p2p.optim.mixing import ROWS, Mixing, agreed_inner_steps, closing_rounds, mixing_for
from noloco_p2p.optim.noloco import outer_step
from noloco_p2p.spec import OuterSpec

STEPS = st.integers(1, 10_000)
UINT64 = st.integers(0, 2**64 - 1)
LENGTHS = [0.0, 0.5, *(5 * 1.01**k for k in range(400))]


@pytest.mark.parametrize(
    ("inner_steps", "expected"),
    [
        (1, (0, 1, 1)),
        (5, (0, 1, 1)),
        (10, (0.2, 1.0, 0.96)),
        (50, (0.5, 0.7, 0.7)),
        (200, (0.5, 0.7, 0.7)),
    ],
)
def test_the_tried_settings(inner_steps: int, expected: tuple[float, float, float]) -> None:
    mixing = mixing_for(inner_steps)
    assert (mixing.alpha, mixing.beta, mixing.gamma) == expected


@given(UINT64, UINT64)
def test_whatever_two_peers_tell_is_stable_and_near_the_best(one: int, other: int) -> None:
    mixing = mixing_for(agreed_inner_steps(one, other))
    best = 1 - mixing.alpha**2
    assert best - 0.055 <= mixing.gamma <= best + 1e-12
    for swap_momentum in (True, False):  # raises at or above the bound
        OuterSpec(alpha=mixing.alpha, beta=mixing.beta, gamma=mixing.gamma, swap_momentum=swap_momentum)


@pytest.mark.parametrize(("num_peers", "expected"), [(1, 0), (2, 4), (3, 5), (8, 6), (1000, 13)])
def test_closing_rounds_grow_with_the_logarithm_of_the_swarm(num_peers: int, expected: int) -> None:
    assert closing_rounds(OuterSpec(), num_peers) == expected
    assert closing_rounds(OuterSpec(closing_rounds=2), num_peers) == 2


def test_longer_rounds_have_more_momentum_and_weaker_steps_without_a_jump() -> None:
    for before, after in pairwise(mixing_for(length) for length in LENGTHS):
        assert 0 <= after.alpha - before.alpha < 0.005
        assert 0 <= before.beta - after.beta < 0.005
        assert 0 <= before.gamma - after.gamma < 0.005


def test_the_rows_are_met_from_both_sides() -> None:
    for length, mixing in ROWS:
        for near in (length * (1 - 1e-12), length * (1 + 1e-12)):
            found = mixing_for(near)
            assert (found.alpha, found.beta, found.gamma) == pytest.approx((mixing.alpha, mixing.beta, mixing.gamma))


@given(UINT64, UINT64)
def test_both_partners_agree_bit_for_bit(one: int, other: int) -> None:
    assert agreed_inner_steps(one, other) == agreed_inner_steps(other, one)


@given(STEPS)
def test_rounds_of_one_length_are_agreed_as_they_are(inner_steps: int) -> None:
    assert agreed_inner_steps(inner_steps, inner_steps) == inner_steps


@given(STEPS, STEPS, st.integers(0, 2**32), st.booleans())
@settings(max_examples=60, deadline=None)
def test_partners_with_rounds_of_other_lengths_keep_their_mean(one: int, other: int, seed: int, is_late: bool) -> None:
    """What the swap adds to the two is opposite: the same strengths on both sides, whoever has the longer round."""
    generator = torch.Generator().manual_seed(seed)
    sides = [torch.randn(3, 64, generator=generator) for _ in range(2)]
    added = []
    for (own, own_steps), (partner, partner_steps) in (
        ((sides[0], one), (sides[1], other)),
        ((sides[1], other), (sides[0], one)),
    ):
        mixing = mixing_for(agreed_inner_steps(own_steps, partner_steps))
        added.append(with_swap(own, partner, mixing, is_late=is_late) - with_swap(own, None, mixing, is_late=is_late))
    assert added[0].abs().max() > 0.01
    torch.testing.assert_close(added[0], -added[1], atol=3e-6, rtol=0)


def with_swap(own: torch.Tensor, partner: torch.Tensor | None, mixing: Mixing, *, is_late: bool) -> torch.Tensor:
    """Slow weights and momentum after an outer step; with `is_late` the gradient's half comes as a correction."""
    slow, momentum, gradient = (row.clone() for row in own)
    offset, late = None, torch.zeros_like(slow)
    if partner is not None:
        offset, momentum_half, gradient_half = (half_difference(a, b) for a, b in zip(own, partner, strict=True))
        momentum.add_(momentum_half)
        if is_late:
            late = mixing.beta * gradient_half
        else:
            gradient.add_(gradient_half)
    outer_step(slow, momentum, gradient, offset, alpha=mixing.alpha, beta=mixing.beta, gamma=mixing.gamma)
    return torch.stack((slow + late, momentum + late))
