"""Implement modulo coding, which sends only the low-order bits of numbers.

The vectors of two partners are close to each other, so the low-order bits of their elements determine the difference.
Both partners use the same grid and the same dither for a chunk. The grid has a power-of-two step for each block of
BLOCK_ELEMENTS. An element x corresponds to the grid integer k = round(x / step + dither), and it is sent as a residue,
k mod 2**bits. With Q(x) = (k - dither) * step, the dither cancels in a difference, and

    h = (Q(partner) - Q(own)) / 2 = (k_partner - k_own) * step / 2

follows from the residues as long as the integers differ by less than half of 2**bits. The residues alone do not show
whether the integers are that close. Each payload therefore ends with a digest of the sender's full integers. The
receiver reconstructs these integers from the residues and its own integers, and checks them against the digest. Both
partners detect a failure in the same chunk. The modulo and the shared dither come from Moniqua (arXiv 2002.11787); this
module adds the grid and the digest.

The lowest 4 bits of each integer are sent first. If a chunk fails, bits 4 and 5 follow, and if it fails again, bits 6
and 7 follow. A chunk that still fails is left out of the swap. The number of bits therefore depends on the
actual distance rather than a prediction, and the grid need not be coarse as a precaution against large distances.

The payload of a chunk of n elements consists of the residues, followed by the first 16 bytes of a blake3 hash. The hash
covers the seed (8 bytes), the exponents of the chunk (one byte each) and the n integers as int32, all little-endian.
The digest therefore also reveals differences between the two grids. With 4 bits, byte i holds residue[i] + 16 *
residue[i + ceil(n / 2)]. With 2 bits, byte i holds the residues i, i + q, i + 2 q and i + 3 q, where
q = ceil(n / 4); residue i is in the lowest bits. If earlier payloads carried b bits in total, the residues are those of
k // 2**b, and the digest stays the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from noloco_p2p.codec.base import refused_value, within
from noloco_p2p.codec.dither import DITHER_ELEMENTS, fill_dither
from noloco_p2p.errors import CorruptPayload

BLOCK_ELEMENTS = DITHER_ELEMENTS
DIGEST_BYTES = 16
OFF_GRID = bytes(DIGEST_BYTES)  # replaces the digest of a chunk that is not on the grid
MAX_INTEGER = 2.0**30  # the largest magnitude, so that the sum of an integer and a difference fits in an int32
LOWEST_EXPONENT, HIGHEST_EXPONENT = -100, 100  # ensures that steps, their reciprocals and h are normal fp32 numbers


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid of one chunk in one swap, which is the same for both partners.

    Block i has the step 2**exponents[i]. `seed` has 64 bits and determines the dither.
    """

    exponents: tuple[int, ...]
    seed: int

    def blocks(self, num_elements: int) -> Iterator[tuple[slice, int]]:
        """Yield (slice of the chunk, exponent) for each block of a chunk with `num_elements` elements."""
        starts = range(0, num_elements, BLOCK_ELEMENTS)
        for start, exponent in zip(starts, self.exponents, strict=True):
            yield slice(start, min(start + BLOCK_ELEMENTS, num_elements)), exponent

    def digest(self) -> blake3:
        """Return a hash that already covers the grid. The caller adds the integers of the chunk to it."""
        return blake3(struct.pack(f"<Q{len(self.exponents)}b", self.seed, *self.exponents))


