"""What partners agree on is the same for both; closing rounds end a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.optim.mixing import agreed_inner_steps, closing_rounds
from noloco_p2p.spec import OuterSpec

STEPS = st.integers(1, 10_000)
UINT64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(("num_peers", "expected"), [(1, 0), (2, 4), (3, 5), (8, 6), (1000, 13)])
def test_closing_rounds_grow_with_the_logarithm_of_the_swarm(num_peers: int, expected: int) -> None:
    assert closing_rounds(OuterSpec(), num_peers) == expected
    assert closing_rounds(OuterSpec(closing_rounds=2), num_peers) == 2


@given(UINT64, UINT64)
def test_both_partners_agree_bit_for_bit(one: int, other: int) -> None:
    assert agreed_inner_steps(one, other) == agreed_inner_steps(other, one)


@given(STEPS)
def test_rounds_of_one_length_are_agreed_as_they_are(inner_steps: int) -> None:
    assert agreed_inner_steps(inner_steps, inner_steps) == inner_steps
