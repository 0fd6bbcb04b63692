"""Encode activations and their gradients, which travel between the stages of a pipeline.

A tensor has shape (..., hidden), where the last axis holds the channels of one token. The payload is a sequence of
encoded tokens of equal size, so its size depends only on the shape. Unlike the codecs of a swap, which encode a flat
vector in chunks, these codecs never let two tokens share a scale.

int8 cuts the channels of a token into blocks of BLOCK_CHANNELS; the last block may be shorter. The bytes of a token
hold one bf16 scale for each block, followed by one code for each channel. A decoded value is `code * scale`. Its error
is at most half the scale, and the scale is at most max|x| / 127 * (1 + 2^-7) over the block.

This error bound holds for each block of each token, so a channel that is far larger than the others costs precision
only in its own block. Rounding in fp32 adds at most 2^-13 of the block's norm to the error. A scale is never below
2^-126. Codes are small integers, so decoding to fp32 is exact and every machine decodes the same numbers.

Activations and gradients are rounded to the nearest code. Stochastic rounding would be unbiased, but it would increase
the error of weight gradients. The errors of nearest rounding do not add up over tokens, because the signs of gradients
vary from token to token (benchmarks/results/activation_codecs.txt).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from noloco_p2p.codec.base import CPU, as_tensor, refused_value, within
from noloco_p2p.codec.blocks import SCALE_BYTES, block_scales, scales_valid
from noloco_p2p.errors import CorruptPayload, NotFinite

BLOCK_CHANNELS = 128
LARGEST = torch.finfo(torch.bfloat16).max  # the largest decoded value, which both fp32 and bf16 can represent

# On a CPU, small chunks keep the working set in a core's cache. An accelerator is faster with few, large kernels.
CPU_CHUNK_ELEMENTS, ACCELERATOR_CHUNK_ELEMENTS = 1 << 18, 1 << 24


class ActivationCodec(Protocol):
    """A stateless codec for activations that is deterministic in both directions. `name` is its name in a run spec."""

    @property
    def name(self) -> str: ...

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


class Int8ActivationCodec:
    """A codec with integer codes from -127 to 127 and one bf16 scale per block."""

    name = "int8"

    def num_bytes(self, shape: Sequence[int]) -> int:
        num_tokens, hidden = _num_tokens_and_hidden(shape)
        return num_tokens * (_scale_bytes(hidden) + hidden)

    def encode(self, values: Tensor) -> memoryview:
        tokens = _as_tokens(values)
        num_tokens, hidden = tokens.shape
        scales_end = _scale_bytes(hidden)
        coded = torch.empty(num_tokens, scales_end + hidden, dtype=torch.uint8, device=values.device)
        for place in _chunks(num_tokens, hidden, device=values.device):
            blocks = _blocks(tokens[place])
            scales = block_scales(torch.maximum(blocks.amax(dim=2), -blocks.amin(dim=2)))
            blocks.mul_(scales.reciprocal()[:, :, None]).round_()
            coded[place, :scales_end].copy_(scales.to(torch.bfloat16).view(torch.uint8))
            coded[place, scales_end:].view(torch.int8).copy_(blocks.flatten(1)[:, :hidden])
        coded = coded.cpu()
        if not scales_valid(_scales(coded, hidden)):  # a NaN or infinity makes the scale of its block invalid
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
        for place in _chunks(num_tokens, hidden, device=values.device):
            blocks = _blocks(coded[place, _scale_bytes(hidden) :].view(torch.int8))
            blocks.mul_(_scales(coded[place], hidden)[:, :, None])
            values[place].copy_(_saturated(blocks.flatten(1)[:, :hidden], dtype=dtype))
        return values.view(*shape)

    def _checked(self, payload: bytes | memoryview, *, shape: Sequence[int]) -> Tensor:
        """Check a payload, and return it on the CPU with shape (tokens, bytes per token)."""
        num_tokens, hidden = _num_tokens_and_hidden(shape)
        coded = _payload_bytes(payload, codec=self, shape=shape).view(num_tokens, _scale_bytes(hidden) + hidden)
        if not scales_valid(_scales(coded, hidden)):
            raise NotFinite(
                f"{self.name} activations have a scale that is non-positive, subnormal, non-finite or too large; "
                "discard them"
            )
        return coded


ACTIVATION_CODECS: dict[str, ActivationCodec] = {
    codec.name: codec
    for codec in (
        RawActivationCodec(name="fp32", dtype=torch.float32),
        RawActivationCodec(name="bf16", dtype=torch.bfloat16),
        Int8ActivationCodec(),  # 4160 bytes for 4096 channels
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
    expected, received = codec.num_bytes(shape), memoryview(payload).nbytes
    if received != expected:
        raise CorruptPayload(
            f"{codec.name} activations of shape {tuple(shape)} must have {expected} bytes, "
            f"but they have {received}; discard them"
        )
    return as_tensor(payload)


def _chunks(num_tokens: int, hidden: int, *, device: torch.device) -> Iterator[slice]:
    """Yield the tokens to process one after another. Each token has `hidden` channels."""
    num_elements = CPU_CHUNK_ELEMENTS if device.type == "cpu" else ACCELERATOR_CHUNK_ELEMENTS
    step = max(1, num_elements // max(1, hidden))
    return (slice(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step))


def _blocks(tokens: Tensor) -> Tensor:
    """Return a copy of (tokens, hidden) in fp32, with shape (tokens, blocks, BLOCK_CHANNELS).

    Zeros fill up the last block.
    """
    blocks = tokens.to(torch.float32, copy=True)
    if missing := -tokens.shape[1] % BLOCK_CHANNELS:
        blocks = pad(blocks, (0, missing))
    return blocks.unflatten(1, (blocks.shape[1] // BLOCK_CHANNELS, BLOCK_CHANNELS))


def _scale_bytes(hidden: int) -> int:
    return SCALE_BYTES * -(-hidden // BLOCK_CHANNELS)


def _scales(coded: Tensor, hidden: int) -> Tensor:
    """Return the scales in fp32, with shape (tokens, blocks). They are copied, as they may start at odd addresses."""
    scales = coded[:, : _scale_bytes(hidden)].clone(memory_format=torch.contiguous_format)
    return scales.flatten().view(torch.bfloat16).float().view(len(coded), _scale_bytes(hidden) // SCALE_BYTES)


def _saturated(values: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Clamp values that would be infinite in `dtype`.

    All decoded values are within LARGEST, so only fp16 needs this clamping.
    """
    largest = torch.finfo(dtype).max
    return values.float().clamp(-largest, largest) if largest < LARGEST else values  # bf16 cannot represent 65504
