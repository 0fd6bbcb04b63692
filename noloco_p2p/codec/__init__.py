"""Encode vectors as bytes, chunk by chunk, and decode them. This package does no I/O.

A vector is cut into chunks of at most CHUNK_ELEMENTS elements. Each chunk is encoded separately, so neither partner
ever holds a second fp32 copy of the vector. The codec and the number of elements determine all sizes, so a receiver
knows them before it reads any byte.
"""

from __future__ import annotations

from noloco_p2p.codec.base import CHUNK_ELEMENTS, Codec
from noloco_p2p.codec.blocks import INT8
from noloco_p2p.codec.raw import BF16, FP32

__all__ = ["CHUNK_ELEMENTS", "CODECS", "Codec", "chunk_bounds", "get_codec", "vector_bytes"]

CODECS: dict[str, Codec] = {codec.name: codec for codec in (FP32, BF16, INT8)}


def get_codec(name: str) -> Codec:
    """Return the codec that a run spec calls `name`. Raises ValueError for an unknown name."""
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}; the known codecs are {', '.join(CODECS)}")
    return CODECS[name]


def chunk_bounds(num_elements: int) -> list[tuple[int, int]]:
    """Return the (start, stop) of each chunk of a vector, in order and without gaps."""
    starts = range(0, num_elements, CHUNK_ELEMENTS)
    return [(start, min(start + CHUNK_ELEMENTS, num_elements)) for start in starts]


def vector_bytes(codec: Codec, num_elements: int) -> int:
    """Return the total size of the payloads of all chunks of a vector."""
    return sum(codec.num_bytes(stop - start) for start, stop in chunk_bounds(num_elements))
