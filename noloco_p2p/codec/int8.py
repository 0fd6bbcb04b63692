"""Encode tensors with one byte per element, in blocks of elements that share a scale.

Each token is cut into blocks; the last block may be shorter. The bytes of a token hold one bf16 scale for each block,
followed by one code for each element. A decoded value is `code * scale`. Its error is at most half the scale, and the
scale is at most max|x| / 127 * (1 + 2^-7) over the block, so an element that is far larger than the others costs
precision only in its own block.

* A scale is the largest magnitude in the block divided by MAX_CODE, rounded *up* to bf16. No code can exceed MAX_CODE,
  so nothing is clipped.
* A scale is never smaller than the smallest normal fp32 number, not even for a block of zeros. Its reciprocal is
  therefore finite, and machines that flush subnormal numbers to zero get the same result.
* The product of a code (8 bits) and a bf16 scale (8 significant bits) is exact in fp32, so every machine decodes the
  same numbers.

Activations and gradients are rounded to the nearest code, as weights are. Stochastic rounding would be unbiased, but it
would increase the error of weight gradients. The errors of nearest rounding do not add up over tokens, because the
signs of gradients vary from token to token (benchmarks/results/activation_codecs.txt).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from noloco_p2p.codec.base import (
    CPU,
    LARGEST,
    as_tensor,
    as_tokens,
    refused_value,
    saturated,
    tokens_and_hidden,
    within,
)
from noloco_p2p.errors import NotFinite

MAX_CODE = 127
SCALE_BYTES = 2
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
LARGEST_SCALE = LARGEST / (MAX_CODE + 1)  # codes of a payload reach -(MAX_CODE + 1)

# On a CPU, small chunks keep the working set in a core's cache. An accelerator is faster with few, large kernels.
CPU_CHUNK_ELEMENTS, ACCELERATOR_CHUNK_ELEMENTS = 1 << 18, 1 << 24


@dataclass(frozen=True, slots=True)
class Int8Codec:
    """A codec with integer codes from -MAX_CODE to MAX_CODE, and one bf16 scale per block of `block_elements`."""

    block_elements: int
    name: str = "int8"

    def num_bytes(self, shape: Sequence[int]) -> int:
        num_tokens, hidden = tokens_and_hidden(shape)
        return num_tokens * (self._scale_bytes(hidden) + hidden)

    def encode(self, values: Tensor) -> memoryview:
        tokens = as_tokens(values)
        num_tokens, hidden = tokens.shape
        scales_end = self._scale_bytes(hidden)
        coded = torch.empty(num_tokens, scales_end + hidden, dtype=torch.uint8, device=values.device)
        for place in _chunks(num_tokens, hidden, device=values.device):
            blocks = self._blocks(tokens[place])
            scales = _block_scales(torch.maximum(blocks.amax(dim=2), -blocks.amin(dim=2)))
            blocks.mul_(scales.reciprocal()[:, :, None]).round_()
            coded[place, :scales_end].copy_(scales.to(torch.bfloat16).view(torch.uint8))
            coded[place, scales_end:].view(torch.int8).copy_(blocks.flatten(1)[:, :hidden])
        coded = coded.cpu()
        if not _are_valid(self._scales(coded, hidden)):  # a NaN or infinity makes the scale of its block invalid
            raise refused_value(values, name=self.name)
        return coded.flatten().numpy().data

    def check(self, payload: bytes | memoryview, *, shape: Sequence[int]) -> None:
        self._checked(payload, shape)  # any code is valid, so only the scales are checked

    def decode(
        self,
        payload: bytes | memoryview,
        *,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> Tensor:
        coded = self._checked(payload, shape).to(device)
        num_tokens, hidden = tokens_and_hidden(shape)
        values = torch.empty(num_tokens, hidden, dtype=dtype, device=device)
        for place in _chunks(num_tokens, hidden, device=values.device):
            blocks = self._blocks(coded[place, self._scale_bytes(hidden) :].view(torch.int8))
            blocks.mul_(self._scales(coded[place], hidden)[:, :, None])
            values[place].copy_(saturated(blocks.flatten(1)[:, :hidden], dtype=dtype))
        return values.view(*shape)

    def _checked(self, payload: bytes | memoryview, shape: Sequence[int]) -> Tensor:
        """Check a payload, and return it on the CPU with shape (tokens, bytes per token)."""
        num_tokens, hidden = tokens_and_hidden(shape)
        flat = as_tensor(payload, self.num_bytes(shape), name=self.name)
        coded = flat.view(num_tokens, self._scale_bytes(hidden) + hidden)
        if not _are_valid(self._scales(coded, hidden)):
            raise NotFinite(
                f"the {self.name} payload has a scale that is non-positive, subnormal, non-finite or too large; "
                "discard it"
            )
        return coded

    def _blocks(self, tokens: Tensor) -> Tensor:
        """Return a copy of (tokens, hidden) in fp32, with shape (tokens, blocks, block_elements).

        Zeros fill up the last block.
        """
        blocks = tokens.to(torch.float32, copy=True)
        if missing := -tokens.shape[1] % self.block_elements:
            blocks = pad(blocks, (0, missing))
        return blocks.unflatten(1, (blocks.shape[1] // self.block_elements, self.block_elements))

    def _scale_bytes(self, hidden: int) -> int:
        return SCALE_BYTES * -(-hidden // self.block_elements)

    def _scales(self, coded: Tensor, hidden: int) -> Tensor:
        """Return copies of the scales in fp32, with shape (tokens, blocks). They may start at odd addresses."""
        num_bytes = self._scale_bytes(hidden)
        scales = coded[:, :num_bytes].clone(memory_format=torch.contiguous_format)
        return scales.flatten().view(torch.bfloat16).float().view(len(coded), num_bytes // SCALE_BYTES)


def _block_scales(largest: Tensor) -> Tensor:
    """Return the scale of each block, given the largest magnitude in the block.

    The scales are bf16 values stored as fp32. The scale of a block whose magnitude is not finite is invalid.
    """
    scales = (largest / MAX_CODE).clamp_min_(SMALLEST_SCALE)
    # Round up to the next bf16 value. Its bits are the upper 16 bits of the fp32 value.
    scales.view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF)
    return scales


def _are_valid(scales: Tensor) -> bool:
    """Return whether all scales are normal, positive, and so small that no code can decode to infinity."""
    return within(scales, lowest=SMALLEST_SCALE, highest=LARGEST_SCALE)


def _chunks(num_tokens: int, hidden: int, *, device: torch.device) -> Iterator[slice]:
    """Yield the tokens to process one after another. Each token has `hidden` elements."""
    num_elements = CPU_CHUNK_ELEMENTS if device.type == "cpu" else ACCELERATOR_CHUNK_ELEMENTS
    step = max(1, num_elements // max(1, hidden))
    return (slice(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step))
