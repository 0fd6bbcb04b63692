"""The bytes of modulo coding are fixed; the tests compute them again from the definition in its docstring."""

from __future__ import annotations

import struct

import pytest
import torch
from blake3 import blake3
from torch import Tensor

from noloco_p2p.codec.dither import fill_dither
from noloco_p2p.codec.modulo import BLOCK_ELEMENTS, MODULO_CODECS, Grid, ModuloCodec

VALUES = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.25, 3.14159, 0.001, -2.75, 12.7])
SEED = 0x0123456789ABCDEF
each_codec = pytest.mark.parametrize("codec", MODULO_CODECS, ids=lambda codec: f"{codec.known_bits} bits")
RAMP = torch.sin(torch.arange(BLOCK_ELEMENTS + 301, dtype=torch.float32) * 0.37) * 7  # a block and a short one

GOLDEN = {
    4: "90 08 a8 64 0e  3606370c1d341d05f15659d32a0636fe",
    6: "00 2c 27  3606370c1d341d05f15659d32a0636fe",
    8: "00 3c 13  3606370c1d341d05f15659d32a0636fe",
}
GOLDEN_RAMP = {
    4: "2a34d87c644b8e4827c6c1297f8768c5",
    6: "51a9bb91e85be03fd25609a7822e27a4",
    8: "0889f5ddede6608c0c915427976341db",
}


def fp32(number: float) -> float:
    return struct.unpack("<f", struct.pack("<f", number))[0]


def integers_by_hand(values: Tensor, grid: Grid) -> list[int]:
    integers = []
    for block_index, block in enumerate(values.split(BLOCK_ELEMENTS)):
        step = 2.0 ** grid.exponents[block_index]
        dither = torch.empty(len(block))
        scratch = torch.empty(len(block), dtype=torch.int32)
        fill_dither(dither, scratch=scratch, seed=grid.seed, block_index=block_index)  # see test_modulo_dither.py
        pairs = zip(block.tolist(), dither.tolist(), strict=True)
        integers += [round(fp32(x / step + d)) for x, d in pairs]  # Python rounds ties to even, as torch does
    return integers


def by_hand(codec: ModuloCodec, values: Tensor, grid: Grid) -> bytes:
    integers = integers_by_hand(values, grid)
    below = {4: 0, 6: 4, 8: 6}[codec.known_bits]
    residues = [k // 2**below % 2**codec.bits for k in integers]
    shares = 8 // codec.bits
    size = -(-len(residues) // shares)
    residues += [0] * (shares * size - len(residues))
    residues = [sum(residues[i + size * j] << codec.bits * j for j in range(shares)) for i in range(size)]
    bound_to = struct.pack(f"<Q{len(grid.exponents)}b", grid.seed, *grid.exponents)
    return bytes(residues) + blake3(bound_to + struct.pack(f"<{len(integers)}i", *integers)).digest()[:16]


@each_codec
def test_the_bytes_are_golden_and_follow_the_written_definition(codec: ModuloCodec) -> None:
    small, large = Grid((-3,), SEED), Grid((-4, -6), SEED)
    payload = codec.encode(VALUES, grid=small)
    assert payload == bytes.fromhex(GOLDEN[codec.known_bits]) == by_hand(codec, VALUES, small)
    payload = codec.encode(RAMP, grid=large)
    assert payload == by_hand(codec, RAMP, large)
    assert blake3(payload).hexdigest()[:32] == GOLDEN_RAMP[codec.known_bits]
