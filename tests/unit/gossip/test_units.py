"""All peers divide a vector in the same way, and a slice has the units that were mixed longest ago."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.codec import CHUNK_ELEMENTS
from noloco_p2p.codec.modulo import BLOCK_ELEMENTS
from noloco_p2p.gossip.units import LEAST_ELEMENTS, MAX_UNITS, MOST_ELEMENTS, Ages, Slice, Units

SIZES = [1, LEAST_ELEMENTS, LEAST_ELEMENTS + 1, 123_456, 3_000_000, 125_000_000, 7_000_000_123]


@pytest.mark.parametrize("num_elements", SIZES)
def test_units_cover_the_vector_without_gaps(num_elements: int) -> None:
    units = Units(num_elements)
    bounds = [units.bounds(Slice(unit, 1)) for unit in range(units.num_units)]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == num_elements
    assert units.num_units <= MAX_UNITS


@pytest.mark.parametrize("num_elements", SIZES[:-2])
def test_chunks_cover_a_slice_and_share_no_block(num_elements: int) -> None:
    units = Units(num_elements)
    part = Slice(units.num_units // 3, units.num_units - units.num_units // 3)
    start, stop = units.bounds(part)
    chunks = units.chunks(part)
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
    assert chunks[-1].stop == stop - start
    assert all(0 < chunk.shape[0] <= CHUNK_ELEMENTS for chunk in chunks)
    blocks = [block for chunk in chunks for block in chunk.blocks]
    assert len(blocks) == len(set(blocks))
    assert set(blocks) <= set(units.blocks(part))
    assert all(len(chunk.blocks) == -(-chunk.shape[0] // BLOCK_ELEMENTS) for chunk in chunks)


def test_a_slice_is_bounded_whatever_the_link() -> None:
    units = Units(7_000_000_000)
    assert units.count_of(1e12) * units.unit_elements <= max(MOST_ELEMENTS, units.unit_elements)
    assert units.count_of(0.0) == 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 12), st.data())
def test_the_oldest_slice_is_chosen(steps: list[int], at_most: int, data: st.DataObject) -> None:
    ages, now = Ages(len(steps)), 10
    for unit, at in enumerate(steps):
        ages.end(Slice(unit, 1), mixed_at=at)
    busy = data.draw(st.sets(st.integers(0, len(steps) - 1)))
    for unit in busy:
        ages.begin(Slice(unit, 1))
    told = Ages(len(steps)).tell(now)
    chosen = ages.choose(told, now, at_most=at_most)
    if len(busy) == len(steps):
        assert chosen is None
        return
    assert chosen is not None
    assert chosen.count <= at_most
    assert busy.isdisjoint(chosen.units)
    both = [
        0 if unit in busy else mine + other for unit, (mine, other) in enumerate(zip(ages.tell(now), told, strict=True))
    ]
    slices = [
        Slice(first, count)
        for first in range(len(steps))
        for count in range(1, min(at_most, len(steps) - first) + 1)
        if busy.isdisjoint(range(first, first + count))
    ]
    assert sum(both[unit] for unit in chosen.units) == max(sum(both[unit] for unit in each.units) for each in slices)


def test_an_offer_reserves_its_units() -> None:
    ages = Ages(12)
    for unit in range(12):
        ages.end(Slice(unit, 1), mixed_at=0 if unit in range(3, 8) else 90)
    reserved = ages.reserve(100, at_most=2)
    assert reserved is not None
    told, window = reserved
    assert window == Slice(3, 4)
    assert [unit for unit, age in enumerate(told) if age] == [3, 4, 5, 6]
    assert ages.choose(Ages(12).tell(100), 100, at_most=5) == Slice(7, 5)
    ages.end(window, mixed_at=None)
    assert ages.num_free == 12


def test_an_offer_leaves_units_for_other_offers() -> None:
    ages = Ages(4)
    reserved = ages.reserve(1, at_most=4)
    assert reserved is not None
    assert reserved[1].count == 2
    assert ages.reserve(1, at_most=4) is not None
