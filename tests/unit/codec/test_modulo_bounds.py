"""The grid follows from the distances of the last swaps and a margin; partners agree on the coarser proposal."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noloco_p2p.codec.dither import dither_seed
from noloco_p2p.codec.modulo import (
    BLOCK_ELEMENTS,
    BLOCKS_A_CHUNK,
    FOUR_BITS,
    MODULO4,
    MODULO8,
    MOST_HALVINGS,
    REMEMBERED,
    STEP_OVER_DISTANCE,
    UNKNOWN,
    Bounds,
    Grid,
    ModuloCodec,
    agree,
    num_blocks,
)
from noloco_p2p.errors import CorruptPayload
from noloco_p2p.optim.noloco import outer_step

each_codec = pytest.mark.parametrize("codec", [MODULO8, MODULO4], ids=lambda codec: codec.name)
exponents = st.sampled_from([UNKNOWN, *range(-100, 101)])


def signed(proposal: bytes) -> list[int]:
    return memoryview(proposal).cast("b").tolist()


def seen(bounds: Bounds, distance: float, *, value: float = 1.0, num_elements: int = 10) -> list[int]:
    """Return the proposal after a swap with a partner at this distance."""
    half = torch.zeros(num_elements)
    half[-1] = -distance / 2
    bounds.update(0, half_difference=half, values=torch.full((num_elements,), -value))
    return signed(bounds.propose())


@each_codec
@given(distance=st.floats(1e-6, 1e6))
def test_the_step_is_the_power_of_two_above_what_the_margin_needs(codec: ModuloCodec, distance: float) -> None:
    (exponent,) = seen(Bounds(10, codec=codec), distance, value=0.0)
    assert codec.margin is not None
    needed = codec.margin * distance / (codec.half_range - 1)
    assert needed * 0.999999 <= 2.0**exponent <= 2.000001 * needed


def test_nothing_is_known_before_a_swap_nor_from_equal_peers() -> None:
    bounds = Bounds(10, codec=MODULO8)
    assert signed(bounds.propose()) == [UNKNOWN]
    assert seen(bounds, 0.0) == [UNKNOWN]
    assert seen(bounds, 0.127) != [UNKNOWN]
    assert seen(bounds, 0.0) != [UNKNOWN]


def test_the_largest_of_the_last_swaps_counts_and_is_forgotten() -> None:
    bounds = Bounds(10, codec=MODULO8)
    far = seen(bounds, 1.0)
    for _ in range(REMEMBERED - 1):
        assert seen(bounds, 1e-3) == far
    assert seen(bounds, 1e-3) < far


def test_a_grid_is_not_finer_than_fp32_and_not_out_of_range() -> None:
    assert seen(Bounds(10, codec=MODULO8), 1e-30, value=1.0) == [1 - 24]
    assert seen(Bounds(10, codec=MODULO8), 1e-35, value=0.0) == [-100]
    assert seen(Bounds(10, codec=MODULO8), 1e35) == [UNKNOWN]


def test_blocks_and_chunks_are_kept_apart() -> None:
    num_elements = BLOCKS_A_CHUNK * BLOCK_ELEMENTS + BLOCK_ELEMENTS + 5
    bounds = Bounds(num_elements, codec=MODULO8)
    half = torch.cat([torch.full((BLOCK_ELEMENTS,), 0.1), torch.full((5,), 0.2)])
    bounds.update(1, half_difference=half, values=half)
    proposal = signed(bounds.propose())
    assert len(proposal) == num_blocks(num_elements) == BLOCKS_A_CHUNK + 2
    assert proposal[:BLOCKS_A_CHUNK] == [UNKNOWN] * BLOCKS_A_CHUNK
    assert proposal[-1] == proposal[-2] + 1


@given(pairs=st.lists(st.tuples(exponents, exponents), max_size=50))
def test_both_sides_agree_on_the_coarser_step(pairs: list[tuple[int, int]]) -> None:
    own, partner = (bytes(pair[side] & 0xFF for pair in pairs) for side in (0, 1))
    assert agree(own, partner) == agree(partner, own)
    assert signed(agree(own, partner)) == [max(pair) for pair in pairs]  # UNKNOWN is above every exponent


@given(pairs=st.lists(st.tuples(exponents, exponents), max_size=50))
def test_by_need_both_sides_agree_on_the_finer_step_that_either_knows(pairs: list[tuple[int, int]]) -> None:
    own, partner = (bytes(pair[side] & 0xFF for pair in pairs) for side in (0, 1))
    assert agree(own, partner, by_need=True) == agree(partner, own, by_need=True)
    assert signed(agree(own, partner, by_need=True)) == [min(pair) for pair in pairs]


@given(distance=st.floats(1e-6, 1e6))
def test_by_need_the_step_is_about_as_long_as_the_last_distance(distance: float) -> None:
    bounds = Bounds(100, codec=FOUR_BITS)
    seen(bounds, 1e3 * distance, value=0.0, num_elements=100)
    (exponent,) = seen(bounds, distance, value=0.0, num_elements=100)  # one of 100 numbers is that far away
    ratio = 2.0**exponent / (distance / 10)
    assert STEP_OVER_DISTANCE * 0.999999 <= ratio <= 2 * STEP_OVER_DISTANCE * 1.000001


def test_by_need_each_round_alone_halves_the_step_and_the_most_is_known() -> None:
    bounds = Bounds(10, codec=FOUR_BITS)
    bounds.begin_swap(4)
    (usual,) = seen(bounds, 1.0)
    for alone, halvings in ((0, 0), (1, 1), (2, 2), (30, MOST_HALVINGS)):
        bounds.begin_swap(5 + alone)
        assert signed(bounds.propose()) == [usual - halvings]
    assert seen(bounds, 1.0) == [usual], "a swap has ended the rounds alone"
    coarse = Bounds(10, codec=MODULO8)
    usual = seen(coarse, 1.0)
    coarse.begin_swap(9)
    assert signed(coarse.propose()) == usual


def test_by_need_nothing_is_known_from_equal_peers_or_from_what_overflows() -> None:
    bounds = Bounds(10, codec=FOUR_BITS)
    assert signed(bounds.propose()) == [UNKNOWN]
    assert seen(bounds, 0.0) == [UNKNOWN]
    assert seen(bounds, 1e35) == [UNKNOWN]
    assert seen(bounds, 0.1) != [UNKNOWN]


@pytest.mark.parametrize("strange", [-128, -101, 101, 126])
def test_an_exponent_that_no_peer_proposes_is_refused(strange: int) -> None:
    with pytest.raises(CorruptPayload, match=f"grid step of 2\\*\\*{strange}, which is out of range$"):
        agree(bytes(2), bytes([0, strange & 0xFF]))


def test_a_proposal_of_another_length_is_refused() -> None:
    with pytest.raises(CorruptPayload, match="a grid of 3 blocks, but the section has 2"):
        agree(bytes(2), bytes(3))


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), spread=st.floats(1e-5, 10.0))
def test_a_partner_within_the_margin_is_never_broken(seed: int, spread: float) -> None:
    assert MODULO8.margin is not None
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(500, generator=generator)
    half = torch.randn(500, generator=generator) * spread / 2
    bounds = Bounds(500, codec=MODULO8)
    bounds.update(0, half_difference=half, values=own)
    grid = Grid(agree(bounds.propose(), bounds.propose()), seed)
    partner = own + (torch.rand(500, generator=generator) * 2 - 1) * half.abs().max() * 2 * MODULO8.margin * 0.999
    payload = MODULO8.encode(partner, grid=grid, chunk_index=0)
    assert MODULO8.differences(own, payload, grid=grid, chunk_index=0) is not None


class Replicas:
    """Eight replicas that drift apart by noise and mix in random pairs, as in the outer step but without a model."""

    def __init__(self, *, num_elements: int = BLOCK_ELEMENTS // 2, num_replicas: int = 8) -> None:
        self._generator = torch.Generator().manual_seed(5)
        self._scale = torch.exp(0.7 * self._noise(num_elements)) * 1e-3  # heavy-tailed, as real outer gradients are
        start = self._noise(num_elements) * 0.1
        self.slow = [start.clone() for _ in range(num_replicas)]
        self._momentum = [torch.zeros(num_elements) for _ in range(num_replicas)]
        self._bounds = [Bounds(num_elements, codec=MODULO8) for _ in range(num_replicas)]
        self._pairs = random.Random(5)
        self.coded = self.broken = 0

    def spread(self) -> float:
        stacked = torch.stack(self.slow)
        return float((stacked - stacked.mean(dim=0)).square().mean().sqrt())

    def round(self, index: int, *, modulo: bool) -> None:
        order = self._pairs.sample(range(len(self.slow)), len(self.slow))
        warm_up = min(1.0, (index + 1) / 5)
        for a, b in zip(order[::2], order[1::2], strict=True):
            h = self._modulo_half(index, a, b) if modulo else (self.slow[b] - self.slow[a]) / 2
            for replica, offset in ((a, h), (b, -h)):
                gradient = self._noise(len(h)) * self._scale * warm_up
                outer_step(
                    self.slow[replica], self._momentum[replica], gradient, offset, alpha=0.5, beta=0.7, gamma=0.7
                )

    def _modulo_half(self, index: int, a: int, b: int) -> Tensor:
        """Return h of `a`; the exact value stands in for the codec that a chunk falls back to."""
        own, partner = self.slow[a], self.slow[b]
        h = (partner - own) / 2
        grid = Grid(agree(self._bounds[a].propose(), self._bounds[b].propose()), dither_seed(bytes([index, a, b]), 1))
        if grid.covers(0):
            payload = MODULO8.encode(partner, grid=grid, chunk_index=0)
            apart = MODULO8.differences(own, payload, grid=grid, chunk_index=0)
            self.coded += 1
            self.broken += apart is None
            if apart is not None:
                h = MODULO8.half_difference(apart, num_elements=len(own), grid=grid, chunk_index=0)
        for replica in (a, b):
            self._bounds[replica].update(0, half_difference=h, values=self.slow[replica])
        return h

    def _noise(self, num_elements: int) -> Tensor:
        return torch.randn(num_elements, generator=self._generator)


def test_under_drift_few_chunks_break_and_replicas_stay_as_near_as_with_fp32() -> None:
    exact, coded = Replicas(), Replicas()
    for index in range(30):
        exact.round(index, modulo=False)
        coded.round(index, modulo=True)
    assert coded.coded > 100
    assert coded.broken <= 0.05 * coded.coded  # includes the warm-up, in which distances grow fivefold
    assert coded.spread() < 1.1 * exact.spread()
