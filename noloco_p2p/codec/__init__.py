"""Encode weights, activations and gradients as bytes, and decode them. This package does no I/O.

A vector of weights is cut into chunks of at most CHUNK_ELEMENTS elements. Each chunk is encoded separately, so neither
partner ever holds a second fp32 copy of the vector. The codec and the shape determine all sizes, so a receiver knows
them before it reads any byte.
"""

from __future__ import annotations

import torch

from noloco_p2p.codec.base import LARGEST, Codec, refused_value, within
from noloco_p2p.codec.int8 import Int8Codec
from noloco_p2p.codec.raw import RawCodec

__all__ = [
    "ACTIVATION_CODECS",
    "CHUNK_ELEMENTS",
    "CODECS",
    "LARGEST",
    "Codec",
    "chunk_bounds",
    "get_activation_codec",
    "get_codec",
    "refused_value",
    "within",
]

CHUNK_ELEMENTS = 262_144  # 1 MiB of fp32 fits in a core's cache, and an encoded chunk is a well-sized gRPC message

_RAW = (RawCodec("fp32", torch.float32), RawCodec("bf16", torch.bfloat16))
CODECS: dict[str, Codec] = {codec.name: codec for codec in (*_RAW, Int8Codec(block_elements=256))}
ACTIVATION_CODECS: dict[str, Codec] = {codec.name: codec for codec in (*_RAW, Int8Codec(block_elements=128))}


def get_codec(name: str) -> Codec:
    """Return the codec for weights that a run spec calls `name`. Raises ValueError for an unknown name."""
    return _get(name, CODECS)


def get_activation_codec(name: str) -> Codec:
    """Return the codec for activations that a run spec calls `name`. Raises ValueError for an unknown name."""
    return _get(name, ACTIVATION_CODECS)


def _get(name: str, codecs: dict[str, Codec]) -> Codec:
    if name not in codecs:
        raise ValueError(f"unknown codec {name!r}; the known codecs are {', '.join(codecs)}")
    return codecs[name]


def chunk_bounds(num_elements: int) -> list[tuple[int, int]]:
    """Return the (start, stop) of each chunk of a vector, in order and without gaps."""
    starts = range(0, num_elements, CHUNK_ELEMENTS)
    return [(start, min(start + CHUNK_ELEMENTS, num_elements)) for start in starts]
