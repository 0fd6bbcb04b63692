from __future__ import annotations

import math
from base64 import b64encode, b85encode

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.codec.sketch import (
    BLOCK_ELEMENTS,
    LARGEST,
    LARGEST_STEP,
    MARKS,
    SKETCH_SIZE,
    norm,
    pack,
    sketch,
    unpack,
)

# Sketch of 0, 1, 2, .. 99_999 for the run "golden" at mark 7. Sums of integers are the same on every machine.
GOLDEN_HEAD = [2125723.0, 611314.0, 4998000.0, 111022.0]
PACKED_LETTERS = 175


def ramp(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32)


def test_golden_numbers() -> None:
    values = sketch(ramp(100_000), run="golden", mark=7)
    assert values.shape == (SKETCH_SIZE,)
    assert values.dtype is torch.float64
    assert values[:4].tolist() == GOLDEN_HEAD


def test_it_is_linear() -> None:
    a, b = (torch.randn(100_003, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    both = sketch(a, run="r", mark=7) - sketch(b, run="r", mark=7)
    assert torch.allclose(sketch(a - b, run="r", mark=7), both, atol=1e-3)


def test_runs_and_marks_have_maps_of_their_own() -> None:
    values = torch.randn(1000)
    first = sketch(values, run="a", mark=7)
    assert not torch.allclose(first, sketch(values, run="b", mark=7))
    assert not torch.allclose(first, sketch(values, run="a", mark=8))


def test_every_element_goes_to_one_bucket_with_a_sign() -> None:
    """This holds for elements of later blocks too, and buckets and signs are used evenly."""
    for index in (0, 1, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, 3 * BLOCK_ELEMENTS + 7):
        one = torch.zeros(4 * BLOCK_ELEMENTS)
        one[index] = 3.0
        values = sketch(one, run="r", mark=7)
        assert (values != 0).sum() == 1
        assert values.abs().max() == 3.0
    counts = sketch(torch.ones(1 << 20), run="r", mark=7)
    assert float(counts.abs().max()) < 6 * math.sqrt((1 << 20) / SKETCH_SIZE), "signs cancel as coins do"


def test_repeated_blocks_do_not_add_up() -> None:
    """The norm is right for a vector whose blocks are all equal, as with tied or constant weights."""
    block = torch.randn(BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(1))
    vector = block.repeat(64)
    ratios = [float(sketch(vector, run=f"r{n}", mark=7).norm() / vector.norm()) for n in range(20)]
    assert abs(sum(ratios) / len(ratios) - 1) < 0.1
    assert max(ratios) < 1.4


@given(st.lists(st.floats(-1e29, 1e29), min_size=SKETCH_SIZE, max_size=SKETCH_SIZE))
def test_packed_numbers_come_back_within_half_a_step(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float64)
    text = pack(values, mark=MARKS // 3, norm=12.5)
    assert len(text) == PACKED_LETTERS
    unpacked = unpack(text)
    assert unpacked is not None
    assert (unpacked.mark, unpacked.norm) == (MARKS // 3, 12.5)
    largest = max(map(abs, numbers))
    assert unpacked.step == pytest.approx(largest / LARGEST, rel=1e-6, abs=1e-44)
    off = max(abs(a - b) for a, b in zip(unpacked.numbers, numbers, strict=True))
    assert off <= 0.51 * unpacked.step + 1e-6 * largest + 1e-40


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e40])
def test_what_is_not_finite_is_not_published(bad: float) -> None:
    values = torch.zeros(SKETCH_SIZE, dtype=torch.float64)
    values[3] = bad
    assert pack(values, mark=7, norm=1.0) == ""
    assert pack(torch.ones(SKETCH_SIZE), mark=7, norm=bad) == ""


@given(st.text() | st.binary(max_size=200).map(lambda data: b85encode(data).decode()))
def test_junk_is_no_sketch(text: str) -> None:
    unpacked = unpack(text)
    assert unpacked is None or all(map(math.isfinite, unpacked.numbers))


@given(st.binary(min_size=PACKED_LETTERS // 5 * 4, max_size=PACKED_LETTERS // 5 * 4))
def test_whatever_a_stranger_packs_is_finite(data: bytes) -> None:
    unpacked = unpack(b85encode(data).decode())
    if unpacked is not None:
        assert all(abs(number) <= (LARGEST + 1) * LARGEST_STEP for number in unpacked.numbers)
        assert 0 <= unpacked.mark < 2**32
        assert 0 < unpacked.norm < LARGEST_STEP


def test_the_sketches_of_older_peers_are_no_sketches() -> None:
    """Theirs are 132 bytes without a mark, in base64."""
    assert unpack(b64encode(bytes(132)).decode()) is None


def test_the_norm_is_exact() -> None:
    vector = torch.randn(100_003, generator=torch.Generator().manual_seed(1))
    assert norm(vector) == pytest.approx(float(vector.double().norm()), rel=1e-6)
