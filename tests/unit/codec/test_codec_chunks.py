"""The names of codecs, and the division of a vector into chunks."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.codec import CHUNK_ELEMENTS, CODEC_NAMES, chunk_bounds, get_codec, vector_bytes
from noloco_p2p.spec import StateCodecName

sizes = st.integers(0, 5 * CHUNK_ELEMENTS) | st.sampled_from(
    [k * CHUNK_ELEMENTS + d for k in (1, 2) for d in (-1, 0, 1)]
)


def test_each_codec_of_the_spec_exists_under_its_name() -> None:
    assert set(get_args(StateCodecName)) == {*CODEC_NAMES, "modulo"}
    assert [get_codec(name).name for name in CODEC_NAMES] == list(CODEC_NAMES)


def test_an_unknown_codec_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=f"unknown codec 'int3'; the known codecs are {', '.join(CODEC_NAMES)}"):
        get_codec("int3")


@given(num_elements=sizes)
def test_chunks_cover_a_vector_once_and_in_order(num_elements: int) -> None:
    bounds = chunk_bounds(num_elements)
    edges = [0, *(stop for _, stop in bounds)]
    assert [start for start, _ in bounds] == edges[:-1]
    assert edges[-1] == num_elements
    assert all(stop - start == CHUNK_ELEMENTS for start, stop in bounds[:-1])
    assert all(0 < stop - start <= CHUNK_ELEMENTS for start, stop in bounds)


@given(num_elements=sizes, name=st.sampled_from(CODEC_NAMES))
def test_vector_bytes_is_the_sum_of_its_chunks(num_elements: int, name: str) -> None:
    codec = get_codec(name)
    total = sum(codec.num_bytes(stop - start) for start, stop in chunk_bounds(num_elements))
    assert vector_bytes(codec, num_elements) == total
