"""Encode vectors as bytes, chunk by chunk, and decode them. This package does no I/O.

Each section of a swap is one vector. It is cut into chunks of CHUNK_ELEMENTS elements; the last chunk may be shorter.
Each chunk is encoded separately, so neither partner ever holds a second fp32 copy of the vector. The codec and the
number of elements determine all sizes, so a receiver knows them before it reads any byte.
"""

from __future__ import annotations

from noloco_p2p.codec.base import CHUNK_ELEMENTS, Codec, Scratch, Sized
from noloco_p2p.codec.blocks import INT2, INT4, INT8
from noloco_p2p.codec.raw import BF16, FP32

__all__ = [
    "CHUNK_ELEMENTS",
    "CODEC_NAMES",
    "Codec",
    "Scratch",
    "chunk_bounds",
    "chunk_range",
    "get_codec",
    "num_chunks",
    "section_bytes",
]

CODECS: dict[str, Codec] = {codec.name: codec for codec in (FP32, BF16, INT8, INT4, INT2)}
CODEC_NAMES = tuple(CODECS)


def get_codec(name: str) -> Codec:
    """Return the codec that a run spec calls `name`. Raises ValueError for an unknown name."""
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}; the known codecs are {', '.join(CODEC_NAMES)}")
    return CODECS[name]


def num_chunks(num_elements: int) -> int:
    """Return the number of chunks in a section of `num_elements` elements. An empty section has no chunks."""
    if num_elements < 0:
        raise ValueError(f"a section cannot have {num_elements} elements")
    return -(-num_elements // CHUNK_ELEMENTS)


def chunk_range(num_elements: int, index: int) -> tuple[int, int]:
    """Return the range (start, stop) of elements in chunk `index` of a section."""
    start = index * CHUNK_ELEMENTS
    return start, min(start + CHUNK_ELEMENTS, num_elements)


def chunk_bounds(num_elements: int) -> list[tuple[int, int]]:
    """Return the (start, stop) of each chunk, in order and without gaps."""
    return [chunk_range(num_elements, index) for index in range(num_chunks(num_elements))]


def section_bytes(codec: Sized, num_elements: int) -> int:
    """Return the total size of the payloads of all chunks in a section."""
    whole, rest = divmod(num_elements, CHUNK_ELEMENTS)
    num_chunks(num_elements)  # raises for a negative number
    return whole * codec.num_bytes(CHUNK_ELEMENTS) + (codec.num_bytes(rest) if rest else 0)
