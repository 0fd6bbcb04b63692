"""Rotate blocks for the int4 activation codec by applying random signs and then a Hadamard matrix.

The rotation is the same on every machine. A block x of n channels of token t becomes y = (signs[t mod NUM_SIGNS] * x)
H. H is Sylvester's matrix of order n: H[i, j] = (-1)^(number of bits set in i & j). All entries are 1 or -1, and H H =
n * identity. The inverse is therefore x = signs * (y H) / n, and codes that are small integers stay integers.

The rotation spreads one large channel over all codes of its block. The random signs, which differ from token to token,
have two purposes. Without signs, the mean of a block would end up in a single number of y, and the scale of the block
would be too coarse for the other numbers. If all tokens had the same signs, tokens that point in similar directions
would get similar errors, which would add up in a weight gradient instead of cancelling (see
benchmarks/activation_codecs.py).

The signs are fixed. Bit i of the BLAKE3 output stream of SIGNS_KEY, counted from the lowest bit of each byte, belongs
to row i / LARGEST_ORDER and channel i mod LARGEST_ORDER of the block. A set bit means -1.
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
    """Return the Hadamard matrix in fp32, with shape (order, order). Do not modify it.

    `order` must be a power of two and at most LARGEST_ORDER.
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix.to(device)


def signs(tokens: range, order: int, device: torch.device) -> Tensor:
    """Return the signs (1 or -1) for blocks of shape (tokens, blocks, order).

    They are in fp32 and have shape (tokens, 1, order).
    """
    rows = torch.arange(tokens.start, tokens.stop, device=device) % NUM_SIGNS
    return _all_signs(device)[rows, None, :order]


@lru_cache(maxsize=8)
def _all_signs(device: torch.device) -> Tensor:
    """Return all signs, with shape (NUM_SIGNS, LARGEST_ORDER). Do not modify them."""
    data = bytearray(blake3(SIGNS_KEY).digest(NUM_SIGNS * LARGEST_ORDER // 8))
    bits = torch.frombuffer(data, dtype=torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return (1 - 2 * bits.float()).view(NUM_SIGNS, LARGEST_ORDER).to(device)
