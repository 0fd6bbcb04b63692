"""Compute the dither that two partners share in a swap.

Every machine computes the same bits from a seed and a position in the chunk. WORDS are DITHER_ELEMENTS fixed 32-bit
numbers: the blake3 output stream of WORDS_KEY, read as little-endian integers. For block `b` of a chunk, two 32-bit
numbers are derived from the seed. The first, `a`, is always odd; the second, `c`, can have any value. Element i of the
block gets the dither

    dither = int32(a * WORDS[i] + c, wrapped) / 2**32          in [-0.5, 0.5]

Over all seeds, each element is uniformly distributed because c is. Two elements are nearly independent, because the
difference of their words is multiplied by a random odd number. This method is four times as fast as hashing each
element. It uses only integers, so all machines get the same result.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
from blake3 import blake3
from torch import Tensor

DITHER_ELEMENTS = 65_536  # 256 KiB of words, which fit in a core's cache
WORDS_KEY = b"noloco_p2p shared dither 1"


def fill_dither(out: Tensor, *, scratch: Tensor, seed: int, block_index: int) -> None:
    """Write the dither of a block's first elements into `out`, an fp32 tensor of at most DITHER_ELEMENTS elements.

    `scratch` is an int32 tensor with the same size and device as `out`; it is overwritten. `seed` has 64 bits.
    `block_index` is the position of the block in its chunk, in units of DITHER_ELEMENTS. The function does not
    allocate memory for the elements, because the first use of fresh memory takes longer than the arithmetic.
    """
    factor, offset = block_numbers(seed, block_index)
    words = _words(out.device)[: out.numel()]
    torch.add(
        torch.tensor(offset, dtype=torch.int32, device="cpu"), words, alpha=factor, out=scratch
    )  # int32 wraps on every device
    out.copy_(scratch).mul_(2.0**-32)


def block_numbers(seed: int, block_index: int) -> tuple[int, int]:
    """Return the int32 numbers a (always odd) and c of a block.

    They come from the blake3 hash of the seed and the block index, each encoded as 8 little-endian bytes.
    """
    a, c = struct.unpack("<ii", blake3(struct.pack("<QQ", seed, block_index)).digest(8))
    return a | 1, c


@lru_cache(maxsize=8)
def _words(device: torch.device) -> Tensor:
    """Return the words as an int32 tensor of shape (DITHER_ELEMENTS,), which must not be changed.

    They are computed once per device, which takes 0.3 ms.
    """
    words = blake3(WORDS_KEY).digest(4 * DITHER_ELEMENTS)
    return torch.frombuffer(bytearray(words), dtype=torch.int32).to(device)
