"""Encode activations and their gradients, which travel between the stages of a pipeline.

A tensor has shape (..., hidden), where the last axis holds the channels of one token. The payload is a sequence of
encoded tokens of equal size, so its size depends only on the shape. Unlike the codecs of a swap, which encode a flat
vector in chunks, these codecs never let two tokens share a scale.

int8 and int4 cut the channels of a token into blocks of BLOCK_CHANNELS; the last block may be shorter. The bytes of a
token hold one bf16 scale for each block, followed by the codes of each block.

* int8: A decoded value is `code * scale`. Its error is at most half the scale, and the scale is at most max|x| / 127 *
  (1 + 2^-7) over the block.
* int4: A block x of n values is first rotated (see `hadamard.py`), and the rotated block y is encoded. A short last
  block is padded with zeros to a power of two that is at least 2, and the codes of all n rotated values are sent. Byte
  i of a block holds code[i] + 16 * code[i + n / 2]. The decoded values are `signs * (codes H) * scale`. The Euclidean
  norm of a block's error is at most n / 2 times the scale, and the scale is at most max|y| / (7 n) * (1 + 2^-7).
  Because max|y| <= sqrt(n) |x|, the norm of the block also bounds the scale.

These error bounds hold for each block of each token, so a channel that is far larger than the others costs precision
only in its own block. Rounding in fp32 adds at most 2^-13 of the block's norm to either error. A scale is never below
2^-126. Codes are small integers, so decoding to fp32 is exact and every machine decodes the same numbers.

Activations and gradients are rounded to the nearest code. Stochastic rounding would be unbiased, but it would increase
the error of weight gradients. The errors of nearest rounding do not add up over tokens, because the signs of gradients
vary from token to token (see benchmarks/activation_codecs.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from noloco_p2p.codec.base import CPU, refused_value, within
from noloco_p2p.codec.blocks import FLOAT32, SCALE_BYTES, block_scales
from noloco_p2p.codec.hadamard import LARGEST_ORDER, hadamard, signs
from noloco_p2p.errors import CorruptPayload, NotFinite

BLOCK_CHANNELS = LARGEST_ORDER
LARGEST = torch.finfo(torch.bfloat16).max  # the largest decoded value, which both fp32 and bf16 can represent

# On a CPU, small chunks keep the working set in a core's cache. An accelerator is faster with few, large kernels.
CPU_CHUNK_ELEMENTS, ACCELERATOR_CHUNK_ELEMENTS = 1 << 18, 1 << 24


class ActivationCodec(Protocol):
    """A stateless codec for activations that is deterministic in both directions."""

    @property
    def name(self) -> str:
        """Return the name of this codec in a run spec."""
        ...

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the exact size of a tensor's payload in bytes. Raises ValueError if `shape` is not (..., hidden)."""
        ...

    def encode(self, values: Tensor) -> memoryview:
        """Encode a tensor of shape (..., hidden) into a newly allocated payload.

        The tensor may have any floating-point dtype and be on any device; it is not changed. Encoding runs on the
        tensor's device and synchronizes once, to copy the encoded bytes to the CPU. Raises ValueError for any other
        kind of tensor, and for a value that is non-finite or too large for the codec. These checks protect the sender,
        because a receiver blames the sender for a bad frame.
        """
        ...

    def check(self, payload: bytes | memoryview, *, shape: Sequence[int]) -> None:
        """Raise the errors that `decode` would raise, without decoding. Use this for a frame that stays encoded."""
        ...

    def decode(
        self, payload: bytes | memoryview, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device = CPU
    ) -> Tensor:
        """Decode a payload to a new tensor with the given shape, dtype and device.

        Every value is finite; in fp16, values that are too large are clamped to the largest finite value. Raises
        CorruptPayload for a wrong length, and NotFinite for bytes that no encoder writes. The caller knows the sender
        and adds its name to the error.
        """
        ...


