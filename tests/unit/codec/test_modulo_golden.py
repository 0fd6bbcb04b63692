"""The bytes of modulo coding are fixed; the tests compute them again from the definition in its docstring."""

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
    EIGHT_BITS,
    FOUR_BITS,
    SIX_BITS,
    Grid,
    ModuloCodec,
)

VALUES = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.25, 3.14159, 0.001, -2.75, 12.7])
GRID = Grid(exponents=bytes([256 - 3, 256 - 5, 256 - 3, 0, 256 - 4, 256 - 6]), seed=0x0123456789ABCDEF)
each_codec = pytest.mark.parametrize(
    "codec", [FOUR_BITS, SIX_BITS, EIGHT_BITS], ids=lambda codec: f"{codec.known_bits} bits"
)
RAMP = torch.sin(torch.arange(BLOCK_ELEMENTS + 301, dtype=torch.float32) * 0.37) * 7  # a block and a short one

GOLDEN = {
    (4, 0): "90 08 a8 64 0e  3606370c1d341d05f15659d32a0636fe",
    (4, 1): "20 00 40 b8 0c  9110038f08b38a2db6636f3b2e7717d3",
    (6, 0): "00 2c 27  3606370c1d341d05f15659d32a0636fe",
    (6, 1): "00 1d 0f  9110038f08b38a2db6636f3b2e7717d3",
    (8, 0): "00 3c 13  3606370c1d341d05f15659d32a0636fe",
    (8, 1): "00 3c 33  9110038f08b38a2db6636f3b2e7717d3",
}
GOLDEN_RAMP = {
    4: "4aee9762ca908e5a5ce9888e3ce9dbd1",
    6: "882da51e77f127f1a8769be745e3c1a3",
    8: "ddc5778b8cdab607ec6d01adbaf8d3a9",
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
        fill_dither(dither, scratch=scratch, seed=grid.seed, block_index=block_index)  # see test_modulo_dither.py
        pairs = zip(block.tolist(), dither.tolist(), strict=True)
        integers += [round(fp32(x / step + d)) for x, d in pairs]  # Python rounds ties to even, as torch does
    return integers


def by_hand(codec: ModuloCodec, values: Tensor, *, grid: Grid, chunk_index: int) -> bytes:
    integers = integers_by_hand(values, grid=grid, chunk_index=chunk_index)
    below = {4: 0, 6: 4, 8: 6}[codec.known_bits]
    residues = [k // 2**below % 2**codec.bits for k in integers]
    shares = 8 // codec.bits
    size = -(-len(residues) // shares)
    residues += [0] * (shares * size - len(residues))
    residues = [sum(residues[i + size * j] << codec.bits * j for j in range(shares)) for i in range(size)]
    first = chunk_index * BLOCKS_A_CHUNK
    bound_to = struct.pack("<Q", grid.seed) + grid.exponents[first : first + BLOCKS_A_CHUNK]
    return bytes(residues) + blake3(bound_to + struct.pack(f"<{len(integers)}i", *integers)).digest()[:16]


@each_codec
@pytest.mark.parametrize("chunk_index", [0, 1])
def test_small_vector_has_its_golden_bytes(codec: ModuloCodec, chunk_index: int) -> None:
    grid = Grid(GRID.exponents[:1] if chunk_index == 0 else GRID.exponents[:5], GRID.seed)
    payload = codec.encode(VALUES, grid=grid, chunk_index=chunk_index)
    assert payload == by_hand(codec, VALUES, grid=grid, chunk_index=chunk_index)
    assert payload == bytes.fromhex(GOLDEN[codec.known_bits, chunk_index])


@each_codec
def test_several_blocks_have_their_golden_digest(codec: ModuloCodec) -> None:
    payload = codec.encode(RAMP, grid=GRID, chunk_index=1)
    assert payload == by_hand(codec, RAMP, grid=GRID, chunk_index=1)
    assert blake3(payload).hexdigest()[:32] == GOLDEN_RAMP[codec.known_bits]
