"""The outer step against the public reference implementation, as a solo step, in slices, and with invalid input."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from half_difference import half_difference
from torch import Tensor

from noloco_p2p.outer.outer_step import outer_step

VECTORS = Path(__file__).parents[2] / "vectors" / "outer_step.json"
CASES: list[dict[str, Any]] = json.loads(VECTORS.read_text(encoding="utf-8"))["cases"]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['replicas']}-replicas-alpha-{c['alpha']}")


@dataclass(frozen=True, slots=True)
class State:
    """The state of one replica: fp32 vectors of one shape."""

    slow: Tensor
    fast: Tensor
    momentum: Tensor

    @classmethod
    def from_json(cls, values: dict[str, list[list[float]]]) -> State:
        flat = {name: torch.tensor([x for tensor in values[name] for x in tensor]) for name in values}
        return cls(**flat)


def partner_of(step: dict[str, Any]) -> int:
    (partner,) = set(step["group"]) - {step["rank"]}
    return partner


def one_round(case: dict[str, Any], before: dict[int, State], partners: dict[int, int]) -> dict[int, State]:
    """Return the replicas after one round with their partners, uncoded; `before` is not changed."""
    after = {}
    for rank, own in before.items():
        partner = before[partners[rank]]
        slow, momentum, own_gradient = own.slow.clone(), own.momentum.clone(), own.fast - own.slow
        mean_gradient = own_gradient + half_difference(own_gradient, partner.fast - partner.slow)
        offset = half_difference(own.slow, partner.slow)
        outer_step(slow, momentum, mean_gradient, offset, alpha=case["alpha"], beta=case["beta"], gamma=case["gamma"])
        after[rank] = State(slow=slow, fast=slow.clone(), momentum=momentum)
    return after


def steps_of_round(case: dict[str, Any], number: int) -> list[dict[str, Any]]:
    steps = [step for step in case["steps"] if step["round"] == number]
    assert len(steps) == case["replicas"]
    return steps


def assert_agrees(ours: State, expected: dict[str, list[list[float]]]) -> None:
    reference = State.from_json(expected)
    torch.testing.assert_close(ours.slow, reference.slow, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.fast, reference.fast, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.momentum, reference.momentum, atol=1e-6, rtol=0)


@each_case
def test_a_chain_of_rounds_agrees_with_the_reference(case: dict[str, Any]) -> None:
    """Slow weights and momentum carry over between rounds; only the result of the inner steps comes from the file."""
    state = {step["rank"]: State.from_json(step["before"]) for step in steps_of_round(case, 0)}
    for number in range(case["rounds"]):
        steps = steps_of_round(case, number)
        before = {
            step["rank"]: State(
                slow=state[step["rank"]].slow,
                fast=State.from_json(step["before"]).fast,
                momentum=state[step["rank"]].momentum,
            )
            for step in steps
        }
        state = one_round(case, before, {step["rank"]: partner_of(step) for step in steps})
        for step in steps:
            assert_agrees(state[step["rank"]], step["after"])


def test_each_strength_has_a_place_of_its_own() -> None:
    """The reference uses one number for beta and gamma, so this is by hand: 0.5 x 8 + 0.25 x 4 + 2 x 1.5 = 8."""
    slow, momentum = torch.tensor([10.0]), torch.tensor([8.0])
    outer_step(slow, momentum, torch.tensor([4.0]), torch.tensor([1.5]), alpha=0.5, beta=0.25, gamma=2.0)
    assert (momentum.item(), slow.item()) == (8.0, 18.0)
    outer_step(slow, None, torch.tensor([4.0]), torch.tensor([1.5]), alpha=0.0, beta=0.25, gamma=2.0)
    assert slow.item() == 22.0


def test_alone_is_momentum_on_the_own_gradient() -> None:
    slow, momentum, gradient = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.25]), torch.tensor([2.0, -4.0])
    outer_step(slow, momentum, gradient, None, alpha=0.5, beta=0.75, gamma=0.7)
    assert momentum.tolist() == [1.75, -2.875]  # 0.5 delta + 0.75 Delta
    assert slow.tolist() == [2.75, -4.875]
    assert gradient.tolist() == [2.0, -4.0]


def test_slices_give_the_bits_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(2)
    vectors = torch.randn(4, 1003, generator=generator)
    whole, sliced = vectors.clone(), vectors.clone()
    outer_step(*whole, alpha=0.5, beta=0.7, gamma=0.9)
    for start in range(0, 1003, 17):
        outer_step(*sliced[:, start : start + 17], alpha=0.5, beta=0.7, gamma=0.9)
    assert torch.equal(whole, sliced)
