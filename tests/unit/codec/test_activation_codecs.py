"""Codecs for activations and gradients: golden bytes, sizes, error bounds, and the inputs that each side refuses."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence

import pytest
import torch
from blake3 import blake3
from codec_promises import bf16
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noloco_p2p.codec.activations import (
    ACTIVATION_CODEC_NAMES,
    BLOCK_CHANNELS,
    CPU_CHUNK_ELEMENTS,
    LARGEST,
    get_activation_codec,
)
from noloco_p2p.errors import CorruptPayload, NotFinite

NAN, INF = float("nan"), float("inf")
TINY = 2.0**-126
LARGEST_CODED = 2.0**127
MAX_CODE = 127
GAUSSIAN_ERROR = {"fp32": 0.0, "bf16": 0.0018, "int8": 0.0070}

each_codec = pytest.mark.parametrize("name", ACTIVATION_CODEC_NAMES)
codec_names = st.sampled_from(ACTIVATION_CODEC_NAMES)
hidden_sizes = st.integers(0, 400) | st.sampled_from([128, 256, 257, 576])

# Two tokens of five channels, and three of 300 (two whole blocks and one of 44). All values are small multiples of a
# power of two, so sums are exact and do not depend on the order of additions.
VALUES = torch.tensor([[0.0, 1.0, -1.0, 0.5, 12.75], [3.0, -0.25, 0.015625, -2.75, 0.0]])
RAMP = ((torch.arange(900, dtype=torch.float32) * 37 % 1000 - 450) / 8).view(3, 300)
GOLDEN = {
    "fp32": "000000000000803f000080bf0000003f00004c4100004040000080be0000803c000030c000000000",
    "bf16": "0000803f80bf003f4c41404080be803c30c00000",
    "int8": "ce3d000af6057fc23c7ff5018c00",
}
GOLDEN_RAMP = {
    "fp32": "46eacd7f23443d22a4e625831f681ab3",
    "bf16": "ff7d044dd779cfae76e752e1ffdbdd44",
    "int8": "504fad90f3a250d830f4b0b5e514578f",
}


def round_trip(name: str, values: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    codec = get_activation_codec(name)
    return codec.decode(codec.encode(values), shape=values.shape, dtype=dtype)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks_of(hidden: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each block of a token."""
    return [(start, min(start + 128, hidden)) for start in range(0, hidden, 128)]


def bytes_by_hand(name: str, shape: Sequence[int]) -> int:
    numbers, tokens = math.prod(shape), math.prod(shape[:-1])
    if name in ("fp32", "bf16"):
        return numbers * {"fp32": 4, "bf16": 2}[name]
    return tokens * 2 * len(blocks_of(shape[-1])) + numbers


def token_by_hand(name: str, payload: bytes, hidden: int) -> list[float]:
    """Decode a token from the layout in docs/protocol.md, without the codec."""
    if name == "fp32":
        return list(struct.unpack(f"<{hidden}f", payload))
    if name == "bf16":
        return bf16(payload)
    blocks = blocks_of(hidden)
    scales, values, place = bf16(payload[: 2 * len(blocks)]), [], 2 * len(blocks)
    for scale, (start, stop) in zip(scales, blocks, strict=True):
        codes = struct.unpack_from(f"<{stop - start}b", payload, place)
        values += [code * scale for code in codes]
        place += len(codes)
    assert place == len(payload)
    return values


def check_bounds(name: str, values: Tensor, decoded: Tensor) -> None:
    """Check every block of every token of (tokens, hidden) against the error bound of the codec."""
    exact, error = values.double(), decoded.double() - values.double()
    assert torch.isfinite(decoded).all()
    if name == "fp32":
        assert not error.any()
    elif name == "bf16":
        assert (error.abs() <= exact.abs() * 2**-8 + 2.0**-134).all()
    else:
        for start, stop in blocks_of(values.shape[-1]):
            for x, e in zip(exact[:, start:stop], error[:, start:stop], strict=True):
                scale = max(float(x.abs().max()) / MAX_CODE, TINY) * (1 + 2**-7)  # the scale is rounded up to bf16
                assert float(e.abs().max()) <= scale / 2 + 2**-13 * float(x.norm())


def test_an_unknown_codec_is_refused_with_the_known_names() -> None:
    assert [get_activation_codec(name).name for name in ACTIVATION_CODEC_NAMES] == ["fp32", "bf16", "int8"]
    with pytest.raises(ValueError, match="unknown activation codec 'int3'; the known codecs are fp32, bf16, int8"):
        get_activation_codec("int3")


