"""Weights are copied between two steps of the optimizer, and small half-differences reach 16-bit weights."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.weights import Weights, add_
from noloco_p2p.spec import OuterSpec


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, -3.7, 1e-5, 0.0])
def test_the_expectation_of_a_sum_is_exact(dtype: torch.dtype, value: float) -> None:
    torch.manual_seed(1)
    values = torch.full((100_000,), value).to(dtype)
    before, offset = values.double(), max(abs(value), 1e-5) * 2.0**-13  # a small part of the distance of two numbers
    for _ in range(20):
        add_(values, torch.full((100_000,), offset))
    gained = (values.double() - before).mean() / (20 * offset)
    assert float(gained) == pytest.approx(1.0, abs=0.05)


def test_rounding_to_nearest_would_lose_small_offsets() -> None:
    values = torch.ones(1000, dtype=torch.bfloat16)
    for _ in range(20):
        values.add_(torch.full((1000,), 2.0**-10).bfloat16())
    assert torch.equal(values, torch.ones(1000, dtype=torch.bfloat16))


def test_fp32_sums_are_those_of_torch() -> None:
    values, offset = torch.randn(1000), torch.randn(1000)
    expected = values + offset
    add_(values, offset)
    assert torch.equal(values, expected)


def test_a_copy_sees_no_step_half_done() -> None:
    model = nn.ParameterList([torch.zeros(100_000), torch.zeros(100_000)])  # together less than a chunk
    weights, stop = Weights(FlatParameters(model), OuterSpec()), threading.Event()

    def train() -> None:
        step = 0
        while not stop.wait(1e-4):  # the time of the forward and backward passes
            step += 1
            with weights.lock, torch.no_grad():
                for param in model:
                    param.fill_(step)

    thread = threading.Thread(target=train)
    thread.start()
    seen: set[float] = set()
    try:
        while len(seen) < 20:
            copy = weights.read(0, 200_000)
            assert float(copy.min()) == float(copy.max())
            seen.add(float(copy[0]))
    finally:
        stop.set()
        thread.join()
