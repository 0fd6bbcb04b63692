"""int8 and int4: blocks of elements that share a scale.

Payload of a chunk of n elements: ceil(n / block) scales (bf16), then the codes. An element is `code * scale`.

* A scale is (largest magnitude of the block) / max_code, rounded *up* to bf16: no code is ever above max_code, so
  nothing clips and no clamp is needed. It is at least the smallest normal number (also for a block of zeros), so its
  reciprocal is finite and flushed subnormals change nothing.
* A code of up to 8 bits times a bf16 of 8 significant bits is exact in fp32: every machine decodes the same numbers.
* int4 packs element i of the first half of the chunk with element i of the second half, `low + 16 * high`, rather
  than neighbours: both halves are then plain runs of memory, which is what vector units like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Symmetric codes -max_code..max_code, `codes_a_byte` of them in a byte, one bf16 scale for `block_elements`."""

    name: str
    block_elements: int
    max_code: int
    codes_a_byte: int
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
        torch.abs(blocks, out=workspace)
        scales = block_scales(workspace.amax(dim=1), max_code=self.max_code)
        torch.mul(blocks, scales.reciprocal()[:, None], out=workspace)
        codes = workspace.round_().view(-1)[:num_elements]
        coded = out if values.device == out.device else torch.empty_like(out, device=values.device)
        scale_bytes, code_bytes = self._parts(coded, num_elements=num_elements)
        scale_bytes.copy_(scales)  # exact: they are bf16 values already
        self.pack(codes, code_bytes)
        if coded is not out:
            out.copy_(coded)
        if not self._scales_valid(self._parts(out, num_elements=num_elements)[0]):
            raise refused_value(values, name=self.name)  # NaN and infinity end up in the scale of their block

    def check(self, payload: bytes | memoryview, *, num_elements: int) -> None:
        self._checked(payload, num_elements=num_elements)  # any code is a number: the scales decide

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
        values[whole * self.block_elements :].mul_(scales[whole:])  # the short last block: one scale, or nothing
        return values

    def _checked(self, payload: bytes | memoryview, *, num_elements: int) -> tuple[Tensor, Tensor]:
        coded = payload_bytes(payload, codec=self, num_elements=num_elements)
        scales, code_bytes = self._parts(coded, num_elements=num_elements)
        if not self._scales_valid(scales):
            raise NotFinite(
                f"{self.name} chunk of {num_elements} elements has a scale that is not a positive number or overflows; "
                "discard the part"
            )
        return scales, code_bytes

    def _num_blocks(self, num_elements: int) -> int:
        return -(-num_elements // self.block_elements)

    def _as_blocks(self, values: Tensor) -> Tensor:
        """Shape (num_blocks, block_elements); a view, unless the last block is short and gets zeros."""
        missing = -values.numel() % self.block_elements
        return (pad(values, (0, missing)) if missing else values).view(-1, self.block_elements)

    def _scales_valid(self, scales: Tensor) -> bool:
        """Normal, positive, and `code * scale` finite for each code that a byte can hold (one more than max_code)."""
        return within(scales.float(), lowest=FLOAT32.tiny, highest=FLOAT32.max / (self.max_code + 1))

    def _parts(self, coded: Tensor, *, num_elements: int) -> tuple[Tensor, Tensor]:
        """Views of a payload: scales (bf16) and code bytes (int8)."""
        num_scale_bytes = SCALE_BYTES * self._num_blocks(num_elements)
        return coded[:num_scale_bytes].view(torch.bfloat16), coded[num_scale_bytes:].view(torch.int8)


def block_scales(largest: Tensor, *, max_code: int) -> Tensor:
    """bf16 values in fp32 from the largest magnitude of each block; not valid where that is not finite."""
    scales = (largest / max_code).clamp_min_(FLOAT32.tiny)
    scales.view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF)  # up to the next bf16: its bits are the upper 16
    return scales


def pack_bytes(codes: Tensor, code_bytes: Tensor) -> None:
    code_bytes.copy_(codes)


def unpack_bytes(code_bytes: Tensor, codes: Tensor, scratch: Scratch) -> None:
    codes.copy_(code_bytes)


def pack_nibbles(codes: Tensor, code_bytes: Tensor) -> None:
    """`codes` (n,) fp32 is overwritten; `code_bytes` has ceil(n / 2). The high code of an odd n's last byte is 0."""
    half = code_bytes.numel()
    codes[: codes.numel() - half].add_(codes[half:], alpha=16)  # at most 7 + 16 * 7 = 119: fits a signed byte
    code_bytes.copy_(codes[:half])


def unpack_nibbles(code_bytes: Tensor, codes: Tensor, scratch: Scratch) -> None:
    half = code_bytes.numel()
    nibbles = scratch.take("nibbles", half, dtype=torch.int8)
    torch.bitwise_left_shift(code_bytes, 4, out=nibbles).bitwise_right_shift_(
        4
    )  # extends the sign of the low four bits
    codes[:half].copy_(nibbles)
    torch.sub(code_bytes, nibbles, out=nibbles).bitwise_right_shift_(4)
    codes[half:].copy_(nibbles[: codes.numel() - half])


INT8 = BlockCodec(
    name="int8", block_elements=256, max_code=127, codes_a_byte=1, pack=pack_bytes, unpack=unpack_bytes
)  # 1.0078 bytes a parameter
INT4 = BlockCodec(
    name="int4", block_elements=128, max_code=7, codes_a_byte=2, pack=pack_nibbles, unpack=unpack_nibbles
)  # 0.5156 bytes a parameter