@each_codec
def test_the_bytes_are_golden_and_follow_the_written_layout(name: str) -> None:
    codec = get_activation_codec(name)
    assert codec.encode(VALUES).tobytes() == bytes.fromhex(GOLDEN[name])
    assert blake3(codec.encode(RAMP)).hexdigest()[:32] == GOLDEN_RAMP[name]
    for values in (VALUES, RAMP):
        payload, (tokens, hidden) = codec.encode(values), values.shape
        size = len(payload) // tokens
        by_hand = [token_by_hand(name, payload[i * size : (i + 1) * size].tobytes(), hidden) for i in range(tokens)]
        assert codec.decode(payload, shape=values.shape, dtype=torch.float32).tolist() == by_hand


@settings(deadline=None, max_examples=100)
@given(name=codec_names, leading=st.lists(st.integers(0, 3), max_size=3), hidden=hidden_sizes)
def test_the_size_follows_from_the_shape(name: str, leading: list[int], hidden: int) -> None:
    codec, shape = get_activation_codec(name), (*leading, hidden)
    payload = codec.encode(torch.ones(shape))
    assert payload.nbytes == codec.num_bytes(shape) == bytes_by_hand(name, shape)
    decoded = codec.decode(payload, shape=shape, dtype=torch.float32)
    assert decoded.shape == shape


@settings(deadline=None, max_examples=200)
@given(name=codec_names, hidden=hidden_sizes, seed=st.integers(0, 2**31), data=st.data())
def test_errors_stay_within_the_bound(name: str, hidden: int, seed: int, data: st.DataObject) -> None:
    """Values have any magnitude, and a third of the first token is zero."""
    exponents = data.draw(st.lists(st.integers(-140, 118), min_size=1, max_size=4))
    values = normal(3, hidden, seed=seed).clamp(-2, 2).double()
    values *= torch.tensor([2.0**e for e in exponents]).repeat(hidden)[:hidden]
    values[0, ::3] = 0
    values = values.float()
    check_bounds(name, values, round_trip(name, values))


def test_a_large_channel_costs_only_its_own_block() -> None:
    values = normal(4, 512)
    with_outlier = values.clone()
    with_outlier[1, 200] = 1000.0
    changed = round_trip("int8", values) != round_trip("int8", with_outlier)
    assert changed[1, 128:256].any()
    changed[1, 128:256] = False
    assert not changed.any()


@each_codec
@pytest.mark.parametrize("shape", [(64, 4096), (2, CPU_CHUNK_ELEMENTS + 3)], ids=["tokens", "wider than a chunk"])
def test_relative_error_for_a_gaussian(name: str, shape: tuple[int, int]) -> None:
    values = normal(*shape)
    error = float((round_trip(name, values) - values).norm() / values.norm())
    assert GAUSSIAN_ERROR[name] / 4 <= error <= GAUSSIAN_ERROR[name]


