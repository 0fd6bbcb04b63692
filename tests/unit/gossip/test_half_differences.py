"""Conservation: the two half-differences of a pair are opposite, bit for bit; test_coder.py has the codecs."""

from __future__ import annotations

import numpy as np
import torch
from half_difference import half_difference
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

MAX, LEAST = float(torch.finfo(torch.float32).max), 2.0**-149
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
pairs = hnp.arrays(np.float32, st.tuples(st.just(2), st.integers(1, 400)), elements=finite, fill=finite)


@settings(deadline=None, max_examples=300)
@given(pair=pairs)
@example(pair=np.float32(LEAST) * np.stack([np.tile(np.arange(-9, 10), 19), np.repeat(np.arange(-9, 10), 19)]))
def test_the_two_halves_are_opposite_and_finite_for_all_finite_vectors(pair: np.ndarray) -> None:
    own, partner = torch.from_numpy(pair.astype(np.float32))
    ours, theirs = half_difference(own, partner), half_difference(partner, own)
    assert torch.isfinite(ours).all()
    assert torch.equal(ours, -theirs)


def test_half_of_the_difference_is_what_moves_own_to_the_middle() -> None:
    own, partner = torch.tensor([1.0, -2.0, 5.0, MAX]), torch.tensor([3.0, 2.0, 5.0, -MAX])
    half = half_difference(own, partner)
    assert half.tolist() == [1.0, 2.0, 0.0, -MAX]
    assert (own + half).tolist() == [2.0, 0.0, 5.0, 0.0]
