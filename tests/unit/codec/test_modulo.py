"""Modulo coding recovers half-differences from residues; those of partners are exactly opposite, and no side misses a
difference beyond the bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noloco_p2p.codec import CHUNK_ELEMENTS
from noloco_p2p.codec.dither import fill_dither
from noloco_p2p.codec.modulo import (
    BLOCK_ELEMENTS,
    DIGEST_BYTES,
    EIGHT_BITS,
    FOUR_BITS,
    OFF_GRID,
    SIX_BITS,
    Grid,
    ModuloCodec,
)
from noloco_p2p.errors import CorruptPayload

BY_NEED = (FOUR_BITS, SIX_BITS, EIGHT_BITS)
seeds = st.integers(0, 2**64 - 1)
LENGTHS = [
    1,
    2,
    3,
    5,
    15,
    600,
    BLOCK_ELEMENTS - 1,
    BLOCK_ELEMENTS,
    BLOCK_ELEMENTS + 1,
    CHUNK_ELEMENTS - 1,
    CHUNK_ELEMENTS,
]


def one_grid(exponent: int, *, num_elements: int, seed: int = 1) -> Grid:
    return Grid((exponent,) * -(-num_elements // BLOCK_ELEMENTS), seed)


def swap(own: Tensor, partner: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
    """Return h of both sides, each computed from what that side knows; None when both see the chunk broken."""

    def received(mine: Tensor, theirs: Tensor) -> Tensor | None:
        payload = FOUR_BITS.encode(theirs, grid=grid)
        assert len(payload) == FOUR_BITS.num_bytes(len(theirs))
        apart = FOUR_BITS.differences(mine, payload, grid=grid)
        if apart is None:
            return None
        return FOUR_BITS.half_difference(apart, num_elements=len(mine), grid=grid)

    left, right = received(own, partner), received(partner, own)
    assert (left is None) == (right is None), "only one side sees the breakage"
    if left is None or right is None:
        return None
    return left, right


def must_swap(own: Tensor, partner: Tensor, grid: Grid) -> Tensor:
    both = swap(own, partner, grid)
    assert both is not None, "a pair within the bound is broken"
    left, right = both
    assert left.dtype == torch.float32
    assert torch.equal(left, -right)
    return left


def dither_of(num_elements: int, seed: int) -> Tensor:
    dither = torch.empty(num_elements)
    fill_dither(dither, scratch=torch.empty(num_elements, dtype=torch.int32), seed=seed, block_index=0)
    return dither


def integers(values: Tensor, step: float, seed: int) -> Tensor:
    return (values.double() / step + dither_of(len(values), seed).double()).float().round()


@settings(deadline=None, max_examples=300)
@given(seed=seeds, exponent=st.integers(-20, 20), data=st.data())
def test_broken_exactly_when_integers_are_half_a_range_apart(seed: int, exponent: int, data: st.DataObject) -> None:
    """Values are in eighths of a step and partners whole steps apart, so their integers are equally far apart.

    fp32 ties may move an integer by one.
    """
    half, step = FOUR_BITS.half_range, 2.0**exponent
    near = st.integers(1 - half, half - 1)
    edges = st.sampled_from([1 - half, half - 1, -half, half, half + 1, -half - 1, 2 * half, -2 * half, 6 * half])
    apart = data.draw(st.lists(near, min_size=1, max_size=40))
    for place in data.draw(st.lists(st.integers(0, len(apart) - 1), max_size=2)):
        apart[place] = data.draw(edges)
    eighths = data.draw(st.lists(st.integers(-30_000, 30_000), min_size=len(apart), max_size=len(apart)))
    own = torch.tensor(eighths) * (step / 8)
    partner = own + torch.tensor(apart) * step
    both = swap(own, partner, one_grid(exponent, num_elements=len(apart), seed=seed))
    exact = integers(partner, step, seed) - integers(own, step, seed)
    assert (exact - torch.tensor(apart)).abs().max() <= 1
    if (exact.abs() >= half).any():
        assert both is None
    else:
        assert both is not None
        assert torch.equal(both[0], exact * (step / 2))
        assert torch.equal(both[1], -both[0])


@settings(deadline=None, max_examples=200)
@given(seed=seeds, num_elements=st.integers(1, 300), exponent=st.integers(-30, 30))
def test_any_pair_within_the_bound_verifies_and_h_is_within_half_a_step(
    seed: int, num_elements: int, exponent: int
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    step = 2.0**exponent
    own = torch.randn(num_elements, generator=generator) * 1000 * step
    bound = (FOUR_BITS.half_range - 1.01) * step  # rounding adds less than one step
    partner = own + (torch.rand(num_elements, generator=generator) * 2 - 1) * bound
    h = must_swap(own, partner, one_grid(exponent, num_elements=num_elements, seed=seed))
    exact = (partner.double() - own.double()) / 2
    assert ((h.double() - exact).abs() <= step / 2 * 1.001).all()


@settings(deadline=None, max_examples=200)
@given(seed=seeds, data=st.data())
def test_coding_moves_a_value_by_half_a_step_at_most(seed: int, data: st.DataObject) -> None:
    """Q(x) = (k - dither) * step. The integers of a partner of zeros are 0, so the differences are k."""
    in_range = st.floats(2.0 - FOUR_BITS.half_range, FOUR_BITS.half_range - 2.0, width=32)
    values = torch.tensor(data.draw(st.lists(in_range, min_size=1, max_size=100)))
    grid = one_grid(-4, num_elements=len(values), seed=seed)
    exact = (values * 2.0**-4).double()
    differences = must_swap(torch.zeros(len(values)), values * 2.0**-4, grid).double() * 2 / 2.0**-4
    coded = (differences - dither_of(len(values), seed).double()) * 2.0**-4
    assert ((coded - exact).abs() <= 2.0**-5 + 2.0**-24 * (exact.abs() + 2.0**-4)).all()


def test_half_differences_are_unbiased_over_swaps() -> None:
    own, apart = torch.linspace(-40, 40, 161), torch.linspace(-3.3, 3.3, 161)
    swaps = [must_swap(own, own + apart, one_grid(0, num_elements=161, seed=seed)).double() for seed in range(2000)]
    mean = torch.stack(swaps).mean(dim=0)
    standard_error = 0.25 / 2000**0.5  # h takes one of two values half a step apart
    assert ((mean - apart.double() / 2).abs() < 5 * standard_error).all()


def test_every_block_has_its_own_step_and_one_broken_element_breaks_the_chunk() -> None:
    grid = Grid((-10, -5, 0, 4), seed=3)
    steps = torch.cat([torch.full((BLOCK_ELEMENTS,), 2.0**e) for e in (-10, -5, 0, 4)])
    own = torch.linspace(-3, 3, CHUNK_ELEMENTS)
    partner = own + 5 * steps
    halves = must_swap(own, partner, grid) / steps
    assert (halves - 2.5).abs().max() <= 0.5
    assert (halves == 2.5).float().mean() > 0.999  # except where fp32 rounds a value of that many steps
    partner[-1] += (FOUR_BITS.half_range + 8) * 16.0
    assert swap(own, partner, grid) is None


def test_equal_values_have_no_difference() -> None:
    own = torch.randn(1000)
    assert not must_swap(own, own.clone(), one_grid(-12, num_elements=1000)).any()


def test_peers_on_other_grids_see_it() -> None:
    own = torch.randn(500)
    payload = FOUR_BITS.encode(own, grid=one_grid(-6, num_elements=500, seed=1))
    for other in (one_grid(-5, num_elements=500, seed=1), one_grid(-6, num_elements=500, seed=2)):
        assert FOUR_BITS.differences(own, payload, grid=other) is None


@pytest.mark.parametrize("steps", [2.0**31, -(2.0**31), 2.0**70, 1.1 * 2.0**30])
def test_a_value_too_large_for_the_grid_breaks_the_chunk_on_both_sides(steps: float) -> None:
    own = torch.zeros(100)
    own[40] = steps * 2.0**-60
    grid = one_grid(-60, num_elements=100)
    payload = FOUR_BITS.encode(own, grid=grid)
    assert len(payload) == FOUR_BITS.num_bytes(100)
    assert payload[-DIGEST_BYTES:] == OFF_GRID
    assert swap(own, torch.zeros(100), grid) is None
    assert swap(own, own.clone(), grid) is None


def test_large_integers_are_exact_up_to_the_limit() -> None:
    own = torch.tensor([2.0**30, -(2.0**30), 2.0**29 + 64.0])
    assert not must_swap(own, own.clone(), one_grid(0, num_elements=3)).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_named(bad: float) -> None:
    values = torch.full((BLOCK_ELEMENTS + 300,), 2.0**40)  # also too large for the grid
    values[BLOCK_ELEMENTS + 270] = bad
    grid = one_grid(0, num_elements=len(values))
    payload = FOUR_BITS.encode(torch.zeros(len(values)), grid=grid)
    for refuse in (
        lambda: FOUR_BITS.encode(values, grid=grid),
        lambda: FOUR_BITS.differences(values, payload, grid=grid),
    ):
        with pytest.raises(ValueError, match=f"element {BLOCK_ELEMENTS + 270} of {len(values)} is .*not finite"):
            refuse()


def test_what_is_no_chunk_or_has_another_grid_is_refused() -> None:
    for values in (torch.ones(2, 2), torch.ones(6)[::2], torch.ones(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="chunk"):
            FOUR_BITS.encode(values, grid=one_grid(0, num_elements=3))
    for num_elements in (1, CHUNK_ELEMENTS):
        with pytest.raises(ValueError, match=r"shorter|longer"):
            FOUR_BITS.encode(torch.ones(num_elements), grid=one_grid(0, num_elements=BLOCK_ELEMENTS + 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_float_dtypes_are_coded_like_their_fp32_values(dtype: torch.dtype) -> None:
    values = torch.randn(300).to(dtype)
    before = values.clone()
    grid = one_grid(-5, num_elements=300)
    assert FOUR_BITS.encode(values, grid=grid) == FOUR_BITS.encode(values.float(), grid=grid)
    assert torch.equal(values, before)


# by need: more bits of a broken chunk follow


def swap_by_need(own: Tensor, partner: Tensor, grid: Grid) -> tuple[ModuloCodec, Tensor, Tensor] | None:
    """Return the codec that carried the chunk, and h of both sides; None when the difference exceeds eight bits."""
    earlier = {"own": b"", "partner": b""}
    for codec in BY_NEED:
        sides = {"own": (own, partner), "partner": (partner, own)}
        payloads = {side: codec.encode(theirs, grid=grid) for side, (_, theirs) in sides.items()}
        apart = {
            side: codec.differences(mine, payloads[side], grid=grid, earlier=earlier[side])
            for side, (mine, _) in sides.items()
        }
        assert (apart["own"] is None) == (apart["partner"] is None), "only one side sees the breakage"
        halves = [
            codec.half_difference(each, num_elements=len(own), grid=grid) for each in apart.values() if each is not None
        ]
        if halves:
            ours, theirs = halves
            return codec, ours, theirs
        earlier = {side: earlier[side] + payloads[side] for side in sides}
    return None


@settings(deadline=None, max_examples=300)
@given(seed=seeds, exponent=st.integers(-20, 20), data=st.data())
def test_the_first_codec_that_reaches_carries_a_chunk_exactly(seed: int, exponent: int, data: st.DataObject) -> None:
    step = 2.0**exponent
    reach = data.draw(st.sampled_from([7, 8, 31, 32, 127, 128, 300]))
    apart = data.draw(st.lists(st.integers(-reach, reach), min_size=1, max_size=40))
    apart[data.draw(st.integers(0, len(apart) - 1))] = data.draw(st.sampled_from([reach, -reach]))
    eighths = data.draw(st.lists(st.integers(-30_000, 30_000), min_size=len(apart), max_size=len(apart)))
    own = torch.tensor(eighths) * (step / 8)
    partner = own + torch.tensor(apart) * step
    both = swap_by_need(own, partner, one_grid(exponent, num_elements=len(apart), seed=seed))
    exact = integers(partner, step, seed) - integers(own, step, seed)
    reached = [codec for codec in BY_NEED if exact.abs().max() < codec.half_range]
    if both is None:
        assert not reached
        return
    codec, ours, theirs = both
    assert codec is reached[0]
    assert torch.equal(ours, exact * (step / 2))
    assert torch.equal(theirs, -ours)


@pytest.mark.parametrize("num_elements", LENGTHS)
@pytest.mark.parametrize("codec", BY_NEED, ids=lambda codec: f"{codec.known_bits} bits")
def test_any_length_by_need(codec: ModuloCodec, num_elements: int) -> None:
    own = torch.sin(torch.arange(num_elements, dtype=torch.float32))
    partner = own + torch.cos(torch.arange(num_elements, dtype=torch.float32) * 1.7) / 64
    partner[num_elements // 2] = own[num_elements // 2] + (codec.half_range - 2) * 2.0**-8  # just within its range
    both = swap_by_need(own, partner, one_grid(-8, num_elements=num_elements))
    assert both is not None
    assert both[0] is codec
    assert torch.equal(both[1], -both[2])
    assert ((both[1] - (partner - own) / 2).abs() <= 2.0**-9 * 1.001).all()


@pytest.mark.parametrize("codec", BY_NEED, ids=lambda codec: f"{codec.known_bits} bits")
@pytest.mark.parametrize("excess", [-1, 1])
def test_every_other_length_is_refused_by_need(codec: ModuloCodec, excess: int) -> None:
    own, grid = torch.ones(9), one_grid(0, num_elements=9)
    earlier = b"".join(each.encode(own, grid=grid) for each in BY_NEED[: BY_NEED.index(codec)])
    with pytest.raises(CorruptPayload, match=f"must have {codec.num_bytes(9)} bytes"):
        codec.differences(own, bytes(codec.num_bytes(9) + excess), grid=grid, earlier=earlier)


@pytest.mark.parametrize("codec", BY_NEED, ids=lambda codec: f"{codec.known_bits} bits")
def test_every_flipped_bit_that_counts_is_seen_by_need(codec: ModuloCodec) -> None:
    own, grid = torch.randn(260), one_grid(-6, num_elements=260)
    payloads = [each.encode(own, grid=grid) for each in BY_NEED[: BY_NEED.index(codec) + 1]]
    flipped, earlier = bytearray(payloads[-1]), b"".join(payloads[:-1])
    for position in range(len(flipped)):
        flipped[position] ^= 1
        assert codec.differences(own, bytes(flipped), grid=grid, earlier=earlier) is None
        flipped[position] ^= 1
    assert codec.differences(own, bytes(flipped), grid=grid, earlier=earlier) is not None


def test_bytes_a_parameter_by_need() -> None:
    sizes = [codec.num_bytes(CHUNK_ELEMENTS) for codec in BY_NEED]
    assert sizes == [CHUNK_ELEMENTS * bits // 8 + DIGEST_BYTES for bits in (4, 2, 2)]
    assert [codec.num_bytes(5) for codec in BY_NEED] == [19, 18, 18]
    with pytest.raises(ValueError, match=f"not {CHUNK_ELEMENTS + 1}"):
        FOUR_BITS.num_bytes(CHUNK_ELEMENTS + 1)


def test_a_value_too_large_for_the_grid_is_broken_at_any_number_of_bits() -> None:
    own = torch.zeros(100)
    own[40] = 1.0
    assert swap_by_need(own, torch.zeros(100), one_grid(-60, num_elements=100)) is None
