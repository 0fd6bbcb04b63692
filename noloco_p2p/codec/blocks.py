"""Encode vectors in blocks of elements that share a scale, with the codec int8.

The payload of a chunk of n elements consists of ceil(n / 256) bf16 scales, followed by n signed bytes, the codes. A
decoded element is `code * scale`.

* The scale is the largest magnitude in the block divided by 127, rounded *up* to bf16. No code can exceed 127, so
  nothing is clipped.
* A scale is never smaller than the smallest normal fp32 number, not even for a block of zeros. Its reciprocal is
  therefore finite, and machines that flush subnormal numbers to zero get the same result.
* The product of a code (at most 8 bits) and a bf16 scale (8 significant bits) is exact in fp32, so every machine
  decodes the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from noloco_p2p.codec.base import check_num_elements, check_values, payload_bytes, refused_value, within
from noloco_p2p.errors import NotFinite

FLOAT32 = torch.finfo(torch.float32)
SCALE_BYTES = 2
SCALED_ELEMENTS = 256  # of a block
MAX_CODE = 127


class Int8Codec:
    """A codec with signed bytes and one bf16 scale per block, at 1.0078 bytes per parameter."""

    name = "int8"

    def num_bytes(self, num_elements: int) -> int:
        check_num_elements(num_elements)
        return SCALE_BYTES * _num_scales(num_elements) + num_elements

    def encode(self, values: Tensor) -> bytes:
        check_values(values)
        missing = -values.numel() % SCALED_ELEMENTS
        blocks = pad(values.detach().to(torch.float32), (0, missing)).view(-1, SCALED_ELEMENTS)
        scales = block_scales(blocks.abs().amax(dim=1), max_code=MAX_CODE)
        codes = (blocks * scales.reciprocal()[:, None]).round_().view(-1)[: values.numel()].to(torch.int8)
        stored = scales.to(torch.bfloat16).cpu()  # exact because they are already bf16 values
        if not _are_valid(stored):  # a NaN or infinity makes the scale of its block invalid
            raise refused_value(values, name=self.name)
        return stored.view(torch.uint8).numpy().tobytes() + codes.cpu().numpy().tobytes()

    def check(self, payload: bytes | memoryview, *, num_elements: int) -> None:
        self._checked(payload, num_elements=num_elements)  # any code is valid, so only the scales are checked

    def decode(self, payload: bytes | memoryview, *, num_elements: int) -> Tensor:
        scales, codes = self._checked(payload, num_elements=num_elements)
        values = codes.to(torch.float32)
        whole = num_elements // SCALED_ELEMENTS
        values[: whole * SCALED_ELEMENTS].view(whole, SCALED_ELEMENTS).mul_(scales[:whole, None])
        values[whole * SCALED_ELEMENTS :].mul_(scales[whole:])  # the last block, if it is short
        return values

    def _checked(self, payload: bytes | memoryview, *, num_elements: int) -> tuple[Tensor, Tensor]:
        """Return views of the scales (bf16) and the codes (int8)."""
        coded = payload_bytes(payload, codec=self, num_elements=num_elements)
        num_scale_bytes = SCALE_BYTES * _num_scales(num_elements)
        scales = coded[:num_scale_bytes].view(torch.bfloat16)
        if not _are_valid(scales):
            raise NotFinite(
                f"the {self.name} chunk of {num_elements} elements has a scale that is non-positive, subnormal, "
                "non-finite or too large"
            )
        return scales, coded[num_scale_bytes:].view(torch.int8)


def _num_scales(num_elements: int) -> int:
    return -(-num_elements // SCALED_ELEMENTS)


def _are_valid(scales: Tensor) -> bool:
    """Return whether all scales are normal, positive, and small enough to keep decoded values finite.

    Decoded values must be finite for every code that a byte can represent, down to -128.
    """
    return within(scales.float(), lowest=FLOAT32.tiny, highest=FLOAT32.max / (MAX_CODE + 1))


def block_scales(largest: Tensor, *, max_code: int) -> Tensor:
    """Return the scale of each block, given the largest magnitude in the block.

    The scales are bf16 values stored as fp32. The scale of a block whose magnitude is not finite is invalid.
    """
    scales = (largest / max_code).clamp_min_(FLOAT32.tiny)
    # Round up to the next bf16 value. Its bits are the upper 16 bits of the fp32 value.
    scales.view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF)
    return scales


INT8 = Int8Codec()
