"""The names of codecs, and the division of a vector into chunks."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.codec import CHUNK_ELEMENTS, CODECS, chunk_bounds, get_codec, vector_bytes
from noloco_p2p.spec import StateCodecName

sizes = st.integers(0, 5 * CHUNK_ELEMENTS) | st.sampled_from(
    [k * CHUNK_ELEMENTS + d for k in (1, 2) for d in (-1, 0, 1)]
)


def test_each_codec_of_the_spec_exists_under_its_name() -> None:
    assert set(get_args(StateCodecName)) == {*CODECS, "modulo"}
    assert [get_codec(name).name for name in CODECS] == list(CODECS)


def test_an_unknown_codec_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match="unknown codec 'int3'; the known codecs are fp32, bf16, int8"):
        get_codec("int3")


@given(num_elements=sizes)
def test_chunks_cover_a_vector_once_and_in_order(num_elements: int) -> None:
    bounds = chunk_bounds(num_elements)
    edges = [0, *(stop for _, stop in bounds)]
    assert [start for start, _ in bounds] == edges[:-1]
    assert edges[-1] == num_elements
    assert all(stop - start == CHUNK_ELEMENTS for start, stop in bounds[:-1])
    assert all(0 < stop - start <= CHUNK_ELEMENTS for start, stop in bounds)
    assert vector_bytes(get_codec("bf16"), num_elements) == 2 * num_elements
