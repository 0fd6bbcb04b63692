"""The mean of states in which liars count for little. tests/unit/trainer has the states of real checkpoints."""

from __future__ import annotations

import pytest
import torch

from noloco_p2p.outer.robust_mean import MOST_MOVED, robust_mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_state_that_is_far_moves_the_mean_a_little_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    states = {str(number): torch.full((1000,), 1.0) for number in range(8)}
    states["7"] += 0.4
    torch.set_default_dtype(dtype)
    try:
        found = robust_mean(states)
    finally:
        torch.set_default_dtype(torch.float32)
    assert list(found.shortened) == ["7"]
    assert found.weights.dtype == torch.float32
    assert found.weights.tolist() == pytest.approx([1.0 + MOST_MOVED] * 1000, rel=1e-6)
