"""The grid follows from the distances of the last swap; partners agree on the finer proposal."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from noloco_p2p.codec.dither import dither_seed
from noloco_p2p.codec.modulo import (
    BLOCK_ELEMENTS,
    BLOCKS_A_CHUNK,
    MODULO_CODECS,
    MOST_HALVINGS,
    STEP_OVER_DISTANCE,
    UNKNOWN,
    Bounds,
    Grid,
    agree,
    num_blocks,
)
from noloco_p2p.errors import CorruptPayload
from noloco_p2p.optim.noloco import outer_step

exponents = st.sampled_from([UNKNOWN, *range(-100, 101)])


def signed(proposal: bytes) -> list[int]:
    return memoryview(proposal).cast("b").tolist()


def seen(bounds: Bounds, distance: float, *, value: float = 1.0, num_elements: int = 10) -> list[int]:
    """Return the proposal after a swap with a partner at this distance."""
    half = torch.zeros(num_elements)
    half[-1] = -distance / 2
    bounds.update(0, half_difference=half, values=torch.full((num_elements,), -value))
    return signed(bounds.propose())


def test_a_grid_is_not_finer_than_fp32_and_not_out_of_range() -> None:
    assert seen(Bounds(10), 1e-15, value=1.0) == [1 - 24]
    assert seen(Bounds(10), 1e35) == [UNKNOWN]


def test_blocks_and_chunks_are_kept_apart() -> None:
    num_elements = BLOCKS_A_CHUNK * BLOCK_ELEMENTS + BLOCK_ELEMENTS + 5
    bounds = Bounds(num_elements)
    half = torch.cat([torch.full((BLOCK_ELEMENTS,), 0.1), torch.full((5,), 0.2)])
    bounds.update(1, half_difference=half, values=half)
    proposal = signed(bounds.propose())
    assert len(proposal) == num_blocks(num_elements) == BLOCKS_A_CHUNK + 2
    assert proposal[:BLOCKS_A_CHUNK] == [UNKNOWN] * BLOCKS_A_CHUNK
    assert proposal[-1] == proposal[-2] + 1


@given(pairs=st.lists(st.tuples(exponents, exponents), max_size=50))
def test_both_sides_agree_on_the_finer_step_that_either_knows(pairs: list[tuple[int, int]]) -> None:
    own, partner = (bytes(pair[side] & 0xFF for pair in pairs) for side in (0, 1))
    assert agree(own, partner) == agree(partner, own)
    assert signed(agree(own, partner)) == [min(pair) for pair in pairs]  # UNKNOWN is above every exponent


@given(distance=st.floats(1e-6, 1e6))
def test_the_step_is_about_as_long_as_the_last_distance(distance: float) -> None:
    bounds = Bounds(100)
    seen(bounds, 1e3 * distance, value=0.0, num_elements=100)
    (exponent,) = seen(bounds, distance, value=0.0, num_elements=100)  # one of 100 numbers is that far away
    ratio = 2.0**exponent / (distance / 10)
    assert STEP_OVER_DISTANCE * 0.999999 <= ratio <= 2 * STEP_OVER_DISTANCE * 1.000001


def test_each_round_alone_halves_the_step_and_the_most_is_known() -> None:
    bounds = Bounds(10)
    bounds.begin_swap(4)
    (usual,) = seen(bounds, 1.0)
    for alone, halvings in ((0, 0), (1, 1), (2, 2), (30, MOST_HALVINGS)):
        bounds.begin_swap(5 + alone)
        assert signed(bounds.propose()) == [usual - halvings]
    assert seen(bounds, 1.0) == [usual], "a swap has ended the rounds alone"


def test_nothing_is_known_before_a_swap_from_equal_peers_or_from_what_overflows() -> None:
    bounds = Bounds(10)
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


class Replicas:
    """Eight replicas that drift apart by noise and mix in random pairs, as in the outer step but without a model."""

    def __init__(self, *, num_elements: int = BLOCK_ELEMENTS // 2, num_replicas: int = 8) -> None:
        self._generator = torch.Generator().manual_seed(5)
        self._scale = torch.exp(0.7 * self._noise(num_elements)) * 1e-3  # heavy-tailed, as real outer gradients are
        start = self._noise(num_elements) * 0.1
        self.slow = [start.clone() for _ in range(num_replicas)]
        self._momentum = [torch.zeros(num_elements) for _ in range(num_replicas)]
        self._bounds = [Bounds(num_elements) for _ in range(num_replicas)]
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
            self.coded += 1
            earlier = b""
            for codec in MODULO_CODECS["modulo"]:
                payload = codec.encode(partner, grid=grid, chunk_index=0)
                apart = codec.differences(own, payload, grid=grid, chunk_index=0, earlier=earlier)
                if apart is not None:
                    h = codec.half_difference(apart, num_elements=len(own), grid=grid, chunk_index=0)
                    break
                earlier += payload
            else:
                self.broken += 1
        for replica in (a, b):
            self._bounds[replica].update(0, half_difference=h, values=self.slow[replica])
        return h

    def _noise(self, num_elements: int) -> Tensor:
        return torch.randn(num_elements, generator=self._generator)


def test_under_drift_no_chunk_breaks_and_replicas_stay_almost_as_near_as_with_fp32() -> None:
    exact, coded = Replicas(), Replicas()
    for index in range(30):
        exact.round(index, modulo=False)
        coded.round(index, modulo=True)
    assert coded.coded > 100
    assert not coded.broken  # not even in the warm-up, in which distances grow fivefold
    assert coded.spread() < 1.2 * exact.spread()