@dataclass(frozen=True, slots=True)
class ModuloCodec:
    """A codec that sends `bits` low-order bits of each grid integer.

    If `after` is set, this codec sends the next higher bits of the chunks that failed with the codec `after`.
    """

    bits: int
    after: ModuloCodec | None = None

    @property
    def below(self) -> int:
        """Return how many bits of each integer the earlier payloads carried."""
        return self.after.known_bits if self.after else 0

    @property
    def known_bits(self) -> int:
        """Return how many bits of each integer are known after this payload and the earlier ones."""
        return self.below + self.bits

    @property
    def _difference_bits(self) -> int:
        return 4 if self.known_bits == 4 else 8

    @property
    def half_range(self) -> int:
        """Return the limit below which the difference of two grid integers must stay."""
        return 1 << (self.known_bits - 1)

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the exact size of a payload in bytes."""
        return -(-math.prod(shape) * self.bits // 8) + DIGEST_BYTES

    def encode(self, values: Tensor, *, grid: Grid) -> bytes:
        """Encode a chunk.

        `values` is a 1-D tensor of at most CHUNK_ELEMENTS elements, in any floating-point dtype and on any device; it
        is not changed. If a value is too large for the grid (more than MAX_INTEGER steps), the result is a payload that
        fails for both partners. Raises ValueError for a non-finite value.
        """
        residues = torch.empty(values.numel(), dtype=torch.uint8, device=values.device)
        digest = grid.digest()
        for place, integers in _grid_integers(values, grid):
            if integers is None:
                return bytes(self.num_bytes(values.shape) - DIGEST_BYTES) + OFF_GRID
            residues[place].copy_(integers >> self.below if self.below else integers)  # keeps the lowest byte
            digest.update(_little_endian(integers))
        return _packed(residues, bits=self.bits) + digest.digest(DIGEST_BYTES)

    def differences(
        self, values: Tensor, partner: bytes | memoryview, *, grid: Grid, earlier: bytes | memoryview = b""
    ) -> bytes | None:
        """Return k_partner - k_own for a chunk, packed for `half_difference`, or None if the chunk failed.

        `values` is this peer's own chunk, as it was passed to `encode`, and `partner` is the partner's payload.
        `earlier` holds the concatenation of the partner's earlier payloads, which `after` has checked. Either both
        partners get None or neither does. Raises ValueError in the same cases as `encode`, and CorruptPayload for a
        wrong length.
        """
        self.check(partner, shape=values.shape)
        if memoryview(partner)[-DIGEST_BYTES:] == OFF_GRID:
            return None
        residues = self._residues(partner, earlier, values.numel()).to(values.device)
        digest = grid.digest()
        for place, integers in _grid_integers(values, grid):
            if integers is None:
                return None
            centred = self._centred(residues[place].sub_(integers.to(torch.uint8)))
            if not within(centred, lowest=1 - self.half_range, highest=self.half_range - 1):
                return None  # at exactly half the range, either partner's integer could be the larger one
            digest.update(_little_endian(integers.add_(centred)))
        if digest.digest(DIGEST_BYTES) != memoryview(partner)[-DIGEST_BYTES:]:
            return None
        return _packed(residues, bits=self._difference_bits)

    def check(self, payload: bytes | memoryview, *, shape: Sequence[int]) -> None:
        """Raise CorruptPayload if the payload has the wrong length. Any residues of the right length are valid."""
        if (received := memoryview(payload).nbytes) != (expected := self.num_bytes(shape)):
            raise CorruptPayload(f"the modulo payload must have {expected} bytes, but it has {received}; discard it")

    def half_difference(self, differences: bytes | memoryview, *, num_elements: int, grid: Grid) -> Tensor:
        """Return the half-difference h of a chunk in fp32 on the CPU, from the result of `differences`.

        The partner computes exactly its negative, element by element.
        """
        residues = _unpacked(differences, num_elements, bits=self._difference_bits)
        half = self._centred(residues).to(torch.float32)
        for place, exponent in grid.blocks(num_elements):
            half[place].mul_(2.0 ** (exponent - 1))  # a small integer times a power of two is exact
        return half

    def _residues(self, payload: bytes | memoryview, earlier: bytes | memoryview, num_elements: int) -> Tensor:
        """Return the partner's residues with all known bits. Higher bits are undefined."""
        residues = _unpacked(memoryview(payload)[:-DIGEST_BYTES], num_elements, bits=self.bits)
        if self.after is None:
            return residues
        end = len(earlier) - self.after.num_bytes((num_elements,))
        lower = self.after._residues(memoryview(earlier)[end:], memoryview(earlier)[:end], num_elements)
        return residues.bitwise_left_shift_(self.below).bitwise_or_(lower.bitwise_and_((1 << self.below) - 1))

    def _centred(self, residues: Tensor) -> Tensor:
        """Map each uint8 residue to the congruent int8 in [-half_range, half_range - 1].

        Bits above `known_bits` are dropped.
        """
        unused = 8 - self.known_bits
        return (residues << unused).view(torch.int8) >> unused if unused else residues.view(torch.int8)


# A chunk takes 0.5001 bytes per parameter if its largest distance is below 7 steps, 0.7502 bytes up to 31 steps, and
# 1.0002 bytes up to 127 steps.
FOUR_BITS = ModuloCodec(bits=4)
SIX_BITS = ModuloCodec(bits=2, after=FOUR_BITS)
EIGHT_BITS = ModuloCodec(bits=2, after=SIX_BITS)
MODULO_CODECS = (FOUR_BITS, SIX_BITS, EIGHT_BITS)


def _packed(residues: Tensor, *, bits: int) -> bytes:
    """Pack the lowest `bits` bits of each uint8 residue, overwriting `residues`."""
    packed, *others = residues.split(max(1, -(-len(residues) * bits // 8)))
    if bits < 8:
        packed.bitwise_and_((1 << bits) - 1)
    for place, part in enumerate(others, 2):
        packed[: len(part)].bitwise_or_((part << (8 - bits)) >> (8 - bits * place))
    return packed.cpu().numpy().tobytes()


def _unpacked(packed: bytes | memoryview, num_elements: int, *, bits: int) -> Tensor:
    """Unpack residues into a new uint8 tensor of shape (num_elements,) on the CPU.

    Only the lowest `bits` bits of each residue are defined.
    """
    if not num_elements:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    residues = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return torch.cat([residues, *(residues >> place for place in range(bits, 8, bits))])[:num_elements]


def _grid_integers(values: Tensor, grid: Grid) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield (slice of the chunk, int32 grid integers) for each block.

    If an integer exceeds MAX_INTEGER, None takes the place of that block's integers, and the iterator ends. Two buffers
    are reused from block to block to keep the working set in a core's cache, so each block overwrites the integers of
    the previous block. Dividing x by the step is exact, but adding the dither rounds to fp32. Q(x) is therefore within
    step / 2 + 2**-24 |x| of x.
    """
    values = values.detach()
    steps = torch.empty(min(len(values), BLOCK_ELEMENTS), dtype=torch.float32, device=values.device)
    integers = torch.empty_like(steps, dtype=torch.int32)
    for block_index, (place, exponent) in enumerate(grid.blocks(len(values))):
        part = values[place].to(torch.float32)
        steps, integers = steps[: len(part)], integers[: len(part)]
        fill_dither(steps, scratch=integers, seed=grid.seed, block_index=block_index)
        steps.add_(part, alpha=2.0**-exponent).round_()
        if not within(steps, lowest=-MAX_INTEGER, highest=MAX_INTEGER):
            if not torch.isfinite(values).all():
                raise refused_value(values, name="modulo")
            yield place, None
            return
        yield place, integers.copy_(steps)


def _little_endian(integers: Tensor) -> memoryview:
    return integers.cpu().numpy().data.cast("B")  # base.py asserts that the machine is little-endian
