"""The arithmetic of the gates: what they refuse and what they clip, and that partners clip alike."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.optim.gates import (
    DistanceHistory,
    GradientHistory,
    PieceNorms,
    Pieces,
    clip_offset_,
    gate_limits,
    gradient_scales,
    offset_radius,
    shorten_longer_,
)
from noloco_p2p.spec import CodecSpec

norms = st.floats(1e-12, 1e12)


@given(norms, norms)
def test_partners_scale_the_two_gradients_alike(own: float, partner: float) -> None:
    here, there = gradient_scales(own, partner), gradient_scales(partner, own)
    assert (here.own, here.partner) == (there.partner, there.own)
    assert max(here.own, here.partner) == 1.0, "the shorter one stays as it is"
    assert partner * here.partner <= 2 * own * (1 + 1e-12), "no partner weighs more than twice oneself"


@pytest.mark.parametrize(("partner", "is_refused"), [(0.0, False), (19.9, False), (20.1, True), (math.inf, True)])
def test_ten_times_the_usual_gradient_is_refused_in_words(partner: float, is_refused: bool) -> None:
    history = GradientHistory()
    for own in (1.0, 2.0, 3.0):
        history.note(own)
    refusal = history.refusal(2.0, partner)
    assert bool(refusal) is is_refused
    assert not is_refused or "outer gradient" in refusal
    assert not history.refusal(2.0, partner, times_longer=9.0) or math.isinf(partner), "9 times the inner steps"


def test_a_short_round_of_the_partner_is_measured_like_one_of_the_own_length() -> None:
    history = GradientHistory()
    history.note(1.0)
    assert not history.refusal(1.0, 9.9, times_longer=0.1)
    assert history.refusal(1.0, 10.1, times_longer=0.1)


def test_a_norm_that_is_no_number_is_refused() -> None:
    assert "not finite" in GradientHistory().refusal(1.0, math.nan)


def test_one_spike_of_the_own_gradient_opens_no_gate() -> None:
    history = GradientHistory()
    for own in (1.0, 1.0, 1.0, 1000.0):
        history.note(own)
    assert history.refusal(1.0, 11.0)


@given(st.floats(0, 1e6), st.floats(1e-6, 3e38))
def test_an_offset_is_never_longer_than_its_radius(radius: float, size: float) -> None:
    offset = torch.tensor([size, -size / 2])
    direction = offset / offset.norm() if math.isfinite(float(offset.norm())) else None
    norm, kept = clip_offset_(offset, radius)
    assert kept <= radius
    # In float64, as the squares of such small values underflow in fp32; with a tolerance of the smallest number.
    assert float(offset.double().norm()) <= radius * 1.0001 + 2.0**-148
    if kept < norm and direction is not None and radius > 1e-3:
        assert torch.allclose(offset / offset.norm(), direction, atol=1e-3), "shortened, not turned"


def test_an_honest_offset_keeps_its_bits() -> None:
    offset = torch.randn(100, generator=torch.Generator().manual_seed(1))
    before = offset.clone()
    norm, kept = clip_offset_(offset, float(before.norm()) * 1.01)
    assert norm == kept
    assert torch.equal(offset, before)


def test_without_a_late_part_offsets_may_be_as_long_as_the_own_gradient() -> None:
    for gradient, radius in (("int4", 2.0), ("none", 4.0)):
        limits = gate_limits(CodecSpec.model_validate({"outer_gradient": gradient}))
        assert offset_radius(usual=0.1, own_gradient=4.0, limits=limits) == radius


def test_a_liar_in_one_swap_of_three_does_not_move_the_radius() -> None:
    offsets = PieceNorms(1)
    for round_index in range(60):
        radius = offset_radius(usual=offsets.usual()[0], own_gradient=4.0)
        _, kept = clip_offset_(torch.tensor([1e9 if round_index % 3 == 2 else 1.0]), radius)
        offsets.note([kept])
    assert offsets.usual() == [1.0]


def test_a_liar_in_every_swap_gets_no_further_than_twice_the_own_gradient() -> None:
    offsets = PieceNorms(1)
    radii = []
    for _ in range(60):
        radii.append(offset_radius(usual=offsets.usual()[0], own_gradient=1.0))
        _, kept = clip_offset_(torch.tensor([1e9]), radii[-1])
        offsets.note([kept])
    assert radii[0] == 0.5
    assert max(radii) == radii[-1] == 2.0


def test_pieces_are_the_tensors_cut_at_the_chunks() -> None:
    pieces = Pieces([3, 0, 9, 4], [(0, 8), (8, 16)])
    assert pieces.num_pieces == 4
    assert pieces.in_chunk == [[(0, slice(0, 3)), (1, slice(3, 8))], [(2, slice(0, 4)), (3, slice(4, 8))]]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 16))
def test_every_element_is_in_exactly_one_piece(sizes: list[int], chunk: int) -> None:
    total = sum(sizes)
    chunks = [(start, min(start + chunk, total)) for start in range(0, total, chunk)]
    pieces = Pieces(sizes, chunks)
    seen = [number for number, _ in (piece for each in pieces.in_chunk for piece in each)]
    assert seen == list(range(pieces.num_pieces))
    covered = [
        start + offset
        for (start, _), each in zip(chunks, pieces.in_chunk, strict=True)
        for _, place in each
        for offset in range(place.start, place.stop)
    ]
    assert covered == list(range(total))


@given(norms, norms)
def test_partners_shorten_a_piece_alike(own: float, partner: float) -> None:
    here, there = (
        [torch.tensor([0.0, norm], dtype=torch.float64) for norm in both] for both in ((own, partner), (partner, own))
    )
    shorten_longer_(*here)
    shorten_longer_(*there)
    assert torch.equal(torch.stack(here), torch.stack(there[::-1]))
    assert float(here[1].norm()) <= 4 * own * (1 + 1e-12)


# distance


def refusals(history: DistanceHistory, partners: list[tuple[str, float]], *, own_gradient: float = 1.0) -> list[bool]:
    return [bool(history.refusal(partner, distance, own_gradient=own_gradient)) for partner, distance in partners]


def test_one_far_partner_is_refused_however_often_it_is_met() -> None:
    history = DistanceHistory()
    near = [(f"near{number}", 1.0) for number in range(4)]
    assert not any(refusals(history, near))
    assert all(refusals(history, [("far", 10.0), ("far", 10.0), near[0], ("far", 10.0)])[index] for index in (0, 1, 3))
    assert not any(refusals(history, near))


def test_far_partners_are_let_in_when_as_many_were_met_as_near_ones() -> None:
    """This is how two islands merge."""
    history = DistanceHistory()
    refusals(history, [(f"near{number}", 1.0) for number in range(3)])
    assert refusals(history, [(f"far{number}", 10.0) for number in range(5)]) == [True, True, False, False, False]


def test_with_two_partners_nobody_can_tell_who_is_far() -> None:
    assert not any(refusals(DistanceHistory(), [("a", 1.0), ("b", 1000.0)] * 5))


def test_what_training_itself_moves_is_never_far() -> None:
    assert not any(refusals(DistanceHistory(), [(f"peer{number}", 0.0) for number in range(5)] + [("other", 1.9)]))
