"""Every codec keeps its promises on bytes, sizes and errors, and refuses invalid input.

Its bytes are fixed, so that peers of different versions can read each other's payloads. A new codec adds a row.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noloco_p2p.codec import (
    ACTIVATION_CODECS,
    CHUNK_ELEMENTS,
    CODECS,
    LARGEST,
    Codec,
    chunk_bounds,
    get_activation_codec,
    get_codec,
)
from noloco_p2p.codec.int8 import CPU_CHUNK_ELEMENTS, Int8Codec
from noloco_p2p.errors import CorruptPayload, NotFinite
from noloco_p2p.spec import ActivationCodecName, StateCodecName

NAN, INF = float("nan"), float("inf")
TINY = 2.0**-126  # the smallest scale
LARGE = 2.0**127  # every codec can encode values of this magnitude

# The inputs of the golden bytes and digests: two tokens of five elements, and three of 300 (the last block is short).
# All values are small multiples of a power of two.
VALUES = torch.tensor([[0.0, 1.0, -1.0, 0.5, 12.75], [3.0, -0.25, 0.015625, -2.75, 0.0]])
RAMP = ((torch.arange(900, dtype=torch.float32) * 37 % 1000 - 450) / 8).view(3, 300)


def bf16(data: bytes) -> list[float]:
    """Decode bf16 values, each of which is the upper half of an fp32 value."""
    return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]


def int8_by_hand(payload: bytes, block_elements: int) -> list[float]:
    """Decode the bf16 scales of the blocks of a token, and the signed bytes after them."""
    scales_end = 2 * -(-len(payload) // (block_elements + 2))
    scales, codes = bf16(payload[:scales_end]), memoryview(payload)[scales_end:].cast("b")
    return [code * scales[i // block_elements] for i, code in enumerate(codes)]


def half_a_step(exact: Tensor, block_elements: int) -> Tensor:
    """Return the error bound of int8 for (tokens, hidden)."""
    bounds = [
        (block.abs().amax(1, keepdim=True) / 127).clamp_min(TINY).expand_as(block)
        for block in exact.split(block_elements, dim=1)
        if block.numel()
    ]
    scale = torch.cat([exact[:, :0], *bounds], dim=1) * (1 + 2**-7)  # the scale is rounded up to bf16
    return scale / 2 * (1 + 2**-13)  # plus fp32 rounding of up to 127 steps


@dataclass(frozen=True, slots=True)
class Promise:
    """What a codec promises.

    golden: the payload of VALUES, in hexadecimal. ramp_digest: 16 bytes of the BLAKE3 digest of the payload of RAMP.
    by_hand: decodes a token without the codec. error_bound: maps exact fp64 values of shape (tokens, hidden) to the
    largest error of each. gaussian_error: largest loss of a normal vector, relative to its norm.
    """

    codec: Codec
    golden: str
    ramp_digest: str
    num_bytes: Callable[[int], int]  # of a token
    by_hand: Callable[[bytes], list[float]]
    error_bound: Callable[[Tensor], Tensor]
    gaussian_error: float


PROMISES = {
    "fp32": Promise(
        CODECS["fp32"],
        golden="00000000 0000803f 000080bf 0000003f 00004c41 00004040 000080be 0000803c 000030c0 00000000",
        ramp_digest="46eacd7f23443d22a4e625831f681ab3",
        num_bytes=lambda hidden: 4 * hidden,
        by_hand=lambda payload: list(struct.unpack(f"<{len(payload) // 4}f", payload)),
        error_bound=torch.zeros_like,
        gaussian_error=0.0,
    ),
    "bf16": Promise(
        CODECS["bf16"],
        golden="0000 803f 80bf 003f 4c41 4040 80be 803c 30c0 0000",
        ramp_digest="ff7d044dd779cfae76e752e1ffdbdd44",
        num_bytes=lambda hidden: 2 * hidden,
        by_hand=bf16,
        error_bound=lambda exact: exact.abs() * 2**-8 + 2.0**-134,  # half a unit in the last of 8 bits, plus subnormals
        gaussian_error=0.0020,
    ),
    "int8": Promise(
        CODECS["int8"],
        golden="ce3d 00 0a f6 05 7f c23c 7f f5 01 8c 00",
        ramp_digest="335078394aeef9939d4c5c5c64cd0873",
        num_bytes=lambda hidden: hidden + 2 * -(-hidden // 256),
        by_hand=lambda payload: int8_by_hand(payload, 256),
        error_bound=lambda exact: half_a_step(exact, 256),
        gaussian_error=0.0075,
    ),
    "int8 of activations": Promise(
        ACTIVATION_CODECS["int8"],
        golden="ce3d 00 0a f6 05 7f c23c 7f f5 01 8c 00",
        ramp_digest="504fad90f3a250d830f4b0b5e514578f",
        num_bytes=lambda hidden: hidden + 2 * -(-hidden // 128),
        by_hand=lambda payload: int8_by_hand(payload, 128),
        error_bound=lambda exact: half_a_step(exact, 128),
        gaussian_error=0.0070,
    ),
}
assert {promise.codec for promise in PROMISES.values()} == {*CODECS.values(), *ACTIVATION_CODECS.values()}

each_codec = pytest.mark.parametrize("name", PROMISES)
codec_names = st.sampled_from(list(PROMISES))
hidden_sizes = st.integers(0, 600) | st.sampled_from([127, 128, 129, 255, 256, 257, 511])


def round_trip(name: str, values: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    codec = PROMISES[name].codec
    return codec.decode(codec.encode(values), shape=values.shape, dtype=dtype)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_bounds(name: str, values: Tensor, decoded: Tensor) -> None:
    """Check every value of (tokens, hidden) against the error bound of the codec."""
    exact = values.double()
    assert torch.isfinite(decoded).all()
    assert ((decoded.double() - exact).abs() <= PROMISES[name].error_bound(exact)).all()


@given(st.integers(0, 5 * CHUNK_ELEMENTS) | st.sampled_from([CHUNK_ELEMENTS + d for d in (-1, 0, 1)]))
def test_chunks_cover_a_vector_once_and_in_order(num_elements: int) -> None:
    bounds = chunk_bounds(num_elements)
    edges = [0, *(stop for _, stop in bounds)]
    assert [start for start, _ in bounds] == edges[:-1]
    assert edges[-1] == num_elements
    assert all(stop - start == CHUNK_ELEMENTS for start, stop in bounds[:-1])
    assert all(0 < stop - start <= CHUNK_ELEMENTS for start, stop in bounds)


@pytest.mark.parametrize("get", [get_codec, get_activation_codec])
def test_each_codec_of_the_spec_exists_under_its_name(get: Callable[[str], Codec]) -> None:
    assert set(get_args(StateCodecName)) == {*CODECS, "modulo"}
    names = get_args(ActivationCodecName)
    assert [get(name).name for name in names] == list(names) == list(ACTIVATION_CODECS)
    with pytest.raises(ValueError, match="unknown codec 'int3'; the known codecs are fp32, bf16, int8"):
        get("int3")


@each_codec
def test_the_bytes_are_golden_and_follow_the_written_layout(name: str) -> None:
    promise = PROMISES[name]
    assert promise.codec.encode(VALUES) == bytes.fromhex(promise.golden)
    assert blake3(promise.codec.encode(RAMP)).hexdigest()[:32] == promise.ramp_digest
    for values in (VALUES, RAMP):
        payload = promise.codec.encode(values)
        size = len(payload) // len(values)
        by_hand = [promise.by_hand(bytes(payload[i : i + size])) for i in range(0, len(payload), size)]
        assert promise.codec.decode(payload, shape=values.shape).tolist() == by_hand


@settings(deadline=None, max_examples=100)
@given(name=codec_names, leading=st.lists(st.integers(0, 3), max_size=3), hidden=hidden_sizes)
def test_the_size_follows_from_the_shape(name: str, leading: list[int], hidden: int) -> None:
    promise, shape = PROMISES[name], (*leading, hidden)
    payload = promise.codec.encode(torch.ones(shape))
    assert payload.nbytes == promise.codec.num_bytes(shape) == math.prod(leading) * promise.num_bytes(hidden)
    assert promise.codec.decode(payload, shape=shape).shape == shape


def test_bf16_rounds_to_nearest_even() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])  # ties, which round to even: one down, one up
    assert round_trip("bf16", ties).tolist() == [1.0, 1 + 2**-6]


@settings(deadline=None, max_examples=300)
@given(name=codec_names, hidden=hidden_sizes, seed=st.integers(0, 2**31), data=st.data())
def test_errors_stay_within_the_bound(name: str, hidden: int, seed: int, data: st.DataObject) -> None:
    """Values have any magnitude, and a third of the first token is zero."""
    exponents = data.draw(st.lists(st.integers(-140, 126), min_size=1, max_size=4))
    values = normal(3, hidden, seed=seed).clamp(-2, 2).double()
    values *= torch.tensor([2.0**e for e in exponents], dtype=torch.float64).repeat(hidden)[:hidden]
    values[0, ::3] = 0
    values = values.float()
    check_bounds(name, values, round_trip(name, values))


@each_codec
@pytest.mark.parametrize(
    "shape", [(64, 4096), (2, CPU_CHUNK_ELEMENTS + 3), (1, CHUNK_ELEMENTS)], ids=["tokens", "wide tokens", "a chunk"]
)
def test_relative_error_for_a_gaussian(name: str, shape: tuple[int, int]) -> None:
    values = normal(*shape)
    error = float((round_trip(name, values) - values).norm() / values.norm())
    assert PROMISES[name].gaussian_error / 4 <= error <= PROMISES[name].gaussian_error


def test_a_large_element_costs_only_its_own_block() -> None:
    values = normal(4, 512)
    with_outlier = values.clone()
    with_outlier[1, 200] = 1000.0
    name = "int8 of activations"
    changed = round_trip(name, values) != round_trip(name, with_outlier)
    assert changed[1, 128:256].any()
    changed[1, 128:256] = False
    assert not changed.any()


@each_codec
def test_tokens_are_coded_one_by_one(name: str) -> None:
    """The tokens from any one on are coded as if they came first, even if they span several chunks."""
    codec, hidden = PROMISES[name].codec, 300
    values = normal(CPU_CHUNK_ELEMENTS // hidden + 5, hidden)
    payload, token_bytes = codec.encode(values), codec.num_bytes((hidden,))
    decoded = codec.decode(payload, shape=values.shape)
    for start in range(0, len(values), 250):
        part = payload[start * token_bytes :]
        assert part == codec.encode(values[start:])
        assert torch.equal(decoded[start:], codec.decode(part, shape=values[start:].shape))


@each_codec
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_bytes_depend_on_the_fp32_values_only(name: str, dtype: torch.dtype) -> None:
    """Not on strides, gradients, autocast (stages encode within a forward pass in bf16), or later changes."""
    codec, values = PROMISES[name].codec, normal(40, 3, 200).to(dtype).permute(1, 2, 0)
    plain = values.float().contiguous()
    payload, before = codec.encode(plain).tobytes(), plain.clone()
    assert torch.equal(plain, before)
    assert codec.encode(values.detach().requires_grad_()) == payload
    with torch.autocast("cpu", dtype=torch.bfloat16):
        coded = codec.encode(values)
        decoded = codec.decode(coded, shape=values.shape, dtype=dtype)
    values.zero_()
    assert coded == payload, "the payload has memory of its own"
    assert (decoded.dtype, decoded.requires_grad) == (dtype, False)
    writable = bytearray(payload)
    again = codec.decode(memoryview(writable), shape=values.shape)
    writable[:] = bytes(len(writable))
    assert torch.equal(decoded, again.to(dtype)), "and so have the values"


@each_codec
@pytest.mark.parametrize("hidden", [1, 128, 130])
def test_large_finite_values_are_carried(name: str, hidden: int) -> None:
    values = torch.full((2, hidden), LARGE)
    values[1] = -values[1]
    check_bounds(name, values, round_trip(name, values))


@each_codec
def test_fp16_saturates(name: str) -> None:
    decoded = round_trip(name, torch.tensor([[1e6, -1e6]]), dtype=torch.float16)
    assert decoded.abs().max() == torch.finfo(torch.float16).max
    assert torch.isfinite(decoded).all()


# what is refused


@each_codec
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFFC00000])
def test_encode_names_the_element_that_is_not_finite(name: str, bits: int) -> None:
    """Infinities, and every kind of NaN."""
    values = torch.ones(2, 3, 300)
    values[1, 2, 150] = torch.frombuffer(bytearray(struct.pack("<I", bits)), dtype=torch.float32)[0]
    bad = {0x7F800000: "inf", 0xFF800000: "-inf"}.get(bits, "nan")
    with pytest.raises(ValueError, match=re.escape(f"element 1650 of 1800 is {bad}, which is not finite")):
        PROMISES[name].codec.encode(values)


@each_codec
@pytest.mark.parametrize("value", [3.4e38, 1e300])
def test_encode_refuses_what_its_own_decoder_would_refuse(name: str, value: float) -> None:
    values = torch.tensor([[1.0, value, 2.0]], dtype=torch.float64)
    codec = PROMISES[name].codec
    with pytest.raises(ValueError, match=f"element 1 of 3 is .*, which is too large for {codec.name}"):
        codec.encode(values)


@each_codec
def test_what_no_codec_can_encode_is_refused(name: str) -> None:
    codec = PROMISES[name].codec
    for values in (torch.tensor(1.0), torch.ones(2, 3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="a tensor to encode must"):
            codec.encode(values)
    for shape in ((), (-1, 5), (3, -1)):
        for call in (codec.num_bytes, lambda shape: codec.decode(b"", shape=shape)):
            with pytest.raises(ValueError, match="shape"):
                call(shape)


@settings(deadline=None, max_examples=200)
@given(name=codec_names, hidden=hidden_sizes, length=st.integers(0, 2500))
def test_decode_refuses_every_other_length(name: str, hidden: int, length: int) -> None:
    codec = PROMISES[name].codec
    expected = codec.num_bytes((2, hidden))
    length += length == expected
    for call in (codec.check, codec.decode):
        with pytest.raises(CorruptPayload, match=f"must have {expected} bytes, but it has {length}"):
            call(bytes(length), shape=(2, hidden))


@settings(deadline=None, max_examples=300)
@given(
    name=codec_names,
    hidden=st.integers(0, 40) | st.sampled_from([128, 130]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
)
def test_arbitrary_bytes_are_decoded_or_refused(
    name: str, hidden: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    size = PROMISES[name].codec.num_bytes((hidden,))
    payload = data.draw(st.binary(min_size=size, max_size=size))
    is_finite_or_refused(PROMISES[name].codec, payload, shape=(hidden,), dtype=dtype)


def is_finite_or_refused(codec: Codec, payload: bytes, *, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a payload decodes. Any exception but NotFinite fails the test."""
    try:
        decoded = codec.decode(payload, shape=shape, dtype=dtype)
    except NotFinite:
        with pytest.raises(NotFinite):
            codec.check(payload, shape=shape)
        return False
    codec.check(payload, shape=shape)
    assert torch.isfinite(decoded).all()
    assert float(decoded.abs().max() if decoded.numel() else 0.0) <= LARGEST
    return True


