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
LENGTHS = [1, 2, 3, 5, 15, 600, *(BLOCK_ELEMENTS + d for d in (-1, 0, 1)), CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS]
each_codec = pytest.mark.parametrize("codec", BY_NEED, ids=lambda codec: f"{codec.known_bits} bits")


def one_grid(exponent: int, *, num_elements: int, seed: int = 1) -> Grid:
    return Grid((exponent,) * -(-num_elements // BLOCK_ELEMENTS), seed)


def swap(own: Tensor, partner: Tensor, grid: Grid) -> tuple[ModuloCodec, Tensor, Tensor] | None:
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


def must_swap(own: Tensor, partner: Tensor, grid: Grid) -> Tensor:
    """Swap with four bits, and return h."""
    both = swap(own, partner, grid)
    assert both is not None, "a pair within the bound is broken"
    codec, left, right = both
    assert codec is FOUR_BITS
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
def test_the_first_codec_that_reaches_carries_a_chunk_exactly(seed: int, exponent: int, data: st.DataObject) -> None:
    step = 2.0**exponent
    reach = data.draw(st.sampled_from([7, 8, 31, 32, 127, 128, 300]))
    apart = data.draw(st.lists(st.integers(-reach, reach), min_size=1, max_size=40))
    apart[data.draw(st.integers(0, len(apart) - 1))] = data.draw(st.sampled_from([reach, -reach]))
    eighths = data.draw(st.lists(st.integers(-30_000, 30_000), min_size=len(apart), max_size=len(apart)))
    own = torch.tensor(eighths) * (step / 8)
    partner = own + torch.tensor(apart) * step
    both = swap(own, partner, one_grid(exponent, num_elements=len(apart), seed=seed))
    exact = integers(partner, step, seed) - integers(own, step, seed)
    reached = [codec for codec in BY_NEED if exact.abs().max() < codec.half_range]
    if both is None:
        assert not reached
        return
    codec, ours, theirs = both
    assert codec is reached[0]
    assert torch.equal(ours, exact * (step / 2))
    assert torch.equal(theirs, -ours)


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
    partner[-1] += (EIGHT_BITS.half_range + 8) * 16.0
    assert swap(own, partner, grid) is None


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
    assert len(payload) == FOUR_BITS.num_bytes((100,))
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


def test_a_grid_of_another_size_is_refused() -> None:
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


@pytest.mark.parametrize("num_elements", LENGTHS)
@each_codec
def test_any_length(codec: ModuloCodec, num_elements: int) -> None:
    own = torch.sin(torch.arange(num_elements, dtype=torch.float32))
    partner = own + torch.cos(torch.arange(num_elements, dtype=torch.float32) * 1.7) / 64
    partner[num_elements // 2] = own[num_elements // 2] + (codec.half_range - 2) * 2.0**-8  # just within its range
    both = swap(own, partner, one_grid(-8, num_elements=num_elements))
    assert both is not None
    assert both[0] is codec
    assert torch.equal(both[1], -both[2])
    assert ((both[1] - (partner - own) / 2).abs() <= 2.0**-9 * 1.001).all()


@each_codec
@pytest.mark.parametrize("excess", [-1, 1])
def test_every_other_length_is_refused(codec: ModuloCodec, excess: int) -> None:
    own, grid = torch.ones(9), one_grid(0, num_elements=9)
    earlier = b"".join(each.encode(own, grid=grid) for each in BY_NEED[: BY_NEED.index(codec)])
    with pytest.raises(CorruptPayload, match=f"must have {codec.num_bytes((9,))} bytes"):
        codec.differences(own, bytes(codec.num_bytes((9,)) + excess), grid=grid, earlier=earlier)


@each_codec
def test_every_flipped_bit_that_counts_is_seen(codec: ModuloCodec) -> None:
    own, grid = torch.randn(260), one_grid(-6, num_elements=260)
    payloads = [each.encode(own, grid=grid) for each in BY_NEED[: BY_NEED.index(codec) + 1]]
    flipped, earlier = bytearray(payloads[-1]), b"".join(payloads[:-1])
    for position in range(len(flipped)):
        flipped[position] ^= 1
        assert codec.differences(own, bytes(flipped), grid=grid, earlier=earlier) is None
        flipped[position] ^= 1
    assert codec.differences(own, bytes(flipped), grid=grid, earlier=earlier) is not None


def test_bytes_a_parameter() -> None:
    sizes = [codec.num_bytes((CHUNK_ELEMENTS,)) for codec in BY_NEED]
    assert sizes == [CHUNK_ELEMENTS * bits // 8 + DIGEST_BYTES for bits in (4, 2, 2)]
    assert [codec.num_bytes((5,)) for codec in BY_NEED] == [19, 18, 18]
