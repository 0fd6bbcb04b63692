"""Modulo coding: two peers are close to each other, so the low-order bits of their numbers determine the difference.

Both sides use the same grid for a section: a power-of-two step for each block of BLOCK_ELEMENTS, and a shared dither.
An element x is the grid integer k = round(x / step + dither); it travels as its residue, k mod 2**bits. The dither
cancels in a difference, so Q(x) = (k - dither) * step and

    h = (Q(partner) - Q(own)) / 2 = (k_partner - k_own) * step / 2

follows from the residues as long as the integers differ by less than half of 2**bits. Residues cannot show whether they
do. So a payload ends with a digest of the sender's full integers, and the receiver reconstructs them from its own ones.
Both sides detect a failure in the same chunk, and code that chunk again without modulo. (Moniqua, arXiv 2002.11787, has
the modulo and the shared dither; the grid, its bounds and the digest are new here.)

Codec `modulo` sends the lowest 4 bits. If a chunk fails, bits 4 and 5 of each integer follow, and then bits 6 and 7. So
the number of bits follows from the actual distance instead of a predicted one, and the grid need not be coarse for a
distance that it may have to span.

The payload of a chunk of n elements: residues, then the first 16 bytes of blake3 over the seed (8 bytes), the exponents
of the chunk (a byte each) and the n integers as int32, all little-endian. So the digest also detects different grids.
8 bits: one byte per element. 4 bits: byte i is residue i + 16 * residue (i + ceil(n / 2)), as in `blocks.py`. 2 bits:
byte i has the residues i, i + q, i + 2 q and i + 3 q, q = ceil(n / 4), the first in its lowest bits. If earlier
payloads carried b bits together, the residues are those of k // 2**b; the digest is the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from noloco_p2p.codec.base import CHUNK_ELEMENTS, check_length, check_num_elements, check_values, within
from noloco_p2p.codec.dither import DITHER_ELEMENTS, fill_dither
from noloco_p2p.errors import CorruptPayload

BLOCK_ELEMENTS = DITHER_ELEMENTS
BLOCKS_A_CHUNK = CHUNK_ELEMENTS // BLOCK_ELEMENTS
DIGEST_BYTES = 16
OFF_GRID = bytes(DIGEST_BYTES)  # in place of the digest: this chunk is not on the grid
MAX_INTEGER = 2.0**30  # in magnitude, so that an own integer plus a difference fits int32

UNKNOWN = 127  # as an exponent: nothing is known of this block, so its chunk is not coded modulo
LOWEST_EXPONENT, HIGHEST_EXPONENT = -100, 100  # steps, their reciprocals and all h are then normal fp32 numbers
FINEST = 24  # a step is at least 2**-24 of the largest value of its block, since fp32 itself has no finer one
REMEMBERED = 4  # swaps of which the largest distance is kept
# By need: the ratio of a step to the root mean square of the last distance, before rounding up to a power of two.
# Above a ratio of 2.4 the error of a swap (step**2 / 6 per number) is longer than the distance, and replicas diverge.
STEP_OVER_DISTANCE = 0.75
MOST_HALVINGS = 2  # of a step, one for each round without a partner since the last swap


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid of one section in one swap; equal on both sides.

    exponents: one signed byte per block, from `agree`. seed: 64 bits, from `dither_seed`.
    """

    exponents: bytes
    seed: int

    def covers(self, chunk_index: int) -> bool:
        """Whether the chunk can be coded modulo; False if a bound of it is not known."""
        return UNKNOWN not in self._of_chunk(chunk_index)

    def blocks(self, chunk_index: int, *, num_elements: int) -> Iterator[tuple[slice, int]]:
        """Yield (slice of the chunk, exponent) of each block of a chunk of `num_elements`. Raises ValueError without a
        grid.
        """
        exponents = self._of_chunk(chunk_index)
        if UNKNOWN in exponents or len(exponents) != num_blocks(num_elements):
            raise ValueError(f"chunk {chunk_index} of {num_elements} elements has no grid; use another codec for it")
        for block, exponent in enumerate(exponents):
            start = block * BLOCK_ELEMENTS
            yield slice(start, min(start + BLOCK_ELEMENTS, num_elements)), exponent

    def digest(self, chunk_index: int) -> blake3:
        """Return a hash that already covers the grid of the chunk; the caller adds its integers."""
        start = chunk_index * BLOCKS_A_CHUNK
        return blake3(struct.pack("<Q", self.seed) + self.exponents[start : start + BLOCKS_A_CHUNK])

    def _of_chunk(self, chunk_index: int) -> list[int]:
        start = chunk_index * BLOCKS_A_CHUNK
        return memoryview(self.exponents)[start : start + BLOCKS_A_CHUNK].cast("b").tolist()


