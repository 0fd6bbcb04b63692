"""A count sketch: a flat vector -> 64 numbers, linear, the same map for all peers of a run.

Element i goes with a sign into one of SKETCH_SIZE buckets; sign and bucket are drawn by a hash of (run, i). The square
of a sketch's norm is, in the mean over hashes, that of the vector, with a relative standard deviation of
sqrt(2 / SKETCH_SIZE) = 18 %; as the map is linear, that holds for distances between peers, too. Charikar, Chen,
Farach-Colton: Finding frequent items in data streams (2002).

The hash: a table of 2 x BLOCK_ELEMENTS bytes (the output stream of blake3 of KEY and the run), six bits of each byte
the bucket, the highest one the sign. Block b of the vector uses the table from a place of its own on, with a sign of
its own, both from blake3 of KEY, run and b. 2 to 3 ns an element on one core; sums are in fp64.
"""

from __future__ import annotations

import math
import struct
from base64 import b64decode, b64encode
from functools import lru_cache

import torch
from blake3 import blake3
from torch import Tensor

SKETCH_SIZE = 64
BLOCK_ELEMENTS = 32_768  # torch splits what is larger among threads, which belong to training
KEY = b"noloco_p2p sketch 1"
LARGEST = 32_767  # of the 16-bit integers that travel
LARGEST_STEP = 1e30  # so that squares and their sums stay finite

_PACKED = struct.Struct(f"<f{SKETCH_SIZE}h")


def sketch(vector: Tensor, *, run: str) -> Tensor:
    """fp64, shape (SKETCH_SIZE,), of a flat fp32 vector on the CPU; `run`: the digest of the run's spec.

    The vector is read block by block, nothing of its size is made.
    """
    buckets, signs = _table(run)
    sums = torch.zeros(SKETCH_SIZE, dtype=torch.float64)
    for block, values in enumerate(vector.split(BLOCK_ELEMENTS)):
        shift, sign = _place(run, block)
        window = slice(shift, shift + values.numel())
        sums.add_(torch.bincount(buckets[window], weights=values * signs[window], minlength=SKETCH_SIZE), alpha=sign)
    return sums


def norm(vector: Tensor) -> float:
    """Euclidean norm of a flat fp32 vector, summed in fp64 over blocks."""
    return math.sqrt(sum(float(values.square().sum()) for values in vector.split(BLOCK_ELEMENTS)))


def pack(values: Tensor) -> str:
    """A sketch as 176 letters: the step between two 16-bit integers, then they, base64; empty if not finite.

    The error is at most half a step, 1.5e-5 of the largest number: distances of 1e-4 of the norm survive.
    """
    largest = float(values.abs().max())
    (step,) = struct.unpack("<f", struct.pack("<f", largest / LARGEST)) if largest < LARGEST_STEP else (math.inf,)
    if not step < LARGEST_STEP:
        return ""
    integers = (values / step).round().clamp(-LARGEST, LARGEST).long().tolist() if step else [0] * SKETCH_SIZE
    return b64encode(_PACKED.pack(step, *integers)).decode()


def unpack(text: str) -> tuple[list[float], float] | None:
    """The numbers of a packed sketch and the step between two of them; None when it is none: strangers write records.

    The numbers are off by up to half a step, evenly spread, which is step^2 / 12 in the mean square.
    """
    try:
        step, *integers = _PACKED.unpack(b64decode(text, validate=True))
    except (ValueError, struct.error):
        return None
    return ([step * number for number in integers], step) if 0 <= step < LARGEST_STEP else None


@lru_cache(maxsize=4)
def _table(run: str) -> tuple[Tensor, Tensor]:
    """Buckets (int64) and signs (fp32), shape (2 * BLOCK_ELEMENTS,); never changed."""
    data = torch.frombuffer(bytearray(blake3(KEY + run.encode()).digest(2 * BLOCK_ELEMENTS)), dtype=torch.uint8)
    return (data & (SKETCH_SIZE - 1)).long(), 1.0 - 2.0 * (data >> 7).float()


def _place(run: str, block: int) -> tuple[int, float]:
    """Where block `block` begins in the table, and its sign."""
    shift, sign = struct.unpack("<HB", blake3(KEY + run.encode() + struct.pack("<Q", block)).digest(3))
    return shift % BLOCK_ELEMENTS, 1.0 - 2.0 * (sign & 1)
