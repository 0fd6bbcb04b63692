"""Compute count sketches, which are linear maps from a flat vector to 64 numbers.

At each mark, all peers of a run use the same map. The map adds element i, with a sign, to one of SKETCH_SIZE buckets; a
hash of (run, mark, i) determines the sign and the bucket. On average over all hashes, the squared norm of a sketch
equals that of the vector, with a relative standard deviation of sqrt(2 / SKETCH_SIZE) = 18 %. Because the map is
linear, the same holds for distances between peers. See Charikar, Chen, Farach-Colton: Finding frequent items in data
streams (2002). Each mark has its own map, so the errors at two marks are independent, and the mean of two estimates is
more accurate than either of them. Sketches made at different marks cannot be compared.

A mark is a fraction of the schedule, in units of 1 / MARKS. AT_REST stands for the end of the schedule: it marks the
final weights of a peer that has stopped training.

The hash is a table of 2 x BLOCK_ELEMENTS bytes (the blake3 output stream of KEY, mark and run). The lowest six bits of
each byte are the bucket, and the highest bit is the sign. Each block b of the vector has its own sign and its own
starting offset in the table; both come from the blake3 hash of KEY, mark, run and b. A sketch takes 2 to 3 ns per
element on one core. Sums are computed in fp64.
"""

from __future__ import annotations

import math
import struct
from base64 import b85decode, b85encode
from dataclasses import dataclass
from functools import lru_cache

import torch
from blake3 import blake3
from torch import Tensor

SKETCH_SIZE = 64
MARKS = 1 << 24
LARGEST_MARK = 1 << 31  # for a peer that keeps training long after the end of its schedule
AT_REST = 0xFFFFFFFF
BLOCK_ELEMENTS = 32_768  # torch would split larger tensors among the threads that training needs
KEY = b"noloco_p2p sketch 2"
LARGEST = 32_767  # the largest of the 16-bit integers that are sent
LARGEST_STEP = 1e30  # keeps squares and their sums finite

_PACKED = struct.Struct(f"<Iff{SKETCH_SIZE}h")


@dataclass(frozen=True, slots=True)
class Sketch:
    """A sketch as a peer publishes it.

    `norm` is the Euclidean norm of the vector. The error of each number is uniformly distributed and at most half a
    `step`, so its mean square is step^2 / 12.
    """

    mark: int
    norm: float
    numbers: tuple[float, ...]
    step: float


def sketch(vector: Tensor, *, run: str, mark: int) -> Tensor:
    """Sketch a flat fp32 vector on the CPU, and return fp64 numbers of shape (SKETCH_SIZE,).

    `run` is the digest of the run's spec. The vector is read block by block, and no copy of its size is made.
    """
    key = KEY + struct.pack("<I", mark) + run.encode()
    buckets, signs = _table(key)
    sums = torch.zeros(SKETCH_SIZE, dtype=torch.float64)
    for block, values in enumerate(vector.split(BLOCK_ELEMENTS)):
        shift, sign = _place(key, block)
        window = slice(shift, shift + values.numel())
        sums.add_(torch.bincount(buckets[window], weights=values * signs[window], minlength=SKETCH_SIZE), alpha=sign)
    return sums


def norm(vector: Tensor) -> float:
    """Return the Euclidean norm of a flat fp32 vector, adding the sums of its blocks in fp64."""
    return math.sqrt(sum(float(values.square().sum()) for values in vector.split(BLOCK_ELEMENTS)))


def pack(values: Tensor, *, mark: int, norm: float) -> str:
    """Pack a sketch into 175 characters, or return an empty string if the vector is non-finite or all zeros.

    The characters are the Base85 encoding of the mark, the norm, the quantization step, and the numbers as 16-bit
    multiples of the step. The error is at most half a step, which is 1.5e-5 of the largest number, so distances as
    small as 1e-4 of the norm are preserved.
    """
    largest = float(values.abs().max())
    if not (largest < LARGEST_STEP and 0 < norm < LARGEST_STEP):
        return ""
    (step,) = struct.unpack("<f", struct.pack("<f", largest / LARGEST))
    integers = (values / step).round().clamp(-LARGEST, LARGEST).long().tolist() if step else [0] * SKETCH_SIZE
    return b85encode(_PACKED.pack(mark, norm, step, *integers)).decode()


def unpack(text: str) -> Sketch | None:
    """Unpack a sketch. Returns None for invalid text, because strangers can put any text in their records."""
    try:
        mark, norm, step, *integers = _PACKED.unpack(b85decode(text))
    except (ValueError, struct.error):
        return None
    if not (0 < norm < LARGEST_STEP and 0 <= step < LARGEST_STEP) or LARGEST_MARK < mark < AT_REST:
        return None
    return Sketch(mark, norm, tuple(step * integer for integer in integers), step)


@lru_cache(maxsize=4)
def _table(key: bytes) -> tuple[Tensor, Tensor]:
    """Return the buckets (int64) and signs (fp32), each of shape (2 * BLOCK_ELEMENTS,). Do not modify them."""
    data = torch.frombuffer(bytearray(blake3(key).digest(2 * BLOCK_ELEMENTS)), dtype=torch.uint8)
    return (data & (SKETCH_SIZE - 1)).long(), 1.0 - 2.0 * (data >> 7).float()


def _place(key: bytes, block: int) -> tuple[int, float]:
    """Return the offset of a block in the table, and the block's sign."""
    shift, sign = struct.unpack("<HB", blake3(key + struct.pack("<Q", block)).digest(3))
    return shift % BLOCK_ELEMENTS, 1.0 - 2.0 * (sign & 1)