@dataclass(frozen=True, slots=True)
class RawActivationCodec:
    """A codec that rounds each element to `dtype` (to nearest even) and stores it in little-endian order."""

    name: str
    dtype: torch.dtype

    def num_bytes(self, shape: Sequence[int]) -> int:
        num_tokens, hidden = _num_tokens_and_hidden(shape)
        return num_tokens * hidden * self.dtype.itemsize

    def encode(self, values: Tensor) -> memoryview:
        tokens = _as_tokens(values)
        coded = torch.empty(tokens.shape, dtype=self.dtype, device=values.device).copy_(tokens).cpu()
        if not within(coded, lowest=-LARGEST, highest=LARGEST):
            raise refused_value(tokens.flatten(), name=self.name)
        return coded.flatten().view(torch.uint8).numpy().data

    def check(self, payload: bytes | memoryview, *, shape: Sequence[int]) -> None:
        self._checked(payload, shape=shape)

    def decode(
        self, payload: bytes | memoryview, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device = CPU
    ) -> Tensor:
        coded = self._checked(payload, shape=shape).to(device)
        out = torch.empty(*shape, dtype=dtype, device=device)
        return out.copy_(_saturated(coded, dtype=dtype).view(out.shape))

    def _checked(self, payload: bytes | memoryview, *, shape: Sequence[int]) -> Tensor:
        coded = _payload_bytes(payload, codec=self, shape=shape).view(self.dtype)
        if not within(coded, lowest=-LARGEST, highest=LARGEST):
            raise NotFinite(
                f"{self.name} activations contain NaN, infinity or a magnitude above {LARGEST:.3g}; discard them"
            )
        return coded


@dataclass(frozen=True, slots=True)
class _Span:
    """Adjacent blocks of equal width in each token, with their channels and their positions in the token's bytes."""

    channels: slice  # fewer than num_blocks * width if the last block is padded
    num_blocks: int
    width: int
    scale_bytes: slice
    code_bytes: slice


