"""The bytes of modulo coding, fixed, and made once more here from what its docstring says."""

from __future__ import annotations

import struct

import pytest
import torch
from blake3 import blake3
from torch import Tensor

from noloco_p2p.codec.dither import fill_dither
from noloco_p2p.codec.modulo import (
    BLOCK_ELEMENTS,
    BLOCKS_A_CHUNK,
    MODULO4,
    MODULO8,
    Grid,
    ModuloCodec,
)

VALUES = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.25, 3.14159, 0.001, -2.75, 12.7])
GRID = Grid(exponents=bytes([256 - 3, 256 - 5, 256 - 3, 0, 256 - 4, 256 - 6]), seed=0x0123456789ABCDEF)
each_codec = pytest.mark.parametrize("codec", [MODULO8, MODULO4], ids=lambda codec: codec.name)
RAMP = torch.sin(torch.arange(BLOCK_ELEMENTS + 301, dtype=torch.float32) * 0.37) * 7  # a block and a short one

GOLDEN = {
    ("modulo8", 0): "00 08 f8 04 fe 19 00 ea 66  3606370c1d341d05f15659d32a0636fe",
    ("modulo8", 1): "00 10 f0 08 fc 32 00 d4 cb  9110038f08b38a2db6636f3b2e7717d3",
    ("modulo4", 0): "90 08 a8 64 0e  3606370c1d341d05f15659d32a0636fe",
    ("modulo4", 1): "20 00 40 b8 0c  9110038f08b38a2db6636f3b2e7717d3",
}
GOLDEN_RAMP = {
    "modulo8": "e2a8d8ddd81846a16594a5ce76e342af",
    "modulo4": "4aee9762ca908e5a5ce9888e3ce9dbd1",
}


def fp32(number: float) -> float:
    return struct.unpack("<f", struct.pack("<f", number))[0]


def integers_by_hand(values: Tensor, *, grid: Grid, chunk_index: int) -> list[int]:
    integers = []
    for place, block in enumerate(values.split(BLOCK_ELEMENTS)):
        block_index = chunk_index * BLOCKS_A_CHUNK + place
        step = 2.0 ** struct.unpack_from("<b", grid.exponents, block_index)[0]
        dither = torch.empty(len(block))
        scratch = torch.empty(len(block), dtype=torch.int32)
        fill_dither(dither, scratch=scratch, seed=grid.seed, block_index=block_index)  # has a test by hand of its own
        pairs = zip(block.tolist(), dither.tolist(), strict=True)
        integers += [round(fp32(x / step + d)) for x, d in pairs]  # Python rounds a tie to the even one, as torch does
    return integers


def by_hand(codec: ModuloCodec, values: Tensor, *, grid: Grid, chunk_index: int) -> bytes:
    integers = integers_by_hand(values, grid=grid, chunk_index=chunk_index)
    residues = [k % 2**codec.bits for k in integers]
    if codec.bits == 4:
        half = (len(residues) + 1) // 2
        high = [*residues[half:], 0]
        residues = [low + 16 * high[i] for i, low in enumerate(residues[:half])]
    first = chunk_index * BLOCKS_A_CHUNK
    bound_to = struct.pack("<Q", grid.seed) + grid.exponents[first : first + BLOCKS_A_CHUNK]
    return bytes(residues) + blake3(bound_to + struct.pack(f"<{len(integers)}i", *integers)).digest()[:16]


@each_codec
@pytest.mark.parametrize("chunk_index", [0, 1])
def test_small_vector_has_its_golden_bytes(codec: ModuloCodec, chunk_index: int) -> None:
    grid = Grid(GRID.exponents[:1] if chunk_index == 0 else GRID.exponents[:5], GRID.seed)
    payload = codec.encode(VALUES, grid=grid, chunk_index=chunk_index)
    assert payload == by_hand(codec, VALUES, grid=grid, chunk_index=chunk_index)
    assert payload == bytes.fromhex(GOLDEN[codec.name, chunk_index])


@each_codec
def test_several_blocks_have_their_golden_digest(codec: ModuloCodec) -> None:
    payload = codec.encode(RAMP, grid=GRID, chunk_index=1)
    assert payload == by_hand(codec, RAMP, grid=GRID, chunk_index=1)
    assert blake3(payload).hexdigest()[:32] == GOLDEN_RAMP[codec.name]