@each_codec
def test_tokens_are_coded_one_by_one(name: str) -> None:
    """The tokens from any one on are coded as if they came first, even if they span several chunks."""
    codec, hidden = get_activation_codec(name), 300
    values = normal(CPU_CHUNK_ELEMENTS // hidden + 5, hidden)
    payload, token_bytes = codec.encode(values), codec.num_bytes((hidden,))
    decoded = codec.decode(payload, shape=values.shape, dtype=torch.float32)
    for start in range(0, len(values), 250):
        part = payload[start * token_bytes :]
        assert part == codec.encode(values[start:])
        alone = codec.decode(part, shape=values[start:].shape, dtype=torch.float32)
        assert torch.equal(decoded[start:], alone)


@each_codec
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_bytes_depend_on_the_fp32_values_only(name: str, dtype: torch.dtype) -> None:
    """Not on strides, gradients, autocast (stages encode within a forward pass in bf16), or later changes."""
    codec, values = get_activation_codec(name), normal(40, 3, 200).to(dtype).permute(1, 2, 0)
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
    again = codec.decode(memoryview(writable), shape=values.shape, dtype=torch.float32)
    writable[:] = bytes(len(writable))
    assert torch.equal(decoded, again.to(dtype)), "and so have the values"


@each_codec
@pytest.mark.parametrize(("bad", "place"), [(NAN, (0, 0, 0)), (INF, (1, 2, 150)), (-INF, (1, 0, 299))])
def test_encode_names_the_element_that_is_not_finite(name: str, bad: float, place: tuple[int, int, int]) -> None:
    values = normal(2, 3, 300)
    values[place] = bad
    index = int(torch.arange(1800).view(2, 3, 300)[place])
    with pytest.raises(ValueError, match=re.escape(f"element {index} of 1800 is {bad}, which is not finite")):
        get_activation_codec(name).encode(values)


@each_codec
@pytest.mark.parametrize("value", [3.4e38, 1e300])
def test_encode_refuses_what_its_own_decoder_would_refuse(name: str, value: float) -> None:
    values = torch.tensor([[1.0, value, 2.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match=f"element 1 of 3 is .*, which is too large for {name}"):
        get_activation_codec(name).encode(values)


@each_codec
@pytest.mark.parametrize("hidden", [1, 128, 130])
def test_large_finite_values_are_carried(name: str, hidden: int) -> None:
    values = torch.full((2, hidden), LARGEST_CODED)
    values[1] = -values[1]
    check_bounds(name, values, round_trip(name, values))


def test_fp16_saturates() -> None:
    for name in ACTIVATION_CODEC_NAMES:
        decoded = round_trip(name, torch.tensor([[1e6, -1e6]]), dtype=torch.float16)
        assert decoded.abs().max() == torch.finfo(torch.float16).max
        assert torch.isfinite(decoded).all()


@each_codec
def test_what_is_no_tensor_of_activations_is_refused(name: str) -> None:
    codec = get_activation_codec(name)
    for values in (torch.tensor(1.0), torch.ones(2, 3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="activations"):
            codec.encode(values)
    for shape in ((), (-1, 5), (3, -1)):
        for call in (codec.num_bytes, lambda shape: codec.decode(b"", shape=shape, dtype=torch.float32)):
            with pytest.raises(ValueError, match="shape"):
                call(shape)


@settings(deadline=None, max_examples=100)
@given(name=codec_names, hidden=st.integers(0, 300), length=st.integers(0, 2500))
def test_decode_refuses_every_other_length(name: str, hidden: int, length: int) -> None:
    codec = get_activation_codec(name)
    expected = codec.num_bytes((2, hidden))
    length += length == expected
    for call in (codec.check, lambda payload, shape: codec.decode(payload, shape=shape, dtype=torch.float32)):
        with pytest.raises(CorruptPayload, match=f"must have {expected} bytes, but they have {length}"):
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
    codec = get_activation_codec(name)
    size = codec.num_bytes((hidden,))
    payload = data.draw(st.binary(min_size=size, max_size=size))
    try:
        decoded = codec.decode(payload, shape=(hidden,), dtype=dtype)
    except NotFinite:
        with pytest.raises(NotFinite):
            codec.check(payload, shape=(hidden,))
    else:
        codec.check(payload, shape=(hidden,))
        assert torch.isfinite(decoded).all()


def test_every_scale_gives_bounded_values_or_is_refused() -> None:
    """The payloads have every seventh bf16 pattern as scale, and the largest code that a byte can hold."""
    codec, n = get_activation_codec("int8"), BLOCK_CHANNELS
    codes = bytes([0x80]) * n  # -128
    num_good = 0
    for bits in range(0, 65_536, 7):
        payload = struct.pack("<H", bits) + codes
        try:
            decoded = codec.decode(payload, shape=(n,), dtype=torch.bfloat16)
        except NotFinite:
            continue
        num_good += 1
        assert float(decoded.abs().max()) <= LARGEST
    largest = 0x7F7F - 128 * 7  # the bits of LARGEST / 2^7
    assert num_good == len([bits for bits in range(0, 65_536, 7) if 0x0080 <= bits <= largest])


@pytest.mark.parametrize("bits", [0x0000, 0x8000, 0x007F, 0xBF80, 0x7F80, 0x7FC0, 0x7F00])
def test_a_scale_that_no_encoder_writes_is_refused_in_any_block(bits: int) -> None:
    codec = get_activation_codec("int8")
    for block in range(3):
        payload = bytearray(codec.encode(torch.ones(2, 300)))
        struct.pack_into("<H", payload, len(payload) // 2 + 2 * block, bits)
        with pytest.raises(NotFinite, match="scale"):
            codec.check(bytes(payload), shape=(2, 300))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_codec
def test_a_gpu_codes_as_the_cpu_does(name: str) -> None:
    codec, values, gpu = get_activation_codec(name), normal(64, 1000), torch.device("cuda")
    payload = codec.encode(values.to(gpu))
    check_bounds(name, values, codec.decode(payload, shape=values.shape, dtype=torch.float32))
    decoded = codec.decode(payload, shape=values.shape, dtype=torch.float32, device=gpu)
    assert decoded.device.type == "cuda"
    assert torch.equal(decoded.cpu(), codec.decode(payload, shape=values.shape, dtype=torch.float32))
