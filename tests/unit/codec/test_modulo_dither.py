"""The shared dither is the same on every machine, uniform, and uncorrelated across swaps, blocks and elements."""

from __future__ import annotations

import struct

import pytest
import torch
from blake3 import blake3
from torch import Tensor

from noloco_p2p.codec.dither import DITHER_ELEMENTS, WORDS_KEY, block_numbers, fill_dither

GOLDEN_SEED = 0x8CD9250851C0A481
GOLDEN_NUMBERS = (1414393603, 1701630103)
GOLDEN_BLOCK = "04eae8645458dbb8567f184088e6c014"


def block(seed: int, block_index: int = 0, num_elements: int = DITHER_ELEMENTS) -> Tensor:
    out = torch.empty(num_elements)
    fill_dither(out, scratch=torch.empty(num_elements, dtype=torch.int32), seed=seed, block_index=block_index)
    return out


def correlation(left: Tensor, right: Tensor) -> float:
    """Return the correlation in standard errors: about normal when the two are independent."""
    return float(torch.corrcoef(torch.stack([left, right]))[0, 1]) * len(left) ** 0.5


def by_hand(seed: int, block_index: int, num_elements: int) -> list[float]:
    a, c = struct.unpack("<ii", blake3(struct.pack("<QQ", seed, block_index)).digest(8))
    words = struct.unpack(f"<{num_elements}i", blake3(WORDS_KEY).digest(4 * num_elements))
    wrapped = [((a | 1) * word + c + 2**31) % 2**32 - 2**31 for word in words]
    return [struct.unpack("<f", struct.pack("<f", number))[0] / 2**32 for number in wrapped]


@pytest.mark.parametrize(("seed", "block_index"), [(0, 0), (1, 0), (0, 1), (2**64 - 1, 3)])
def test_dither_follows_its_written_definition(seed: int, block_index: int) -> None:
    assert block(seed, block_index, 5000).tolist() == by_hand(seed, block_index, 5000)


def test_golden_numbers() -> None:
    assert block_numbers(GOLDEN_SEED, 3) == GOLDEN_NUMBERS
    assert blake3(block(GOLDEN_SEED, 3).numpy().tobytes()).hexdigest()[:32] == GOLDEN_BLOCK


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63])
def test_a_block_is_uniform(seed: int) -> None:
    dither = block(seed).double()
    assert dither.min() >= -0.5
    assert dither.max() <= 0.5
    counts = torch.histc(dither, bins=256, min=-0.5, max=0.5)
    chi_square = float(((counts - 256).square() / 256).sum())
    assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5
    assert abs(float(dither.mean())) < 5 / (12 * DITHER_ELEMENTS) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 255, 256, 4096])
def test_neighbours_are_uncorrelated(lag: int) -> None:
    dither = block(7)
    assert abs(correlation(dither[:-lag], dither[lag:])) < 5


def test_neighbouring_swaps_and_blocks_are_uncorrelated() -> None:
    first = block(41, 5)
    for other in (block(42, 5), block(41, 6), block(41, 4), block(41 + 2**32, 5)):
        assert abs(correlation(first, other)) < 5


def test_over_swaps_an_element_is_uniform_and_two_are_uncorrelated() -> None:
    swaps = torch.stack([block(seed, num_elements=64) for seed in range(4000)]).double()
    assert (swaps.mean(dim=0).abs() < 5 / (12 * 4000) ** 0.5).all()
    assert ((swaps.var(dim=0) * 12 - 1).abs() < 5 * (0.8 / 4000) ** 0.5).all()
    correlations = torch.corrcoef(swaps.T).fill_diagonal_(0) * 4000**0.5
    assert correlations.abs().max() < 5
    assert abs(correlation(swaps[:-1, 0], swaps[1:, 0])) < 5
