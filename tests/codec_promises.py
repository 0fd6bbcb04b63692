"""The promises of each codec, one row each, to which the tests hold every codec. A new codec adds a row."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_p2p.codec import CODECS

# The inputs of the golden bytes and digests.
VALUES = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.25, 3.14159, 0.001, -2.75, 12.7])
RAMP = (torch.arange(300, dtype=torch.float32) - 150) / 7  # several blocks, the last one short
TINY = 2.0**-126  # the smallest scale
LARGEST = 2.0**127  # every codec can encode values of this magnitude


@dataclass(frozen=True, slots=True)
class Promise:
    """What one codec promises.

    golden: the payload of VALUES, in hexadecimal. ramp_digest: 16 bytes of the BLAKE3 digest of the payload of RAMP.
    by_hand: decodes a payload of a number of elements without the codec. error_bound: maps exact fp64 values to the
    largest error of each. gaussian_error: largest loss of a normal vector, relative to its norm.
    """

    golden: str
    ramp_digest: str
    bytes_a_parameter: float
    by_hand: Callable[[bytes, int], list[float]]
    error_bound: Callable[[Tensor], Tensor]
    gaussian_error: float


def bf16(data: bytes) -> list[float]:
    """Decode bf16 values, each of which is the upper half of an fp32 value."""
    return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]


def int8_by_hand(payload: bytes, num_elements: int) -> list[float]:
    """Decode the bf16 scales of blocks of 256, and the signed bytes after them."""
    num_scale_bytes = 2 * -(-num_elements // 256)
    scales, codes = bf16(payload[:num_scale_bytes]), struct.unpack(f"<{num_elements}b", payload[num_scale_bytes:])
    return [code * scales[i // 256] for i, code in enumerate(codes)]


def half_a_step(exact: Tensor) -> Tensor:
    """Return the error bound of int8."""
    if not len(exact):
        return exact
    largest = torch.cat([part.abs().max().expand(len(part)) for part in exact.split(256)])
    scale = (largest / 127).clamp_min(TINY) * (1 + 2**-7)  # the scale is rounded up to bf16
    return scale / 2 * (1 + 2**-13)  # plus fp32 rounding of up to 127 steps


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
        by_hand=int8_by_hand,
        error_bound=half_a_step,
        gaussian_error=0.0075,
    ),
}
assert set(PROMISES) == set(CODECS), "a codec without a row here; add what it promises"
