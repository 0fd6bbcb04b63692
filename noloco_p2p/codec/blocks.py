"""Encode vectors in blocks of elements that share a scale, with the codecs int8, int4 and int2.

The payload of a chunk of n elements consists of ceil(n / block) bf16 scales, followed by the codes. A decoded element
is `code * scale`.

* int8 and int4: The scale is the largest magnitude in the block divided by max_code, rounded *up* to bf16. No code can
  exceed max_code, so nothing is clipped.
* int2: The codes are odd (-3, -1, 1, 3), and elements beyond the outermost codes are clipped. The scale is 0.4979 times
  the root mean square of the block. For a Gaussian, this scale minimizes the mean squared error of four equidistant
  levels, at 0.1188 of the variance (J. Max, "Quantizing for minimum distortion", IRE Trans. Inf. Theory 6, 1960, table
  II). Levels with optimal spacing would reach 0.1175.
* A scale is never smaller than the smallest normal fp32 number, not even for a block of zeros. Its reciprocal is
  therefore finite, and machines that flush subnormal numbers to zero get the same result.
* The product of a code (at most 8 bits) and a bf16 scale (8 significant bits) is exact in fp32, so every machine
  decodes the same numbers.
* Codes that share a byte are not adjacent. int4 packs element i of the first half of the chunk with element i of the
  second half, as `low + 16 * high`. In the same way, int2 packs the four quarters of the chunk. Each of these parts is
  contiguous in memory, which suits vector units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from noloco_p2p.codec.base import (
    Scratch,
    check_num_elements,
    check_values,
    encoded,
    payload_bytes,
    refused_value,
    within,
)
from noloco_p2p.errors import NotFinite

FLOAT32 = torch.finfo(torch.float32)
SCALE_BYTES = 2
GAUSSIAN_SCALE = 0.9957 / 2  # the scale of int2, which is half a step, for a root mean square of 1
PLACES = torch.tensor([4.0, 16.0, 64.0])  # the weight of each two-bit field of a byte except the lowest one
TO_THE_TOP = torch.tensor([64, 16, 4, 1], dtype=torch.int8)  # the factor that moves each field to the top of the byte
LIFT = 0b10101010 - 128  # see `pack_odd`


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """A codec with symmetric codes from -max_code to max_code and one bf16 scale per `block_elements` elements.

    Each byte holds `codes_a_byte` codes. `quantize` is called with blocks of shape (num_blocks, block_elements), the
    number of elements, and a workspace of the same shape as the blocks. The last block is padded with zeros beyond the
    last element. `quantize` writes integers to the workspace, which `pack` reads and may overwrite. It returns the
    scales, which are bf16 values stored as fp32. The scale of a block with a non-finite value is invalid.
    """

    name: str
    block_elements: int
    max_code: int
    codes_a_byte: int
    quantize: Callable[[Tensor, int, Tensor], Tensor]
    pack: Callable[[Tensor, Tensor], None]
    unpack: Callable[[Tensor, Tensor, Scratch], None]

    def num_bytes(self, num_elements: int) -> int:
        check_num_elements(num_elements)
        return SCALE_BYTES * self._num_blocks(num_elements) + -(-num_elements // self.codes_a_byte)

    def encode(self, values: Tensor) -> bytes:
        return encoded(values, codec=self)

    def encode_into(self, values: Tensor, out: Tensor, *, scratch: Scratch) -> None:
        check_values(values)
        num_elements = values.numel()
        blocks = self._as_blocks(values.detach().to(torch.float32))
        workspace = scratch.take("blocks", blocks.numel(), dtype=torch.float32, device=values.device).view_as(blocks)
        scales = self.quantize(blocks, num_elements, workspace)
        coded = out if values.device == out.device else torch.empty_like(out, device=values.device)
        scale_bytes, code_bytes = self._parts(coded, num_elements=num_elements)
        scale_bytes.copy_(scales)  # exact because they are already bf16 values
        self.pack(workspace.view(-1), code_bytes)
        if coded is not out:
            out.copy_(coded)
        if not self._scales_valid(self._parts(out, num_elements=num_elements)[0]):
            raise refused_value(values, name=self.name)  # a NaN or infinity makes the scale of its block invalid

    def check(self, payload: bytes | memoryview, *, num_elements: int) -> None:
        self._checked(payload, num_elements=num_elements)  # any code is valid, so only the scales are checked

    def decode(
        self,
        payload: bytes | memoryview,
        *,
        num_elements: int,
        out: Tensor | None = None,
        scratch: Scratch | None = None,
    ) -> Tensor:
        scales, code_bytes = self._checked(payload, num_elements=num_elements)
        values = torch.empty(num_elements, dtype=torch.float32) if out is None else out
        self.unpack(code_bytes, values, scratch or Scratch())
        whole = num_elements // self.block_elements
        values[: whole * self.block_elements].view(whole, self.block_elements).mul_(scales[:whole, None])
        values[whole * self.block_elements :].mul_(scales[whole:])  # the last block, if it is short
        return values

    def _checked(self, payload: bytes | memoryview, *, num_elements: int) -> tuple[Tensor, Tensor]:
        coded = payload_bytes(payload, codec=self, num_elements=num_elements)
        scales, code_bytes = self._parts(coded, num_elements=num_elements)
        if not self._scales_valid(scales):
            raise NotFinite(
                f"the {self.name} chunk of {num_elements} elements has a scale that is non-positive, subnormal, "
                "non-finite or too large; discard the part"
            )
        return scales, code_bytes

    def _num_blocks(self, num_elements: int) -> int:
        return -(-num_elements // self.block_elements)

    def _as_blocks(self, values: Tensor) -> Tensor:
        """Return `values` with shape (num_blocks, block_elements), as a view unless the last block needs padding."""
        missing = -values.numel() % self.block_elements
        return (pad(values, (0, missing)) if missing else values).view(-1, self.block_elements)

    def _scales_valid(self, scales: Tensor) -> bool:
        """Return whether all scales are normal, positive, and small enough to keep decoded values finite.

        Decoded values must be finite for every code that the payload can represent, up to max_code + 1 in magnitude.
        """
        return within(scales.float(), lowest=FLOAT32.tiny, highest=FLOAT32.max / (self.max_code + 1))

    def _parts(self, coded: Tensor, *, num_elements: int) -> tuple[Tensor, Tensor]:
        """Return views of the scales (bf16) and the code bytes (int8) in a payload."""
        num_scale_bytes = SCALE_BYTES * self._num_blocks(num_elements)
        return coded[:num_scale_bytes].view(torch.bfloat16), coded[num_scale_bytes:].view(torch.int8)


def block_scales(largest: Tensor, *, max_code: int) -> Tensor:
    """Return the scale of each block, given the largest magnitude in the block.

    The scales are bf16 values stored as fp32. The scale of a block whose magnitude is not finite is invalid.
    """
    scales = (largest / max_code).clamp_min_(FLOAT32.tiny)
    # Round up to the next bf16 value. Its bits are the upper 16 bits of the fp32 value.
    scales.view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF)
    return scales


def quantize_largest(blocks: Tensor, num_elements: int, workspace: Tensor, *, max_code: int) -> Tensor:
    scales = block_scales(torch.abs(blocks, out=workspace).amax(dim=1), max_code=max_code)
    torch.mul(blocks, scales.reciprocal()[:, None], out=workspace).round_()
    return scales


def quantize_rms(blocks: Tensor, num_elements: int, workspace: Tensor) -> Tensor:
    """Round each element to the nearest code 2 c + 1, write its c (-2 to 1), and return the scales."""
    block_elements = blocks.shape[1]
    scales = torch.linalg.vector_norm(blocks, dim=1).mul_(GAUSSIAN_SCALE * block_elements**-0.5)
    if rest := num_elements % block_elements:
        scales[-1] *= (block_elements / rest) ** 0.5
    scales = scales.clamp_min_(FLOAT32.tiny).to(torch.bfloat16).to(torch.float32)
    torch.mul(blocks, scales.reciprocal().mul_(0.5)[:, None], out=workspace).floor_().clamp_(-2, 1)
    return scales


def pack_bytes(codes: Tensor, code_bytes: Tensor) -> None:
    code_bytes.copy_(codes[: code_bytes.numel()])


def unpack_bytes(code_bytes: Tensor, codes: Tensor, scratch: Scratch) -> None:
    codes.copy_(code_bytes)


def pack_nibbles(codes: Tensor, code_bytes: Tensor) -> None:
    """Pack two codes into each byte. If the number of codes is odd, the high code of the last byte is 0."""
    half = code_bytes.numel()
    packed = codes[:half].add_(codes[half : 2 * half], alpha=16)  # at most 7 + 16 * 7 = 119: fits in a signed byte
    code_bytes.copy_(packed)


def unpack_nibbles(code_bytes: Tensor, codes: Tensor, scratch: Scratch) -> None:
    half = code_bytes.numel()
    nibbles = scratch.take("nibbles", half, dtype=torch.int8)
    torch.bitwise_left_shift(code_bytes, 4, out=nibbles).bitwise_right_shift_(4)  # sign-extend the low four bits
    codes[:half].copy_(nibbles)
    torch.sub(code_bytes, nibbles, out=nibbles).bitwise_right_shift_(4)
    codes[half:].copy_(nibbles[: codes.numel() - half])


def pack_odd(codes: Tensor, code_bytes: Tensor) -> None:
    """Pack codes of the form 2 c + 1. `codes` holds the c of each code.

    Byte i stores the c of element i + j * len(code_bytes) in a signed field of two bits, which starts at bit 2 * j.
    Fields beyond the last element are 0.
    """
    size = code_bytes.numel()
    # One matrix product is faster than a sum for each field. It is exact because all values are whole numbers below
    # 256.
    packed = codes[:size].addmv_(codes[size : 4 * size].view(3, size).t(), PLACES.to(codes.device))
    # Adding 2 to every c makes all fields unsigned, and the sum is then their byte. Subtracting 128 gives a signed
    # byte whose topmost bit is flipped. Flipping the top bits of the other fields as well subtracts 2 again.
    code_bytes.copy_(packed.add_(LIFT)).bitwise_xor_(LIFT)


def unpack_odd(code_bytes: Tensor, codes: Tensor, scratch: Scratch) -> None:
    size = code_bytes.numel()
    fields = scratch.take("fields", 4 * size, dtype=torch.int8).view(4, size)
    # Each field is moved to the top of its byte and then back down by one bit less. This leaves 2 c plus an unused low
    # bit, which is set to 1. A product of signed bytes keeps the low eight bits and is faster than a shift.
    torch.mul(code_bytes, TO_THE_TOP[:, None], out=fields)
    codes.copy_(fields.bitwise_right_shift_(5).bitwise_or_(1).view(-1)[: codes.numel()])


INT8 = BlockCodec(
    name="int8",
    block_elements=256,
    max_code=127,
    codes_a_byte=1,
    quantize=partial(quantize_largest, max_code=127),
    pack=pack_bytes,
    unpack=unpack_bytes,
)  # 1.0078 bytes per parameter
INT4 = BlockCodec(
    name="int4",
    block_elements=128,
    max_code=7,
    codes_a_byte=2,
    quantize=partial(quantize_largest, max_code=7),
    pack=pack_nibbles,
    unpack=unpack_nibbles,
)  # 0.5156 bytes per parameter
INT2 = BlockCodec(
    name="int2",
    block_elements=128,
    max_code=3,
    codes_a_byte=4,
    quantize=quantize_rms,
    pack=pack_odd,
    unpack=unpack_odd,
)  # 0.2656 bytes per parameter
