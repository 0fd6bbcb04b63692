"""Every codec keeps its promises on bytes, sizes and errors, and leaves the caller's tensor untouched.

Its bytes are fixed, so that peers of different versions can read each other's payloads.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from blake3 import blake3
from codec_promises import LARGEST, PROMISES, RAMP, VALUES
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from noloco_p2p.codec import CHUNK_ELEMENTS, CODECS, chunk_bounds, get_codec, vector_bytes
from noloco_p2p.spec import StateCodecName

finite = st.floats(width=32, allow_nan=False, min_value=-LARGEST, max_value=LARGEST)
vectors = hnp.arrays(np.float32, st.integers(0, 600), elements=finite, fill=finite).map(torch.from_numpy)
codec_names = st.sampled_from(list(PROMISES))
each_codec = pytest.mark.parametrize("name", PROMISES)


def round_trip(name: str, values: Tensor) -> Tensor:
    codec = get_codec(name)
    return codec.decode(codec.encode(values), num_elements=values.numel())


def error_bound(name: str, values: Tensor) -> Tensor:
    """Return the largest allowed error of each element, in float64."""
    return PROMISES[name].error_bound(values.double())


@given(st.integers(0, 5 * CHUNK_ELEMENTS) | st.sampled_from([CHUNK_ELEMENTS + d for d in (-1, 0, 1)]))
def test_chunks_cover_a_vector_once_and_in_order(num_elements: int) -> None:
    bounds = chunk_bounds(num_elements)
    edges = [0, *(stop for _, stop in bounds)]
    assert [start for start, _ in bounds] == edges[:-1]
    assert edges[-1] == num_elements
    assert all(stop - start == CHUNK_ELEMENTS for start, stop in bounds[:-1])
    assert all(0 < stop - start <= CHUNK_ELEMENTS for start, stop in bounds)
    assert vector_bytes(get_codec("bf16"), num_elements) == 2 * num_elements


def test_each_codec_of_the_spec_exists_under_its_name() -> None:
    assert set(get_args(StateCodecName)) == {*CODECS, "modulo"}
    assert [get_codec(name).name for name in CODECS] == list(CODECS)
    with pytest.raises(ValueError, match="unknown codec 'int3'; the known codecs are fp32, bf16, int8"):
        get_codec("int3")


@each_codec
def test_the_bytes_are_golden_and_follow_the_written_layout(name: str) -> None:
    codec, promise = get_codec(name), PROMISES[name]
    assert codec.encode(VALUES) == bytes.fromhex(promise.golden)
    assert blake3(codec.encode(RAMP)).hexdigest()[:32] == promise.ramp_digest
    for values in (VALUES, RAMP):
        payload = codec.encode(values)
        assert codec.decode(payload, num_elements=len(values)).tolist() == promise.by_hand(payload, len(values))
    assert codec.num_bytes(CHUNK_ELEMENTS) == promise.bytes_a_parameter * CHUNK_ELEMENTS


def test_bf16_rounds_to_nearest_even() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])  # ties, which round to even: one down, one up
    assert round_trip("bf16", ties).tolist() == [1.0, 1 + 2**-6]


@settings(deadline=None, max_examples=300)
@given(name=codec_names, values=vectors)
def test_round_trip_stays_within_the_error_bound(name: str, values: Tensor) -> None:
    decoded = round_trip(name, values)
    assert decoded.dtype == torch.float32
    assert decoded.shape == values.shape
    assert torch.isfinite(decoded).all()
    assert ((decoded.double() - values.double()).abs() <= error_bound(name, values)).all()


@settings(deadline=None, max_examples=100)
@given(name=codec_names, values=vectors)
def test_same_values_give_the_same_bytes_of_the_announced_size(name: str, values: Tensor) -> None:
    codec, before = get_codec(name), values.clone()
    payload = codec.encode(values)
    assert codec.encode(values.clone()) == payload
    assert len(payload) == codec.num_bytes(values.numel())
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))  # encode changes nothing
    assert torch.equal(
        codec.decode(memoryview(payload), num_elements=values.numel()),
        codec.decode(payload, num_elements=values.numel()),
    )


@each_codec
@pytest.mark.parametrize(
    "num_elements", [0, 1, 2, 127, 128, 129, 255, 256, 257, 511, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS]
)
def test_any_length_up_to_a_chunk(name: str, num_elements: int) -> None:
    values = torch.sin(torch.arange(num_elements, dtype=torch.float32))
    decoded = round_trip(name, values)
    assert ((decoded - values).double().abs() <= error_bound(name, values) + 1e-7).all()


@each_codec
@pytest.mark.parametrize("stop", [0, 1])
def test_a_slice_of_at_most_one_element_may_have_any_stride(name: str, stop: int) -> None:
    values = torch.ones(20)[:stop:7]  # torch reports it as contiguous, whatever its stride
    assert round_trip(name, values).tolist() == pytest.approx([1.0] * stop, rel=2**-7)


@each_codec
def test_a_block_of_zeros_stays_zero(name: str) -> None:
    values = torch.zeros(512)
    values[300] = 4.0
    decoded = round_trip(name, values)
    assert torch.count_nonzero(decoded).item() == 1
    assert decoded[300].item() == pytest.approx(4.0, rel=2**-7)


@each_codec
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_parameters_of_any_float_dtype_are_coded_like_their_fp32_values(name: str, dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.linspace(-3, 5, 400, dtype=dtype))
    payload = bytearray(get_codec(name).encode(parameter))
    assert payload == get_codec(name).encode(parameter.float())
    decoded = get_codec(name).decode(memoryview(payload), num_elements=400)
    kept = decoded.clone()
    payload[:] = bytes(len(payload))
    assert torch.equal(decoded, kept), "the values have memory of their own"
    decoded.add_(1)  # writable, and without a gradient


@each_codec
def test_relative_error_for_a_gaussian(name: str) -> None:
    values = torch.randn(CHUNK_ELEMENTS, generator=torch.Generator().manual_seed(0))
    decoded = round_trip(name, values)
    error = (decoded - values).norm() / values.norm()
    most = PROMISES[name].gaussian_error
    assert most / 4 <= error.item() <= most
