"""Divide a flat vector into units, and remember when each of them was last mixed.

A swap carries a slice: some consecutive units. All peers of a run have the same units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from noloco_p2p.codec import CHUNK_ELEMENTS
from noloco_p2p.codec.modulo import BLOCK_ELEMENTS
from noloco_p2p.gossip.frames import Slice

MAX_UNITS = 256  # an offer has one byte for each
LEAST_ELEMENTS = 4096  # of a unit; smaller units would cost more in headers than they contain
MOST_ELEMENTS = 1 << 24  # of a slice: 64 MiB of fp32, which a CPU copies or adds in about 20 ms
CHOICE = 2  # times as many units are offered as a swap carries
AGES_PER_DOUBLING = 16  # an age is told as 16 log2(1 + steps), so that a byte reaches 65,000 steps


@dataclass(frozen=True, slots=True)
class Chunk:
    """The elements [start, stop) of a slice that travel as one payload, and the blocks of the vector that they form."""

    start: int
    stop: int
    blocks: range

    @property
    def shape(self) -> tuple[int]:
        return (self.stop - self.start,)


class Units:
    """The units of a vector of `num_elements` elements."""

    def __init__(self, num_elements: int) -> None:
        self.num_elements = num_elements
        self.unit_elements = max(LEAST_ELEMENTS, -(-num_elements // MAX_UNITS))
        self.num_units = max(1, -(-num_elements // self.unit_elements))
        self._blocks_a_unit = -(-self.unit_elements // BLOCK_ELEMENTS)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the vector. Each block has its own grid step."""
        return self.num_units * self._blocks_a_unit

    def bounds(self, part: Slice) -> tuple[int, int]:
        """Return the elements [start, stop) of a slice."""
        start = part.first * self.unit_elements
        return start, min(start + part.count * self.unit_elements, self.num_elements)

    def blocks(self, part: Slice) -> range:
        return range(part.first * self._blocks_a_unit, (part.first + part.count) * self._blocks_a_unit)

    def chunks(self, part: Slice) -> list[Chunk]:
        """Return the chunks of a slice, in order. No chunk crosses the end of a unit."""
        return [chunk for unit in part.units for chunk in self._chunks(unit, before=self.bounds(part)[0])]

    def _chunks(self, unit: int, *, before: int) -> Iterator[Chunk]:
        start, stop = self.bounds(Slice(unit, 1))
        for index, first in enumerate(range(start, stop, CHUNK_ELEMENTS)):
            last = min(first + CHUNK_ELEMENTS, stop)
            block = unit * self._blocks_a_unit + index * (CHUNK_ELEMENTS // BLOCK_ELEMENTS)
            blocks = range(block, block + -(-(last - first) // BLOCK_ELEMENTS))
            yield Chunk(first - before, last - before, blocks)

    def count_of(self, num_elements: float) -> int:
        """Return how many units hold at most `num_elements` elements, but at least 1."""
        return max(1, min(self.num_units, int(min(num_elements, MOST_ELEMENTS) // self.unit_elements)))


class Ages:
    """How many inner steps ago this peer mixed each unit, and which units a swap carries now."""

    def __init__(self, num_units: int) -> None:
        self._mixed_at = [0] * num_units  # inner steps
        self._mixings = [0] * num_units  # since the last call of `rest`
        self._busy: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._mixed_at) - len(self._busy)

    def rest(self) -> None:
        """Begin to count mixings, after the last inner step."""
        self._mixings = [0] * len(self._mixings)

    @property
    def least_mixings(self) -> int:
        """Return how often the least mixed unit has been mixed since the last call of `rest`."""
        return min(self._mixings)

    def tell(self, now: int) -> bytes:
        """Return one byte per unit for an offer: 0 for a busy unit, and otherwise 1 or more, growing with its age."""
        return bytes(0 if unit in self._busy else _told(now - at) for unit, at in enumerate(self._mixed_at))

    def reserve(self, now: int, *, at_most: int, all_free: bool = False) -> tuple[bytes, Slice] | None:
        """Return what to tell in an offer, and the units that it reserves until it is answered.

        These are the oldest units, about twice as many as a swap carries, so that the partner has a choice. Unless
        `all_free`, at most half of the free units are reserved, because offers of other peers arrive meanwhile.
        """
        told = self.tell(now)
        window = _oldest(told, max(1, min(CHOICE * at_most, self.num_free // (1 if all_free else 2))))
        if window is None:
            return None
        self.begin(window)
        stop = window.first + window.count
        return bytes(window.first) + told[window.first : stop] + bytes(len(told) - stop), window

    def choose(self, theirs: bytes, now: int, *, at_most: int) -> Slice | None:
        """Return the slice of up to `at_most` units that both partners together mixed longest ago, or None.

        `theirs` is what the partner told. A busy unit of either partner is not part of the slice.
        """
        both = [mine + other if mine and other else 0 for mine, other in zip(self.tell(now), theirs, strict=True)]
        return _oldest(both, at_most)

    def begin(self, part: Slice) -> None:
        self._busy.update(part.units)

    def end(self, part: Slice, *, mixed_at: int | None) -> None:
        """End a swap. `mixed_at` is the inner step of its snapshot, or None if the swap failed."""
        self._busy.difference_update(part.units)
        if mixed_at is not None:
            for unit in part.units:
                self._mixed_at[unit] = mixed_at
                self._mixings[unit] += 1


def _told(age: int) -> int:
    return 1 + min(254, int(AGES_PER_DOUBLING * math.log2(1 + max(0, age))))


def _oldest(ages: Sequence[int], at_most: int) -> Slice | None:
    """Return the run of up to `at_most` units without a 0 whose ages have the largest sum."""
    best, chosen, first, total = 0, None, 0, 0
    for unit, age in enumerate(ages):
        if not age:
            first, total = unit + 1, 0
            continue
        total += age
        if unit - first == at_most:
            total -= ages[first]
            first += 1
        if total > best:
            best, chosen = total, Slice(first, unit + 1 - first)
    return chosen