@dataclass(frozen=True, slots=True)
class BlockActivationCodec:
    """A codec with integer codes from -max_code to max_code and one bf16 scale per block.

    If `is_rotated` is true, each block is rotated first, and two codes share a byte.
    """

    name: str
    max_code: int
    is_rotated: bool

    def num_bytes(self, shape: Sequence[int]) -> int:
        num_tokens, hidden = _num_tokens_and_hidden(shape)
        return num_tokens * self._token_bytes(hidden)

    def encode(self, values: Tensor) -> memoryview:
        tokens = _as_tokens(values)
        num_tokens, hidden = tokens.shape
        coded = torch.empty(num_tokens, self._token_bytes(hidden), dtype=torch.uint8, device=values.device)
        for span in self._spans(hidden):
            for chunk in _chunks(num_tokens, span.num_blocks * span.width, device=values.device):
                self._encode_span(tokens, coded, span=span, chunk=chunk)
        coded = coded.cpu()
        if not self._scales_valid(coded, hidden=hidden):
            # a NaN or infinity makes the scale of its block invalid
            raise refused_value(tokens.flatten(), name=self.name)
        return coded.flatten().numpy().data

    def check(self, payload: bytes | memoryview, *, shape: Sequence[int]) -> None:
        self._checked(payload, shape=shape)  # any code is valid, so only the scales are checked

    def decode(
        self, payload: bytes | memoryview, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device = CPU
    ) -> Tensor:
        coded = self._checked(payload, shape=shape).to(device)
        num_tokens, hidden = _num_tokens_and_hidden(shape)
        values = torch.empty(num_tokens, hidden, dtype=dtype, device=device)
        for span in self._spans(hidden):
            for chunk in _chunks(num_tokens, span.num_blocks * span.width, device=values.device):
                self._decode_span(coded, values, span=span, chunk=chunk)
        return values.view(*shape)

    def _encode_span(self, tokens: Tensor, coded: Tensor, *, span: _Span, chunk: range) -> None:
        """Encode a chunk of `tokens` (tokens, hidden) into its place in `coded` (tokens, bytes per token)."""
        blocks = torch.empty(len(chunk), span.num_blocks, span.width, dtype=torch.float32, device=tokens.device)
        num_channels, flat = span.channels.stop - span.channels.start, blocks.flatten(1)
        flat[:, :num_channels].copy_(tokens[chunk.start : chunk.stop, span.channels])
        flat[:, num_channels:].zero_()
        if self.is_rotated:
            blocks = _times_hadamard(blocks.mul_(signs(chunk, span.width, tokens.device)))
        order = self._order(span)
        scales = block_scales(torch.maximum(blocks.amax(dim=2), -blocks.amin(dim=2)) / order, max_code=self.max_code)
        blocks.mul_((scales * order).reciprocal()[:, :, None]).round_()
        if self.is_rotated:
            low, high = blocks.chunk(2, dim=2)
            blocks = low.add_(high, alpha=16)  # at most 7 + 16 * 7 = 119, which fits in a signed byte
        coded[chunk.start : chunk.stop, span.scale_bytes].copy_(scales.to(torch.bfloat16).view(torch.uint8))
        _codes(coded, span=span, chunk=chunk).copy_(blocks)

    def _decode_span(self, coded: Tensor, values: Tensor, *, span: _Span, chunk: range) -> None:
        """Decode a chunk of `coded` into `values` (tokens, hidden)."""
        codes = _codes(coded, span=span, chunk=chunk)
        blocks = torch.empty(len(chunk), span.num_blocks, span.width, dtype=torch.float32, device=coded.device)
        if self.is_rotated:
            low, high = blocks.chunk(2, dim=2)
            torch.mul(low.copy_(codes), 1 / 16, out=high).round_()
            low.sub_(high, alpha=16)
            blocks = _times_hadamard(blocks).mul_(signs(chunk, span.width, coded.device))
        else:
            blocks.copy_(codes)
        blocks.mul_(_scales(coded[chunk.start : chunk.stop], span=span)[:, :, None])
        out = values[chunk.start : chunk.stop, span.channels]
        out.copy_(_saturated(blocks.flatten(1)[:, : out.shape[1]], dtype=values.dtype))

    def _checked(self, payload: bytes | memoryview, *, shape: Sequence[int]) -> Tensor:
        """Check a payload, and return it on the CPU with shape (tokens, bytes per token)."""
        num_tokens, hidden = _num_tokens_and_hidden(shape)
        coded = _payload_bytes(payload, codec=self, shape=shape).view(num_tokens, self._token_bytes(hidden))
        if not self._scales_valid(coded, hidden=hidden):
            raise NotFinite(
                f"{self.name} activations have a scale that is non-positive, subnormal, non-finite or too large; "
                "discard them"
            )
        return coded

    def _scales_valid(self, coded: Tensor, *, hidden: int) -> bool:
        """Return whether all scales are normal, positive, and small enough to keep decoded values within LARGEST.

        Decoded values must stay within LARGEST for every code that the payload can represent, up to max_code + 1 in
        magnitude.
        """
        return all(
            within(_scales(coded, span=span), lowest=FLOAT32.tiny, highest=self._largest_scale(span))
            for span in self._spans(hidden)
        )

    def _largest_scale(self, span: _Span) -> float:
        return LARGEST / (self.max_code + 1) / self._order(span)

    def _spans(self, hidden: int) -> list[_Span]:
        """Return one span for all blocks of BLOCK_CHANNELS, and another one for the last block if it is shorter."""
        num_whole, rest = divmod(hidden, BLOCK_CHANNELS)
        scales_end = SCALE_BYTES * (num_whole + bool(rest))
        whole_channels, whole_scales = num_whole * BLOCK_CHANNELS, num_whole * SCALE_BYTES
        codes_begin = scales_end + self._code_bytes(BLOCK_CHANNELS) * num_whole
        spans = []
        if num_whole:
            places = slice(0, whole_scales), slice(scales_end, codes_begin)
            spans.append(_Span(slice(0, whole_channels), num_whole, BLOCK_CHANNELS, *places))
        if rest:
            width = self._width(rest)
            places = slice(whole_scales, scales_end), slice(codes_begin, codes_begin + self._code_bytes(width))
            spans.append(_Span(slice(whole_channels, hidden), 1, width, *places))
        return spans

    def _token_bytes(self, hidden: int) -> int:
        return self._spans(hidden)[-1].code_bytes.stop if hidden else 0

    def _width(self, channels: int) -> int:
        """Return the number of codes in a block with this many channels."""
        return max(2, 1 << (channels - 1).bit_length()) if self.is_rotated else channels

    def _code_bytes(self, width: int) -> int:
        return width // 2 if self.is_rotated else width

    def _order(self, span: _Span) -> int:
        """Return the factor by which two rotations multiply a block."""
        return span.width if self.is_rotated else 1


