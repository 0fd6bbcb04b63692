"""The dither that two peers share in a swap: the same bits on every machine, from a seed and a position in the vector.

WORDS are DITHER_ELEMENTS fixed 32-bit numbers (the output stream of blake3 of WORDS_KEY, little-endian). Block `b` of a
section derives two 32-bit numbers from the seed, an odd `a` and any `c`; element i of the block gets

    dither = int32(a * WORDS[i] + c, wrapped) / 2**32          in [-0.5, 0.5]

Over the seeds each element is uniform, because c is, and two elements are nearly independent, because the difference of
their words is multiplied by a random odd number. This is four times as fast as a hash of each element, and uses
integers only, so no two machines round it differently.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
from blake3 import blake3
from torch import Tensor

DITHER_ELEMENTS = 65_536  # 256 KiB of words, which fit a core's cache
WORDS_KEY = b"noloco_p2p shared dither 1"


def dither_seed(swap_id: bytes, section: int) -> int:
    """The seed of one section of one swap: the first 8 bytes of blake3(swap id, section as a byte), little-endian."""
    return int.from_bytes(blake3(swap_id + bytes([section])).digest(8), "little")


def fill_dither(out: Tensor, *, scratch: Tensor, seed: int, block_index: int) -> None:
    """Write the dither of the first elements of a block into `out` (fp32, at most DITHER_ELEMENTS).

    scratch: int32, as long as `out` and on its device; overwritten. seed: 64 bits. block_index: the position of the
    block
    in its section, in units of DITHER_ELEMENTS. Allocates nothing, because memory that is new to the process costs more
    than the arithmetic.
    """
    factor, offset = block_numbers(seed, block_index)
    words = _words(out.device)[: out.numel()]
    torch.add(torch.tensor(offset, dtype=torch.int32), words, alpha=factor, out=scratch)  # int32 wraps on every device
    out.copy_(scratch).mul_(2.0**-32)


def block_numbers(seed: int, block_index: int) -> tuple[int, int]:
    """Return a (odd) and c, int32, of a block, from blake3 of seed and block index (8 bytes each, little-endian)."""
    a, c = struct.unpack("<ii", blake3(struct.pack("<QQ", seed, block_index)).digest(8))
    return a | 1, c


@lru_cache(maxsize=8)
def _words(device: torch.device) -> Tensor:
    """The words, int32, shape (DITHER_ELEMENTS,), never changed. Computed in 0.3 ms, once per device."""
    words = blake3(WORDS_KEY).digest(4 * DITHER_ELEMENTS)
    return torch.frombuffer(bytearray(words), dtype=torch.int32).to(device)
