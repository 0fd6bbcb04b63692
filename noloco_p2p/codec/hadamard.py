"""The rotation of the int4 activation codec: random signs, then a Hadamard matrix, the same on every machine.

A block x of n channels of token t becomes y = (signs[t mod NUM_SIGNS] * x) H, where H is Sylvester's matrix of order n:
H[i, j] = (-1)^(number of bits set in i & j). All entries are 1 or -1 and H H = n * identity, so the inverse is x =
signs * (y H) / n, and codes that are small integers stay integers.

The rotation spreads one large channel over all codes of its block. The signs differ from token to token for two
reasons. Without signs, the mean of a block would end up in a single number of y, and the scale of the block would be
too coarse for the others. With the same signs for all tokens, tokens of similar direction would get similar errors,
which add up in a weight gradient instead of cancelling (benchmarks/activation_codecs.py).

The signs are fixed: bit i of the output stream of BLAKE3 of SIGNS_KEY, with the lowest bit of a byte first, belongs to
row i / LARGEST_ORDER and channel i mod LARGEST_ORDER of the block, and a set bit means -1.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from blake3 import blake3
from torch import Tensor

LARGEST_ORDER = 128
NUM_SIGNS = 256
SIGNS_KEY = b"noloco_p2p hadamard signs 1"


@lru_cache(maxsize=64)
def hadamard(order: int, device: torch.device) -> Tensor:
    """The Hadamard matrix: fp32, shape (order, order), never changed. `order` is a power of two, at most
    LARGEST_ORDER.
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix.to(device)


def signs(tokens: range, order: int, device: torch.device) -> Tensor:
    """The signs: 1 or -1 in fp32, shape (tokens, 1, order), for blocks (tokens, blocks, order)."""
    rows = torch.arange(tokens.start, tokens.stop, device=device) % NUM_SIGNS
    return _all_signs(device)[rows, None, :order]


@lru_cache(maxsize=8)
def _all_signs(device: torch.device) -> Tensor:
    """All signs, shape (NUM_SIGNS, LARGEST_ORDER), never changed."""
    data = bytearray(blake3(SIGNS_KEY).digest(NUM_SIGNS * LARGEST_ORDER // 8))
    bits = torch.frombuffer(data, dtype=torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return (1 - 2 * bits.float()).view(NUM_SIGNS, LARGEST_ORDER).to(device)
