"""The promises of each codec, one row each, to which the tests hold every codec. A new codec adds a row."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from noloco_p2p.codec import CODEC_NAMES

# The inputs of the golden bytes and digests.
VALUES = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.25, 3.14159, 0.001, -2.75, 12.7])
RAMP = (torch.arange(300, dtype=torch.float32) - 150) / 7  # several blocks, the last one short
TINY = float(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True, slots=True)
class Promise:
    """What one codec promises.

    golden: the payload of VALUES, in hexadecimal. ramp_digest: 16 bytes of the BLAKE3 digest of the payload of RAMP.
    by_hand: decodes a payload of a number of elements without the codec. error_bound: maps exact fp64 values to the
    largest error of each. gaussian_error: largest loss of a normal vector, relative to its norm. largest: the codec can
    code any value up to this one. gaussian_length: norm of a decoded normal vector over its true norm. lone_error:
    relative error of a value that is alone in its block. keeps_zeros: zeros beside other values stay zero.
    """

    golden: str
    ramp_digest: str
    bytes_a_parameter: float
    by_hand: Callable[[bytes, int], list[float]]
    error_bound: Callable[[Tensor], Tensor]
    gaussian_error: float
    largest: float = 2.0**127
    gaussian_length: float = 1.0
    lone_error: float = 2.0**-7
    keeps_zeros: bool = True


def bf16(data: bytes) -> list[float]:
    """Decode bf16 values, each of which is the upper half of an fp32 value."""
    return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]


def blocks_by_hand(payload: bytes, num_elements: int, *, block: int, is_packed: bool) -> list[float]:
    """Decode bf16 scales and the codes after them; packed codes start with the low halves of all bytes."""
    num_blocks = -(-num_elements // block)
    scales = bf16(payload[: 2 * num_blocks])
    codes = list(struct.unpack(f"<{len(payload) - 2 * num_blocks}b", payload[2 * num_blocks :]))
    if is_packed:
        low = [(code + 8) % 16 - 8 for code in codes]
        high = [(code - part) // 16 for code, part in zip(codes, low, strict=True)]
        codes = (low + high)[:num_elements]
    return [code * scales[i // block] for i, code in enumerate(codes)]


def odd_by_hand(payload: bytes, num_elements: int) -> list[float]:
    """Decode the bf16 scales of int2 and the signed fields of two bits after them, lowest bits first.

    A field c of byte i at position j means code 2 c + 1 of element i + j * number of bytes.
    """
    num_blocks = -(-num_elements // 128)
    scales, fields = bf16(payload[: 2 * num_blocks]), payload[2 * num_blocks :]
    unsigned = [(byte >> 2 * j) % 4 for j in range(4) for byte in fields]
    codes = [2 * (field - 4 * (field >= 2)) + 1 for field in unsigned]
    return [code * scales[i // 128] for i, code in enumerate(codes[:num_elements])]


def clipped(exact: Tensor) -> Tensor:
    """Return the error bound of int2: one scale up to code 3, and beyond it the distance to that code."""
    if not len(exact):
        return exact
    scale = torch.cat([part.square().mean().sqrt().expand(len(part)) * 0.49785 for part in exact.split(128)])
    beyond = exact.abs() - 3 * scale
    # The scale is rounded up to bf16, and to the smallest normal fp32 number. Squares of values below 2^-63 may
    # underflow.
    return torch.maximum(scale, beyond) + 3 * scale * 2**-8 * (1 + 2**-10) + 2.0**-59


def half_a_step(exact: Tensor, *, block: int, max_code: int) -> Tensor:
    if not len(exact):
        return exact
    largest = torch.cat([part.abs().max().expand(len(part)) for part in exact.split(block)])
    scale = (largest / max_code).clamp_min(TINY) * (1 + 2**-7)  # the scale is rounded up to bf16
    return scale / 2 * (1 + 2**-13)  # plus fp32 rounding of up to max_code steps


PROMISES: Mapping[str, Promise] = {
    "fp32": Promise(
        golden="00000000 0000803f 000080bf 0000003f 000080be d00f4940 6f12833a 000030c0 33334b41",
        ramp_digest="177be7a2bdbdfa419a9adeea2edb0d41",
        bytes_a_parameter=4,
        by_hand=lambda payload, num_elements: list(struct.unpack(f"<{num_elements}f", payload)),
        error_bound=torch.zeros_like,
        gaussian_error=0.0,
    ),
    "bf16": Promise(
        golden="0000 803f 80bf 003f 80be 4940 833a 30c0 4b41",
        ramp_digest="d47511dfab6c8b576dfd88dbbbb5f1e6",
        bytes_a_parameter=2,
        by_hand=lambda payload, num_elements: bf16(payload),
        error_bound=lambda exact: exact.abs() * 2**-8 + 2.0**-134,  # half a unit in the last of 8 bits, plus subnormals
        gaussian_error=0.0020,
    ),
    "int8": Promise(
        golden="cd3d 00 0a f6 05 fe 1f 00 e5 7f",
        ramp_digest="0b1426a85977513626a43e8261734f34",
        bytes_a_parameter=1 + 2 / 256,
        by_hand=partial(blocks_by_hand, block=256, is_packed=False),
        error_bound=partial(half_a_step, block=256, max_code=127),
        gaussian_error=0.0075,
    ),
    "int4": Promise(
        golden="e93f 20 01 df 70 00",
        ramp_digest="75156c60b6b8213f2ecd165083cf229c",
        bytes_a_parameter=0.5 + 2 / 128,
        by_hand=partial(blocks_by_hand, block=128, is_packed=True),
        error_bound=partial(half_a_step, block=128, max_code=7),
        gaussian_error=0.125,
    ),
    "int2": Promise(
        golden="0f40 00 3c 13",
        ramp_digest="84b950907f0ffe26af0e273a8bc57aea",
        bytes_a_parameter=0.25 + 2 / 128,
        by_hand=odd_by_hand,
        error_bound=clipped,
        gaussian_error=0.35,
        gaussian_length=0.94,
        largest=2.0**60,
        lone_error=0.5,
        keeps_zeros=False,
    ),
}
assert set(PROMISES) == set(CODEC_NAMES), "a codec without a row here; add what it promises"
