"""The mean of states in which liars count for little. tests/unit/trainer has the states of real checkpoints."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from noloco_p2p.outer.checkpoint import Vector
from noloco_p2p.outer.robust_mean import MOST_MOVED, robust_mean


def part_of(vector: Tensor, start: int, stop: int) -> Tensor:
    return vector[start:stop]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_state_that_is_far_moves_the_mean_a_little_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    values = {str(number): torch.full((1000,), 1.4 if number == 7 else 1.0) for number in range(8)}
    states = {name: Vector(1000, partial(part_of, vector)) for name, vector in values.items()}
    torch.set_default_dtype(dtype)
    try:
        found = robust_mean(states)
    finally:
        torch.set_default_dtype(torch.float32)
    assert list(found.shortened) == ["7"]
    assert found.weights.dtype == torch.float32
    assert found.weights.tolist() == pytest.approx([1.0 + MOST_MOVED] * 1000, rel=1e-6)
