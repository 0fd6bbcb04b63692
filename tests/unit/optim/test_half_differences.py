"""Conservation: for any section and codec, the two half-differences of a pair are opposite, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from codec_promises import PROMISES
from half_difference import half_difference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from noloco_p2p.codec import CODEC_NAMES, chunk_bounds, get_codec
from noloco_p2p.optim.halves import half_difference_
from noloco_p2p.optim.noloco import outer_step

MAX = float(torch.finfo(torch.float32).max)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def pairs(elements: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[Tensor, Tensor]]:
    shape = st.tuples(st.just(2), st.integers(1, 400))
    arrays = hnp.arrays(np.float32, shape, elements=elements, fill=elements)
    return arrays.map(lambda array: (torch.from_numpy(array[0].copy()), torch.from_numpy(array[1].copy())))


def coded_pairs(name: str) -> st.SearchStrategy[tuple[tuple[Tensor, Tensor], str]]:
    largest = PROMISES[name].largest
    return st.tuples(pairs(st.floats(width=32, allow_nan=False, min_value=-largest, max_value=largest)), st.just(name))


def quantized(vector: Tensor, *, codec_name: str) -> Tensor:
    """Encode and decode chunk by chunk, as a section travels."""
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
@given(coded=st.sampled_from(CODEC_NAMES).flatmap(coded_pairs))
def test_the_two_halves_are_opposite_for_every_codec(coded: tuple[tuple[Tensor, Tensor], str]) -> None:
    pair, codec_name = coded
    own, partner = (quantized(vector, codec_name=codec_name) for vector in pair)
    assert torch.equal(half_difference(own, partner), -half_difference(partner, own))


@pytest.mark.parametrize("codec_name", CODEC_NAMES)
def test_the_halves_of_long_sections_are_opposite(codec_name: str) -> None:
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


@pytest.mark.parametrize("wrong", [torch.ones(4), torch.ones(3, dtype=torch.float64), torch.ones(1, 3)])
def test_other_dtypes_and_shapes_are_refused(wrong: Tensor) -> None:
    for arguments in ((torch.ones(3), wrong), (wrong, torch.ones(3))):
        with pytest.raises(ValueError, match=r"own|partner"):
            half_difference(*arguments)


@dataclass(frozen=True, slots=True)
class Replica:
    slow: Tensor
    momentum: Tensor
    gradient: Tensor


def swap_and_step(own: Replica, partner: Replica, *, codec_name: str) -> Replica:
    """Return a replica after a round with all three sections swapped: exact own vectors, coded half-differences."""
    halves = {
        name: half_difference(
            quantized(getattr(own, name), codec_name=codec_name),
            quantized(getattr(partner, name), codec_name=codec_name),
        )
        for name in ("slow", "momentum", "gradient")
    }
    slow, momentum = own.slow.clone(), own.momentum + halves["momentum"]
    outer_step(slow, momentum, own.gradient + halves["gradient"], halves["slow"], alpha=0.5, beta=0.7, gamma=0.9)
    return Replica(slow=slow, momentum=momentum, gradient=own.gradient)


@pytest.mark.parametrize("codec_name", CODEC_NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_a_coded_step_moves_the_mean_of_a_pair_like_an_exact_one(codec_name: str, seed: int) -> None:
    """The mean momentum and mean weights (float64) follow from the exact vectors of both: coding errors cancel."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (Replica(*torch.randn(3, 5000, generator=generator)) for _ in range(2))
    mean = {
        name: (getattr(a, name).double() + getattr(b, name).double()) / 2 for name in ("slow", "momentum", "gradient")
    }
    expected_momentum = 0.5 * mean["momentum"] + 0.7 * mean["gradient"]  # gamma's term is 0 in the mean
    expected_slow = mean["slow"] + expected_momentum

    after_a, after_b = swap_and_step(a, b, codec_name=codec_name), swap_and_step(b, a, codec_name=codec_name)

    momentum = (after_a.momentum.double() + after_b.momentum.double()) / 2
    slow = (after_a.slow.double() + after_b.slow.double()) / 2
    torch.testing.assert_close(momentum, expected_momentum, atol=2e-6, rtol=0)  # fp32 rounding of values up to 8
    torch.testing.assert_close(slow, expected_slow, atol=3e-6, rtol=0)


def test_the_check_above_would_see_a_coding_error() -> None:
    """Averaging with the partner's coded vector, the obvious alternative, exceeds the same bound by far."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5000, generator=generator)
    halves = [(quantized(y, codec_name="int8") - x) / 2 for x, y in ((a, b), (b, a))]
    assert (halves[0] + halves[1]).abs().max() > 1e-3


@settings(deadline=None, max_examples=100)
@given(pair=pairs(finite))
def test_in_place_it_is_the_same(pair: tuple[Tensor, Tensor]) -> None:
    own, partner = pair[0].clone(), pair[1].clone()
    half = half_difference_(own, partner)
    assert half is partner
    assert torch.equal(half, pair[1] * 0.5 - pair[0] * 0.5)
    assert torch.equal(half, half_difference(*pair))
