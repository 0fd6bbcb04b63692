"""Conservation: for any vector and codec, the two half-differences of a pair are opposite, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_promises import LARGEST
from half_difference import half_difference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from noloco_p2p.codec import CODECS, chunk_bounds, get_codec

MAX = float(torch.finfo(torch.float32).max)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
codable = st.floats(width=32, allow_nan=False, min_value=-LARGEST, max_value=LARGEST)


def pairs(elements: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[Tensor, Tensor]]:
    shape = st.tuples(st.just(2), st.integers(1, 400))
    arrays = hnp.arrays(np.float32, shape, elements=elements, fill=elements)
    return arrays.map(lambda array: (torch.from_numpy(array[0].copy()), torch.from_numpy(array[1].copy())))


def quantized(vector: Tensor, *, codec_name: str) -> Tensor:
    """Encode and decode chunk by chunk, as a vector travels."""
    codec = get_codec(codec_name)
    parts = [vector[start:stop] for start, stop in chunk_bounds(len(vector))]
    return torch.cat([codec.decode(codec.encode(part), num_elements=len(part)) for part in parts])


@settings(deadline=None, max_examples=300)
@given(pair=pairs(finite))
def test_the_two_halves_are_opposite_and_finite_for_all_finite_vectors(pair: tuple[Tensor, Tensor]) -> None:
    ours, theirs = half_difference(*pair), half_difference(*reversed(pair))
    assert torch.isfinite(ours).all()
    assert torch.equal(ours, -theirs)


@settings(deadline=None, max_examples=300)
@given(pair=pairs(codable), codec_name=st.sampled_from(list(CODECS)))
def test_the_two_halves_are_opposite_for_every_codec(pair: tuple[Tensor, Tensor], codec_name: str) -> None:
    own, partner = (quantized(vector, codec_name=codec_name) for vector in pair)
    assert torch.equal(half_difference(own, partner), -half_difference(partner, own))


@pytest.mark.parametrize("codec_name", CODECS)
def test_the_halves_of_long_vectors_are_opposite(codec_name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    own, partner = (quantized(torch.randn(300_001, generator=generator), codec_name=codec_name) for _ in range(2))
    assert torch.equal(half_difference(own, partner), -half_difference(partner, own))


def test_half_of_the_difference_is_what_moves_own_to_the_middle() -> None:
    own, partner = torch.tensor([1.0, -2.0, 5.0, MAX]), torch.tensor([3.0, 2.0, 5.0, -MAX])
    half = half_difference(own, partner)
    assert half.tolist() == [1.0, 2.0, 0.0, -MAX]
    assert (own + half).tolist() == [2.0, 0.0, 5.0, 0.0]


def test_subnormal_halves_are_opposite() -> None:
    unit = 2.0**-149
    grid = torch.arange(-9, 10, dtype=torch.float32) * unit
    own, partner = grid.repeat(19), grid.repeat_interleave(19)
    assert torch.equal(half_difference(own, partner), -half_difference(partner, own))


@pytest.mark.parametrize("codec_name", CODECS)
@pytest.mark.parametrize("seed", range(5))
def test_coding_errors_do_not_move_the_mean_of_a_pair(codec_name: str, seed: int) -> None:
    a, b = torch.randn(2, 5000, generator=torch.Generator().manual_seed(seed))
    half = half_difference(quantized(a, codec_name=codec_name), quantized(b, codec_name=codec_name))
    mean = ((a + half).double() + (b - half).double()) / 2
    torch.testing.assert_close(
        mean, (a.double() + b.double()) / 2, atol=1e-6, rtol=0
    )  # fp32 rounding of values up to 4


def test_the_check_above_would_see_a_coding_error() -> None:
    """Averaging with the partner's coded vector, the obvious alternative, exceeds the same bound by far."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5000, generator=generator)
    halves = [(quantized(y, codec_name="int8") - x) / 2 for x, y in ((a, b), (b, a))]
    assert (halves[0] + halves[1]).abs().max() > 1e-3