ACTIVATION_CODECS: dict[str, ActivationCodec] = {
    codec.name: codec
    for codec in (
        RawActivationCodec(name="fp32", dtype=torch.float32),
        RawActivationCodec(name="bf16", dtype=torch.bfloat16),
        BlockActivationCodec(name="int8", max_code=127, is_rotated=False),  # 4160 bytes for 4096 channels
        BlockActivationCodec(name="int4", max_code=7, is_rotated=True),  # 2112 bytes
    )
}
ACTIVATION_CODEC_NAMES = tuple(ACTIVATION_CODECS)


def get_activation_codec(name: str) -> ActivationCodec:
    """Return the codec that a run spec calls `name`. Raises ValueError for an unknown name."""
    if name not in ACTIVATION_CODECS:
        raise ValueError(f"unknown activation codec {name!r}; the known codecs are {', '.join(ACTIVATION_CODEC_NAMES)}")
    return ACTIVATION_CODECS[name]


def _num_tokens_and_hidden(shape: Sequence[int]) -> tuple[int, int]:
    if not shape or min(shape) < 0:
        raise ValueError(f"activations must have the shape (..., hidden), not {tuple(shape)}")
    return math.prod(shape[:-1]), shape[-1]


def _as_tokens(values: Tensor) -> Tensor:
    """Return `values`, detached and reshaped to (tokens, hidden). The result is a view if possible."""
    num_tokens, hidden = _num_tokens_and_hidden(values.shape)
    if not values.is_floating_point():
        raise ValueError(f"activations must be floating-point numbers, not {values.dtype}")
    return values.detach().reshape(num_tokens, hidden)


def _payload_bytes(payload: bytes | memoryview, *, codec: ActivationCodec, shape: Sequence[int]) -> Tensor:
    """Return the payload as a uint8 tensor, which must not be changed. Raises CorruptPayload if its length is wrong."""
    view, expected = memoryview(payload), codec.num_bytes(shape)
    if view.nbytes != expected:
        raise CorruptPayload(
            f"{codec.name} activations of shape {tuple(shape)} must have {expected} bytes, "
            f"but they have {view.nbytes}; discard them"
        )
    if not expected:
        return torch.empty(0, dtype=torch.uint8)
    # Read-only memory is copied because torch warns about it.
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def _chunks(num_tokens: int, width: int, *, device: torch.device) -> Iterator[range]:
    """Yield the ranges of tokens to process one after another. Each token has `width` elements."""
    num_elements = CPU_CHUNK_ELEMENTS if device.type == "cpu" else ACCELERATOR_CHUNK_ELEMENTS
    step = max(1, num_elements // width)
    return (range(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step))


def _codes(coded: Tensor, *, span: _Span, chunk: range) -> Tensor:
    """Return a view of the int8 codes, with shape (tokens of the chunk, blocks of the span, bytes per block)."""
    code_bytes = coded[chunk.start : chunk.stop, span.code_bytes].view(torch.int8)
    return code_bytes.unflatten(1, (span.num_blocks, -1))


def _scales(coded: Tensor, *, span: _Span) -> Tensor:
    """Return the scales in fp32, with shape (tokens, blocks of the span).

    They are copied because they may start at an odd address.
    """
    return coded[:, span.scale_bytes].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()


def _times_hadamard(blocks: Tensor) -> Tensor:
    """Multiply `blocks` (tokens, blocks, width) by the Hadamard matrix in fp32, even under autocast.

    Autocast does not affect calls that pass `out`.
    """
    out = torch.empty_like(blocks)
    torch.mm(blocks.flatten(0, 1), hadamard(blocks.shape[2], blocks.device), out=out.flatten(0, 1))
    return out


def _saturated(values: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Clamp values that would be infinite in `dtype`.

    All decoded values are within LARGEST, so only fp16 needs this clamping.
    """
    largest = torch.finfo(dtype).max
    return values.float().clamp(-largest, largest) if largest < LARGEST else values  # bf16 cannot represent 65504
