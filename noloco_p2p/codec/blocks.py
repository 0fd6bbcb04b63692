"""Encode vectors with the codec int8, in blocks of elements that share a scale.

The payload of a chunk of n elements consists of one bf16 scale for each block of BLOCK_ELEMENTS, followed by n codes of
one byte. A decoded element is `code * scale`.

* A scale is the largest magnitude in the block divided by MAX_CODE, rounded *up* to bf16. No code can exceed MAX_CODE,
  so nothing is clipped.
* A scale is never smaller than the smallest normal fp32 number, not even for a block of zeros. Its reciprocal is
  therefore finite, and machines that flush subnormal numbers to zero get the same result.
* The product of a code (8 bits) and a bf16 scale (8 significant bits) is exact in fp32, so every machine decodes the
  same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from noloco_p2p.codec.base import check_num_elements, check_values, payload_bytes, refused_value, within
from noloco_p2p.errors import NotFinite

BLOCK_ELEMENTS = 256
MAX_CODE = 127
SCALE_BYTES = 2
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
LARGEST_SCALE = torch.finfo(torch.bfloat16).max / (MAX_CODE + 1)  # codes of a payload reach -(MAX_CODE + 1)


class Int8Codec:
    """A codec with integer codes from -MAX_CODE to MAX_CODE and one bf16 scale per block (1.0078 bytes per element)."""

    name = "int8"

    def num_bytes(self, num_elements: int) -> int:
        check_num_elements(num_elements)
        return _num_scale_bytes(num_elements) + num_elements

    def encode(self, values: Tensor) -> bytes:
        check_values(values)
        num_elements, padded = values.numel(), values.detach().to(torch.float32)
        if missing := -num_elements % BLOCK_ELEMENTS:
            padded = pad(padded, (0, missing))
        blocks = padded.view(-1, BLOCK_ELEMENTS)
        codes = torch.abs(blocks)
        scales = block_scales(codes.amax(dim=1))
        torch.mul(blocks, scales.reciprocal()[:, None], out=codes).round_()
        coded = torch.empty(self.num_bytes(num_elements), dtype=torch.uint8, device=values.device)
        scale_bytes, code_bytes = _parts(coded, num_elements)
        scale_bytes.copy_(scales)  # exact because they are already bf16 values
        code_bytes.copy_(codes.view(-1)[:num_elements])
        coded = coded.cpu()
        if not scales_valid(_parts(coded, num_elements)[0]):
            raise refused_value(values, name=self.name)  # a NaN or infinity makes the scale of its block invalid
        return coded.numpy().tobytes()

    def check(self, payload: bytes | memoryview, *, num_elements: int) -> None:
        self._checked(payload, num_elements=num_elements)  # any code is valid, so only the scales are checked

    def decode(self, payload: bytes | memoryview, *, num_elements: int) -> Tensor:
        scales, codes = self._checked(payload, num_elements=num_elements)
        values, num_whole = codes.to(torch.float32), num_elements // BLOCK_ELEMENTS
        whole, last = values.tensor_split([num_whole * BLOCK_ELEMENTS])
        whole.view(-1, BLOCK_ELEMENTS).mul_(scales[:num_whole, None])
        last.mul_(scales[num_whole:])  # the last block, if it is short
        return values

    def _checked(self, payload: bytes | memoryview, *, num_elements: int) -> tuple[Tensor, Tensor]:
        scales, codes = _parts(payload_bytes(payload, codec=self, num_elements=num_elements), num_elements)
        if not scales_valid(scales):
            raise NotFinite(
                f"the {self.name} chunk of {num_elements} elements has a scale that is non-positive, subnormal, "
                "non-finite or too large; discard it"
            )
        return scales, codes


def block_scales(largest: Tensor) -> Tensor:
    """Return the scale of each block, given the largest magnitude in the block.

    The scales are bf16 values stored as fp32. The scale of a block whose magnitude is not finite is invalid.
    """
    scales = (largest / MAX_CODE).clamp_min_(SMALLEST_SCALE)
    # Round up to the next bf16 value. Its bits are the upper 16 bits of the fp32 value.
    scales.view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF)
    return scales


def scales_valid(scales: Tensor) -> bool:
    """Return whether all scales are normal, positive, and so small that no code can decode to infinity."""
    return within(scales.float(), lowest=SMALLEST_SCALE, highest=LARGEST_SCALE)


def _num_scale_bytes(num_elements: int) -> int:
    return SCALE_BYTES * -(-num_elements // BLOCK_ELEMENTS)


def _parts(coded: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
    """Return views of the scales (bf16) and the codes (int8) in a payload."""
    place = _num_scale_bytes(num_elements)
    return coded[:place].view(torch.bfloat16), coded[place:].view(torch.int8)


INT8 = Int8Codec()
