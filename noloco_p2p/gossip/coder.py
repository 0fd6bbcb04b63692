"""Encode the slices of a vector, and compute the half-differences of two partners.

A partner's weights affect a peer only through half-differences. Let Q be encoding followed by decoding, and let
h = (Q(partner) - Q(own)) / 2. A peer adds h to its own *exact* weights. Both partners know both decoded slices, so both
compute the same h up to its sign, and the mean of the pair stays exact, however coarse Q is. An encoding error moves
the two peers by the same amount in opposite directions, and the next swaps reduce their distance. If a peer instead
averaged Q(partner) with its own exact weights, half of each encoding error would stay in the mean.

With the codec `modulo`, a chunk is coded in up to three passes: its lowest four bits on a grid that both partners know,
two more bits, and two more. A pass carries only the chunks that failed in the one before, which are the same for both
partners. A chunk that fails in the last pass is not mixed in this swap, and its distance is unknown again. Chunks
without a known distance are coded in one pass with int8, as with all other codecs. The first pass of a chunk contains
everything or a digest of it, so a peer cannot change what it sends after it has read what its partner sends.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial

import torch
from blake3 import blake3
from torch import Tensor

from noloco_p2p.codec import Codec, get_codec
from noloco_p2p.codec.modulo import (
    BLOCK_ELEMENTS,
    DIGEST_BYTES,
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    MODULO_CODECS,
    Grid,
    ModuloCodec,
)
from noloco_p2p.errors import CorruptPayload
from noloco_p2p.gossip.frames import Payload
from noloco_p2p.gossip.units import Chunk, Slice, Units

MODULO = "modulo"
BESIDE_MODULO = "int8"
UNKNOWN = 127  # the exponent of a block without a recorded distance; above all others
FINEST = 24  # a step is at least 2**-24 of the largest value in its block, because fp32 itself is no finer
# The ratio of a step to the root mean square of the last distance. The step is then rounded up to a power of two. Above
# a ratio of 2.4, the error of a swap (step**2 / 6 per number) exceeds the distance, and replicas diverge.
STEP_OVER_DISTANCE = 0.75


class Coder:
    """What a peer remembers about its vector between swaps: the distances to its last partners, block by block.

    Swaps of different slices may use a coder at the same time.
    """

    def __init__(self, codec: str, units: Units) -> None:
        self.units = units
        self.plain: Codec = get_codec(BESIDE_MODULO if codec == MODULO else codec)
        self.passes: tuple[ModuloCodec, ...] = MODULO_CODECS if codec == MODULO else ()
        self._distances = torch.zeros(
            units.num_blocks, dtype=torch.float32, device="cpu"
        )  # root mean square of the last difference of each block
        self._magnitudes = torch.zeros(
            units.num_blocks, dtype=torch.float32, device="cpu"
        )  # largest value in each block at that time

    def propose(self, part: Slice) -> bytes:
        """Return the exponents of the grid that this peer proposes for a slice, or nothing if there is no grid."""
        if not self.passes:
            return b""
        place = slice(self.units.blocks(part).start, self.units.blocks(part).stop)
        distances = self._distances[place]
        exponents = torch.maximum(
            _exponent_above(distances * STEP_OVER_DISTANCE), _exponent_above(self._magnitudes[place]) - FINEST
        )
        exponents.clamp_min_(LOWEST_EXPONENT)
        exponents[(distances == 0) | distances.isinf() | (exponents > HIGHEST_EXPONENT)] = UNKNOWN
        return exponents.to(torch.int8).numpy().tobytes()

    def learn(self, blocks: range, distances: Tensor, magnitudes: Tensor) -> None:
        """Remember the distances of a committed swap."""
        place = slice(blocks.start, blocks.stop)
        self._distances[place], self._magnitudes[place] = distances, magnitudes


class Coding:
    """One swap's coding of a slice. `values` is this peer's snapshot, which must not change before the commit.

    `start` is the first element of the slice. `swap_id` and the two valid proposals determine the grids, which are the
    same for both partners.
    """

    def __init__(self, coder: Coder, part: Slice, values: Tensor, *, swap_id: bytes, proposals: tuple[bytes, bytes]):
        self.part = part
        self.start = coder.units.bounds(part)[0]
        self.values = values
        self.chunks = coder.units.chunks(part)
        self.swap_id = swap_id
        self._coder = coder
        self._blocks = coder.units.blocks(part)
        self._grids = self._agree(swap_id, *proposals)
        self._halves: dict[int, Callable[[], Tensor]] = {}  # decodes the half-difference of a chunk that arrived
        self._sent: dict[int, Payload] = {}
        self._earlier: dict[int, bytes] = {}
        self._distances, self._magnitudes = torch.zeros(2, len(self._blocks), dtype=torch.float32, device="cpu")

    def num_bytes(self, number: int, index: int) -> int:
        """Return the size of a chunk in pass `number` (from 0)."""
        return self._codec(number, index).num_bytes(self.chunks[index].shape)

    def encode(self, number: int, indices: Sequence[int]) -> list[Payload]:
        """Encode these chunks. Raises ValueError if a value is not finite."""
        payloads: list[Payload] = []
        for index in indices:
            codec, values = self._codec(number, index), self._values(index)
            if isinstance(codec, ModuloCodec):
                payload = codec.encode(values, grid=self._grids[index])
            else:
                payload = self._sent[index] = codec.encode(values)
            payloads.append(payload)
        return payloads

    def check(self, number: int, indices: Sequence[int], payloads: Sequence[Payload]) -> list[int]:
        """Check the partner's payloads, and return the chunks that need another pass.

        Raises CorruptPayload if a payload is invalid. `encode` has been called for the same pass.
        """
        return [
            index for index, payload in zip(indices, payloads, strict=True) if not self._check(number, index, payload)
        ]

    def half_difference(self, index: int) -> Tensor:
        """Return (Q(partner) - Q(own)) / 2 of a chunk, in fp32. The partner computes exactly its negative."""
        return self._halves[index]()

    def learn(self) -> None:
        """Let the coder remember the distances of this swap, after its commit."""
        self._coder.learn(self._blocks, self._distances, self._magnitudes)

    def _check(self, number: int, index: int, payload: Payload) -> bool:
        codec, chunk = self._codec(number, index), self.chunks[index]
        codec.check(payload, shape=chunk.shape)
        if isinstance(codec, ModuloCodec):
            earlier, grid = self._earlier.pop(index, b""), self._grids[index]
            if earlier and earlier[-DIGEST_BYTES:] != payload[-DIGEST_BYTES:]:
                raise CorruptPayload(f"it changed its chunk {index} between two passes")
            differences, [size] = (
                codec.differences(self._values(index), payload, grid=grid, earlier=earlier),
                chunk.shape,
            )
            if differences:
                self._halves[index] = partial(codec.half_difference, differences, num_elements=size, grid=grid)
            elif codec is self._coder.passes[-1]:
                self._halves[index] = partial(torch.zeros, size, dtype=torch.float32, device="cpu")
            else:
                self._earlier[index] = earlier + bytes(payload)
                return False
        else:
            own, partner = self._sent.pop(index), bytes(payload)
            decode = partial(codec.decode, shape=chunk.shape)
            self._halves[index] = lambda: half_difference_(decode(own), decode(partner))
        self._measure(index, chunk)
        return True

    def _measure(self, index: int, chunk: Chunk) -> None:
        halves, values = self.half_difference(index), self._values(index)
        pairs = zip(halves.split(BLOCK_ELEMENTS), values.split(BLOCK_ELEMENTS), strict=True)
        for block, (half, own) in zip(chunk.blocks, pairs, strict=True):
            at = block - self._blocks.start
            self._distances[at] = 2 * torch.linalg.vector_norm(half) / len(half) ** 0.5
            self._magnitudes[at] = own.abs().amax()

    def _agree(self, swap_id: bytes, own: bytes, partner: bytes) -> dict[int, Grid]:
        """Return the grid of each chunk if both propose a step for each of its blocks: the finer one."""
        grids: dict[int, Grid] = {}
        pairs = zip(_signed(own), _signed(partner), strict=True)
        exponents = [UNKNOWN if UNKNOWN in pair else min(pair) for pair in pairs]
        for index, chunk in enumerate(self.chunks if exponents else []):
            start, stop = (block - self._blocks.start for block in (chunk.blocks.start, chunk.blocks.stop))
            seed = blake3(swap_id + chunk.blocks.start.to_bytes(4, "little")).digest(8)
            if UNKNOWN not in exponents[start:stop]:
                grids[index] = Grid(tuple(exponents[start:stop]), int.from_bytes(seed, "little"))
        return grids

    def _codec(self, number: int, index: int) -> ModuloCodec | Codec:
        return self._coder.passes[number] if index in self._grids else self._coder.plain

    def _values(self, index: int) -> Tensor:
        chunk = self.chunks[index]
        return self.values[chunk.start : chunk.stop]


def check_proposal(coder: Coder, part: Slice, proposal: bytes) -> None:
    """Raise CorruptPayload if a partner's proposal has the wrong length or an exponent that is out of range."""
    expected = len(coder.units.blocks(part))
    if len(proposal) != expected:
        raise CorruptPayload(f"it proposes a grid of {len(proposal)} blocks, but the slice has {expected}")
    for exponent in _signed(proposal):
        if exponent != UNKNOWN and not LOWEST_EXPONENT <= exponent <= HIGHEST_EXPONENT:
            raise CorruptPayload(f"it proposes a grid step of 2**{exponent}, which is out of range")


def half_difference_(own_coded: Tensor, partner_coded: Tensor) -> Tensor:
    """Compute (partner - own) / 2 in place of `partner_coded`, and overwrite `own_coded`; both are fp32.

    The partner's call returns exactly the negative, element by element, because each operand is halved separately and
    rounding a difference to nearest is symmetric. Halving first also keeps the result finite, whereas (partner - own)
    could overflow. The computation is not fused into one multiply-add, which would round subnormal operands
    differently.
    """
    return partner_coded.mul_(0.5).sub_(own_coded.mul_(0.5))


def _signed(proposal: bytes) -> tuple[int, ...]:
    return struct.unpack(f"{len(proposal)}b", proposal)


def _exponent_above(values: Tensor) -> Tensor:
    """Return the exponent of the smallest power of two above each non-negative value, or LOWEST_EXPONENT for 0."""
    return torch.frexp(values).exponent.masked_fill_(values == 0, LOWEST_EXPONENT)
