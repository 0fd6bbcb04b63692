"""Codecs refuse invalid input: a mistake of the caller raises ValueError, one of the partner CorruptPayload."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.codec import CHUNK_ELEMENTS, CODECS, Codec, get_codec
from noloco_p2p.errors import CorruptPayload

each_codec = pytest.mark.parametrize("name", CODECS)


def decodes_to_finite_or_is_refused(codec: Codec, payload: bytes, *, num_elements: int) -> bool:
    """Return whether the payload decoded to finite values, and check that `check` agrees.

    Any exception but CorruptPayload propagates and fails the test.
    """
    try:
        decoded = codec.decode(payload, num_elements=num_elements)
    except CorruptPayload:
        with pytest.raises(CorruptPayload):
            codec.check(payload, num_elements=num_elements)
        return False
    codec.check(payload, num_elements=num_elements)
    assert torch.isfinite(decoded).all()
    return True


@each_codec
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFFC00000])
def test_encode_names_the_element_that_is_not_finite(name: str, bits: int) -> None:
    """Infinities, and every kind of NaN."""
    values = torch.ones(300)
    values[270] = torch.frombuffer(bytearray(struct.pack("<I", bits)), dtype=torch.float32)[0]
    bad = {0x7F800000: "inf", 0xFF800000: "-inf"}.get(bits, "nan")
    with pytest.raises(ValueError, match=f"element 270 of 300 is {bad}, which is not finite"):
        get_codec(name).encode(values)


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_encode_refuses_what_its_own_decoder_would_refuse(name: str) -> None:
    with pytest.raises(ValueError, match=f"element 2 of 3 .* is too large for {name}"):
        get_codec(name).encode(torch.tensor([0.9, 0.9, 1.0]) * torch.finfo(torch.float32).max)


@each_codec
def test_encode_refuses_float64_beyond_fp32(name: str) -> None:
    with pytest.raises(ValueError, match=f"element 0 of 1 .* is too large for {name}"):
        get_codec(name).encode(torch.tensor([1e300], dtype=torch.float64))


@each_codec
@pytest.mark.parametrize(
    "values",
    [torch.ones(2, 2), torch.ones(6)[::2], torch.ones(3, dtype=torch.int32), torch.ones(CHUNK_ELEMENTS + 1)],
    ids=["2-D", "strided", "integers", "too long"],
)
def test_encode_refuses_what_is_not_a_chunk(name: str, values: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="chunk"):
        get_codec(name).encode(values)


@each_codec
@pytest.mark.parametrize("num_elements", [-1, CHUNK_ELEMENTS + 1])
def test_a_number_of_elements_that_no_chunk_has(name: str, num_elements: int) -> None:
    for call in (get_codec(name).num_bytes, lambda n: get_codec(name).decode(b"", num_elements=n)):
        with pytest.raises(ValueError, match=f"not {num_elements}"):
            call(num_elements)


@settings(deadline=None, max_examples=200)
@given(name=st.sampled_from(list(CODECS)), num_elements=st.integers(0, 600), length=st.integers(0, 2500))
def test_decode_refuses_every_other_length(name: str, num_elements: int, length: int) -> None:
    codec = get_codec(name)
    expected = codec.num_bytes(num_elements)
    if length == expected:
        length += 1
    with pytest.raises(CorruptPayload, match=f"must have {expected} bytes, but it has {length}"):
        codec.decode(bytes(length), num_elements=num_elements)


@settings(deadline=None, max_examples=300)
@given(name=st.sampled_from(list(CODECS)), num_elements=st.integers(0, 40), data=st.data())
def test_arbitrary_bytes_are_decoded_or_refused(name: str, num_elements: int, data: st.DataObject) -> None:
    size = get_codec(name).num_bytes(num_elements)
    payload = data.draw(st.binary(min_size=size, max_size=size))
    decodes_to_finite_or_is_refused(get_codec(name), payload, num_elements=num_elements)


def test_scales_are_decoded_or_refused_whatever_the_codes() -> None:
    """The scales are every seventh bf16 pattern; a valid one is normal, positive, and finite times the largest code."""
    codes = bytes(byte % 256 for byte in range(128, 128 + 256))
    good = 0
    for bits in range(0, 65_536, 7):
        good += decodes_to_finite_or_is_refused(get_codec("int8"), struct.pack("<H", bits) + codes, num_elements=256)
    assert good == len([bits for bits in range(0, 65_536, 7) if 0x0080 <= bits < 0x7C00])  # 2^-126 to below 2^121


@pytest.mark.parametrize("bits", [0x0000, 0x8000, 0x007F, 0xBF80, 0x7F80, 0x7FC0, 0x7F00])
def test_a_scale_that_no_encoder_writes_is_refused(bits: int) -> None:
    with pytest.raises(CorruptPayload, match="scale"):
        get_codec("int8").decode(struct.pack("<H", bits) + b"\1", num_elements=1)


@pytest.mark.parametrize(("name", "payload"), [("fp32", "0000c07f"), ("fp32", "000080ff"), ("bf16", "807f")])
def test_raw_values_that_are_not_finite_are_refused(name: str, payload: str) -> None:
    with pytest.raises(CorruptPayload, match="NaN or infinity"):
        get_codec(name).decode(bytes.fromhex(payload), num_elements=1)
