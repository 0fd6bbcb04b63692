"""A count sketch: a linear map from a flat vector to 64 numbers, the same for all peers of a run at one mark.

Element i goes with a sign into one of SKETCH_SIZE buckets; a hash of (run, mark, i) gives sign and bucket. The squared
norm of a sketch is, in the mean over hashes, that of the vector, with a relative standard deviation of sqrt(2 /
SKETCH_SIZE) = 18 %. As the map is linear, that also holds for distances between peers. Charikar, Chen, Farach-Colton:
Finding frequent items in data streams (2002). Each mark has its own map, so the errors at two marks are independent and
their mean is better than either. Sketches of different marks cannot be compared.

A mark is a fraction of the schedule in units of 1 / MARKS. AT_REST stands for its end: it marks the final weights of a
peer that has stopped training.

The hash is a table of 2 x BLOCK_ELEMENTS bytes (the output stream of blake3 of KEY, mark and run). Six bits of each
byte are the bucket, the highest one is the sign. Block b of the vector reads the table from its own offset, with its
own sign, both from blake3 of KEY, mark, run and b. It takes 2 to 3 ns per element on one core; sums are in fp64.
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
BLOCK_ELEMENTS = 32_768  # torch splits larger tensors among threads, which belong to training
KEY = b"noloco_p2p sketch 2"
LARGEST = 32_767  # of the 16-bit integers that travel
LARGEST_STEP = 1e30  # so that squares and their sums stay finite

_PACKED = struct.Struct(f"<Iff{SKETCH_SIZE}h")


@dataclass(frozen=True, slots=True)
class Sketch:
    """What a peer publishes.

    norm: Euclidean norm of the vector. Each number is off by up to half a `step`, uniformly: step^2 / 12 in mean
    square.
    """

    mark: int
    norm: float
    numbers: tuple[float, ...]
    step: float


def sketch(vector: Tensor, *, run: str, mark: int) -> Tensor:
    """Sketch a flat fp32 vector on the CPU: fp64, shape (SKETCH_SIZE,). `run`: the digest of the run's spec.

    The vector is read block by block, and no copy of its size is made.
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
    """The Euclidean norm of a flat fp32 vector, summed in fp64 over blocks."""
    return math.sqrt(sum(float(values.square().sum()) for values in vector.split(BLOCK_ELEMENTS)))


def pack(values: Tensor, *, mark: int, norm: float) -> str:
    """Pack a sketch into 175 characters; empty when it is not finite or all zeros.

    They are Base85 of the mark, the norm, the step between two 16-bit integers, and the integers. The error is at most
    half a step, 1.5e-5 of the largest number, so that distances of 1e-4 of the norm survive.
    """
    largest = float(values.abs().max())
    if not (largest < LARGEST_STEP and 0 < norm < LARGEST_STEP):
        return ""
    (step,) = struct.unpack("<f", struct.pack("<f", largest / LARGEST))
    integers = (values / step).round().clamp(-LARGEST, LARGEST).long().tolist() if step else [0] * SKETCH_SIZE
    return b85encode(_PACKED.pack(mark, norm, step, *integers)).decode()


def unpack(text: str) -> Sketch | None:
    """Unpack a sketch. Returns None for invalid text, because strangers write records."""
    try:
        mark, norm, step, *integers = _PACKED.unpack(b85decode(text))
    except (ValueError, struct.error):
        return None
    if not (0 < norm < LARGEST_STEP and 0 <= step < LARGEST_STEP) or LARGEST_MARK < mark < AT_REST:
        return None
    return Sketch(mark, norm, tuple(step * integer for integer in integers), step)


@lru_cache(maxsize=4)
def _table(key: bytes) -> tuple[Tensor, Tensor]:
    """Buckets (int64) and signs (fp32), shape (2 * BLOCK_ELEMENTS,), never changed."""
    data = torch.frombuffer(bytearray(blake3(key).digest(2 * BLOCK_ELEMENTS)), dtype=torch.uint8)
    return (data & (SKETCH_SIZE - 1)).long(), 1.0 - 2.0 * (data >> 7).float()


def _place(key: bytes, block: int) -> tuple[int, float]:
    """The offset of block `block` in the table, and its sign."""
    shift, sign = struct.unpack("<HB", blake3(key + struct.pack("<Q", block)).digest(3))
    return shift % BLOCK_ELEMENTS, 1.0 - 2.0 * (sign & 1)