def test_every_scale_gives_bounded_values_or_is_refused() -> None:
    """The payloads have every seventh bf16 pattern as scale, and the largest code that a byte can hold."""
    codec = Int8Codec(block_elements=8)
    patterns, codes = range(0, 65_536, 7), bytes([0x80]) * 8  # -128
    good = [
        bits
        for bits in patterns
        if is_finite_or_refused(codec, struct.pack("<H", bits) + codes, shape=(8,), dtype=torch.bfloat16)
    ]
    assert good == [bits for bits in patterns if 0x0080 <= bits <= 0x7F7F - 128 * 7]  # the bits of LARGEST / 2^7


@pytest.mark.parametrize("bits", [0x0000, 0x8000, 0x007F, 0xBF80, 0x7F80, 0x7FC0, 0x7F00])
def test_a_scale_that_no_encoder_writes_is_refused_in_any_block(bits: int) -> None:
    codec = ACTIVATION_CODECS["int8"]
    for block in range(3):
        payload = bytearray(codec.encode(torch.ones(2, 300)))
        struct.pack_into("<H", payload, len(payload) // 2 + 2 * block, bits)
        with pytest.raises(NotFinite, match="scale"):
            codec.check(bytes(payload), shape=(2, 300))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_codec
def test_a_gpu_codes_as_the_cpu_does(name: str) -> None:
    codec, values, gpu = PROMISES[name].codec, normal(64, 1000), torch.device("cuda")
    payload = codec.encode(values.to(gpu))
    check_bounds(name, values, codec.decode(payload, shape=values.shape))
    decoded = codec.decode(payload, shape=values.shape, device=gpu)
    assert decoded.device.type == "cuda"
    assert torch.equal(decoded.cpu(), codec.decode(payload, shape=values.shape))