@dataclass(frozen=True, slots=True)
class ModuloCodec:
    """Codes the `bits` low-order bits of each grid integer, or those above what `after` carries, whose chunk failed.

    margin: ratio of the bound to the largest recent distance; None for a codec by need, whose step follows from the
    error
    alone.
    """

    name: str
    bits: int
    margin: float | None = None
    after: ModuloCodec | None = None

    @property
    def is_by_need(self) -> bool:
        """Whether more bits follow when these do not suffice, so that the grid need not be coarse."""
        return self.margin is None

    @property
    def below(self) -> int:
        """The bits of each integer that earlier payloads carried."""
        return self.after.known_bits if self.after else 0

    @property
    def known_bits(self) -> int:
        """The bits of each integer that are known with this payload and earlier ones."""
        return self.below + self.bits

    @property
    def _difference_bits(self) -> int:
        return 4 if self.known_bits == 4 else 8

    @property
    def half_range(self) -> int:
        """Grid integers must differ by less than this."""
        return 1 << (self.known_bits - 1)

    def num_bytes(self, num_elements: int) -> int:
        """The exact size of a payload."""
        check_num_elements(num_elements)
        return -(-num_elements * self.bits // 8) + DIGEST_BYTES

    def num_difference_bytes(self, num_elements: int) -> int:
        """The exact size of what `differences` returns."""
        check_num_elements(num_elements)
        return -(-num_elements * self._difference_bits // 8)

    def encode(self, values: Tensor, *, grid: Grid, chunk_index: int) -> bytes:
        """Code chunk `chunk_index`: 1-D, contiguous, any floating dtype, any device, at most CHUNK_ELEMENTS.

        Values too large for the grid (MAX_INTEGER steps) give a payload that fails on both sides. `values` is not
        changed. Raises ValueError for another shape, for a value that is not finite, and where the grid has no step.
        """
        check_values(values)
        residues = torch.empty(values.numel(), dtype=torch.uint8, device=values.device)
        digest = grid.digest(chunk_index)
        for place, integers in _grid_integers(values, grid=grid, chunk_index=chunk_index):
            if integers is None:
                return bytes(self.num_bytes(values.numel()) - DIGEST_BYTES) + OFF_GRID
            residues[place].copy_(integers >> self.below if self.below else integers)  # the lowest byte of each
            digest.update(_little_endian(integers))
        return _packed(residues, bits=self.bits) + digest.digest(DIGEST_BYTES)

    def differences(
        self,
        values: Tensor,
        partner: bytes | memoryview,
        *,
        grid: Grid,
        chunk_index: int,
        earlier: bytes | memoryview = b"",
    ) -> bytes | None:
        """Return k_partner - k_own of a chunk in `num_difference_bytes`, for `half_difference`; None when the chunk
        failed.

        values: the own chunk, as passed to `encode`. partner: its payload. earlier: the payloads before,
        concatenated, which
        `after` has checked. Either both sides get None or neither does. Raises ValueError as `encode` does, and
        CorruptPayload
        for a wrong length.
        """
        check_values(values)
        self.check(partner, num_elements=values.numel())
        if memoryview(partner)[-DIGEST_BYTES:] == OFF_GRID:
            return None
        residues = self._residues(partner, earlier, values.numel()).to(values.device)
        digest = grid.digest(chunk_index)
        for place, integers in _grid_integers(values, grid=grid, chunk_index=chunk_index):
            if integers is None:
                return None
            centred = self._centred(residues[place].sub_(integers.to(torch.uint8)))
            if not within(centred, lowest=1 - self.half_range, highest=self.half_range - 1):
                return None  # exactly half: either side could be the larger one
            digest.update(_little_endian(integers.add_(centred)))
        if digest.digest(DIGEST_BYTES) != memoryview(partner)[-DIGEST_BYTES:]:
            return None
        return _packed(residues, bits=self._difference_bits)

    def check(self, payload: bytes | memoryview, *, num_elements: int) -> None:
        """Raise CorruptPayload for a payload of the wrong length; any residues of the right length are valid."""
        check_length(payload, codec=self, num_elements=num_elements)

    def half_difference(
        self, differences: bytes | memoryview, *, num_elements: int, grid: Grid, chunk_index: int
    ) -> Tensor:
        """Return h of a chunk, fp32 on the CPU: exactly the negative of what the partner gets, element by element."""
        if len(differences) != self.num_difference_bytes(num_elements):
            raise ValueError(f"{len(differences)} bytes are not the differences of {num_elements} elements")
        residues = _unpacked(differences, num_elements, bits=self._difference_bits)
        half = self._centred(residues).to(torch.float32)
        for place, exponent in grid.blocks(chunk_index, num_elements=num_elements):
            half[place].mul_(2.0 ** (exponent - 1))  # a small integer times a power of two is exact
        return half

    def _residues(self, payload: bytes | memoryview, earlier: bytes | memoryview, num_elements: int) -> Tensor:
        """The partner's residues with all known bits; the bits above are undefined."""
        residues = _unpacked(memoryview(payload)[:-DIGEST_BYTES], num_elements, bits=self.bits)
        if self.after is None:
            return residues
        end = len(earlier) - self.after.num_bytes(num_elements)
        lower = self.after._residues(memoryview(earlier)[end:], memoryview(earlier)[:end], num_elements)
        return residues.bitwise_left_shift_(self.below).bitwise_or_(lower.bitwise_and_((1 << self.below) - 1))

    def _centred(self, residues: Tensor) -> Tensor:
        """Map uint8 to the congruent int8 in [-half_range, half_range - 1]; bits above `known_bits` are dropped."""
        unused = 8 - self.known_bits
        return (residues << unused).view(torch.int8) >> unused if unused else residues.view(torch.int8)


MODULO8 = ModuloCodec(name="modulo8", bits=8, margin=2.0)  # 1.0001 bytes per parameter
# 0.5001 bytes per parameter. There are seven steps from 0 to the bound, so an error is as large as a typical
# difference. A tight bound suits it, although it fails a little more often. With gamma 0.7 replicas did not converge.
MODULO4 = ModuloCodec(name="modulo4", bits=4, margin=1.0)
# 0.5001 bytes per parameter for a chunk whose largest distance is below 7 steps, 0.7502 up to 31, 1.0002 up to 127.
FOUR_BITS = ModuloCodec(name="modulo", bits=4)
SIX_BITS = ModuloCodec(name="modulo", bits=2, after=FOUR_BITS)
EIGHT_BITS = ModuloCodec(name="modulo", bits=2, after=SIX_BITS)

# By the name in a run spec: the codec of a chunk, and the ones that follow when it fails.
MODULO_CODECS = {"modulo8": (MODULO8,), "modulo4": (MODULO4,), "modulo": (FOUR_BITS, SIX_BITS, EIGHT_BITS)}


def num_blocks(num_elements: int) -> int:
    """The number of exponents of the grid of a section."""
    return -(-num_elements // BLOCK_ELEMENTS)


def agree(own: bytes, partner: bytes, *, by_need: bool = False) -> bytes:
    """Combine the proposals of both peers: the coarser step of each block, UNKNOWN if either side knows none.

    by_need: the finer step instead, UNKNOWN only if neither side knows one. Raises CorruptPayload when the partner's
    proposal has the wrong length or an exponent that no peer proposes.
    """
    if len(partner) != len(own):
        raise CorruptPayload(f"it proposes a grid of {len(partner)} blocks, the section has {len(own)}")
    if not own:
        return own
    mine, theirs = (torch.frombuffer(bytearray(exponents), dtype=torch.int8) for exponents in (own, partner))
    strange = (theirs != UNKNOWN) & ((theirs < LOWEST_EXPONENT) | (theirs > HIGHEST_EXPONENT))
    if strange.any():
        raise CorruptPayload(f"it proposes the grid step 2**{int(theirs[strange][0])}")
    return (torch.minimum if by_need else torch.maximum)(mine, theirs).numpy().tobytes()  # UNKNOWN is the largest


class Bounds:
    """Recent distances between partners, per block, from which the next grid of a section is proposed.

    Keeps at most REMEMBERED + 1 numbers per block. One thread at a time updates a chunk; chunks are independent.
    """

    def __init__(self, num_elements: int, *, codec: ModuloCodec) -> None:
        self.codec = codec
        self._round = self._round_of_swap = 0
        if codec.margin is None:
            self._measure, self._distance_to_step = _root_mean_square, STEP_OVER_DISTANCE
        else:
            self._measure, self._distance_to_step = _largest, codec.margin / (codec.half_range - 1)  # rounding adds < 1
        num_swaps = 1 if codec.is_by_need else REMEMBERED
        self._distances = torch.zeros(num_swaps, num_blocks(num_elements))  # newest first
        self._magnitudes = torch.zeros(num_blocks(num_elements))  # of the values in the last swap

    def begin_swap(self, round_index: int) -> None:
        """Rounds since the last swap that received anything count as rounds without a partner."""
        self._round = round_index

    def update(self, chunk_index: int, *, half_difference: Tensor, values: Tensor) -> None:
        """Record a received chunk, of any codec: its h and this peer's values, all finite."""
        self._round_of_swap = self._round
        first = chunk_index * BLOCKS_A_CHUNK
        parts = zip(half_difference.split(BLOCK_ELEMENTS), values.split(BLOCK_ELEMENTS), strict=True)
        for block, (half, own) in enumerate(parts, first):
            self._distances[1:, block] = self._distances[:-1, block].clone()
            self._distances[0, block] = 2 * self._measure(half)
            self._magnitudes[block] = _largest(own)

    def propose(self) -> bytes:
        """Return one exponent per block; UNKNOWN if no distance, or only 0, was seen, which predicts nothing.

        By need it is lower after rounds without a partner: mixing is rarer then, so errors persist longer.
        """
        largest = self._distances.amax(dim=0)
        wanted = _above(largest * self._distance_to_step)
        if self.codec.is_by_need:
            num_alone = self._round - self._round_of_swap - 1
            wanted -= min(MOST_HALVINGS, max(0, num_alone))
        finest = _above(self._magnitudes) - FINEST
        exponents = torch.maximum(wanted, finest).clamp_min_(LOWEST_EXPONENT)
        exponents[(largest == 0) | ~largest.isfinite() | (exponents > HIGHEST_EXPONENT)] = UNKNOWN
        return exponents.to(torch.int8).numpy().tobytes()


def _root_mean_square(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values) / len(values) ** 0.5


def _packed(residues: Tensor, *, bits: int) -> bytes:
    """Pack `residues` (n,) uint8, of which the low `bits` count; they are overwritten."""
    packed, *others = residues.split(max(1, -(-len(residues) * bits // 8)))
    if bits < 8:
        packed.bitwise_and_((1 << bits) - 1)
    for place, part in enumerate(others, 2):
        packed[: len(part)].bitwise_or_((part << (8 - bits)) >> (8 - bits * place))
    return packed.cpu().numpy().tobytes()


def _unpacked(packed: bytes | memoryview, num_elements: int, *, bits: int) -> Tensor:
    """Unpack to (n,) uint8 on the CPU, in new memory; the bits above `bits` are undefined."""
    if not num_elements:
        return torch.empty(0, dtype=torch.uint8)
    residues = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return torch.cat([residues, *(residues >> place for place in range(bits, 8, bits))])[:num_elements]


def _above(values: Tensor) -> Tensor:
    """The exponent of the smallest power of two above each non-negative value; LOWEST_EXPONENT for 0."""
    return torch.frexp(values).exponent.masked_fill_(values == 0, LOWEST_EXPONENT)


def _largest(values: Tensor) -> Tensor:
    smallest, largest = torch.aminmax(values)  # one pass and no temporary
    return torch.maximum(-smallest, largest)


def _grid_integers(values: Tensor, *, grid: Grid, chunk_index: int) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield (slice of the chunk, int32 grid integers) of each block; None, as the last item, if one exceeds
    MAX_INTEGER.

    It reuses two buffers block by block, so that the working set stays in a core's cache: the integers of a block are
    overwritten by the next one. x / step is exact and adding the dither rounds to fp32, so Q(x) is within step / 2 +
    2**-24 |x| of x.
    """
    values = values.detach()
    steps = torch.empty(min(len(values), BLOCK_ELEMENTS), dtype=torch.float32, device=values.device)
    integers = torch.empty_like(steps, dtype=torch.int32)
    blocks = grid.blocks(chunk_index, num_elements=len(values))
    for block_index, (place, exponent) in enumerate(blocks, chunk_index * BLOCKS_A_CHUNK):
        part = values[place].to(torch.float32)
        steps, integers = steps[: len(part)], integers[: len(part)]
        fill_dither(steps, scratch=integers, seed=grid.seed, block_index=block_index)
        steps.add_(part, alpha=2.0**-exponent).round_()
        if not within(steps, lowest=-MAX_INTEGER, highest=MAX_INTEGER):
            _check_finite(values)
            yield place, None
            return
        yield place, integers.copy_(steps)


def _check_finite(values: Tensor) -> None:
    bad = torch.nonzero(~torch.isfinite(values))
    if len(bad):
        index = int(bad[0])
        raise ValueError(
            f"cannot encode: element {index} of {len(values)} is {float(values[index])}, which is not finite"
        )


def _little_endian(integers: Tensor) -> memoryview:
    return integers.cpu().numpy().data.cast("B")  # base.py asserts that the machine is little-endian
