"""The bound on gamma that a run spec enforces, against its algebra and against a simulated swarm of scalars."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from half_difference import half_difference

from noloco_p2p.outer.outer_step import outer_step
from noloco_p2p.spec import OuterSpec

both_rules = pytest.mark.parametrize("swap_momentum", [False, True], ids=["weights swapped", "momentum swapped too"])
some_alphas = pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.8])


def bound(*, alpha: float, swap_momentum: bool) -> float:
    return OuterSpec(wait=True, alpha=alpha, gamma=1e-3, swap_momentum=swap_momentum).gamma_bound()


def growth_of_moments(*, alpha: float, gamma: float, swap_momentum: bool) -> float:
    """Return the largest |eigenvalue| of one round on (E phi^2, E phi delta, E delta^2).

    Partners are independent, and outer gradients are zero.
    """
    if swap_momentum:
        new_momentum_squared = np.array([gamma**2 / 2, 0, alpha**2 / 2])
        weight_times_new_momentum = np.array([-gamma / 2, alpha / 2, 0])
    else:
        new_momentum_squared = np.array([gamma**2 / 2, -alpha * gamma, alpha**2])
        weight_times_new_momentum = np.array([-gamma / 2, alpha, 0])
    rows = [
        np.array([1, 0, 0]) + 2 * weight_times_new_momentum + new_momentum_squared,
        weight_times_new_momentum + new_momentum_squared,
        new_momentum_squared,
    ]
    return float(np.abs(np.linalg.eigvals(np.stack(rows))).max())


def simulated_growth(*, alpha: float, gamma: float, swap_momentum: bool) -> float:
    """Return the growth per round of the mean square distance of many one-element replicas, in random pairs each round.

    Elements of a vector do not interact in an outer step, so one vector holds the whole swarm.
    """
    num_replicas, warm_up, rounds = 200_000, 15, 30
    generator = torch.Generator().manual_seed(5)
    weights, no_gradient = torch.randn(num_replicas, generator=generator), torch.zeros(num_replicas)
    momentum = torch.zeros(num_replicas)
    spread = []
    for _ in range(rounds):
        order = torch.randperm(num_replicas, generator=generator)
        partner = torch.empty_like(order)
        partner[order] = order.view(-1, 2).flip(1).view(-1)
        offset = half_difference(weights, weights[partner])
        if swap_momentum:
            momentum += half_difference(momentum, momentum[partner])
        outer_step(weights, momentum, no_gradient, offset, alpha=alpha, beta=0.7, gamma=gamma)
        spread.append(weights.var().item())
    return (spread[-1] / spread[warm_up]) ** (1 / (rounds - 1 - warm_up))


@both_rules
@some_alphas
def test_second_moments_stand_still_exactly_at_the_bound(alpha: float, swap_momentum: bool) -> None:
    limit = bound(alpha=alpha, swap_momentum=swap_momentum)
    below, at, above = (
        growth_of_moments(alpha=alpha, gamma=limit * share, swap_momentum=swap_momentum) for share in (0.999, 1, 1.001)
    )
    assert below < 1 < above
    assert at == pytest.approx(1, abs=1e-12)


@both_rules
@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.8])
def test_the_spread_shrinks_below_the_bound_and_grows_above(alpha: float, swap_momentum: bool) -> None:
    limit = bound(alpha=alpha, swap_momentum=swap_momentum)
    assert simulated_growth(alpha=alpha, gamma=0.95 * limit, swap_momentum=swap_momentum) < 1
    assert simulated_growth(alpha=alpha, gamma=1.05 * limit, swap_momentum=swap_momentum) > 1


@both_rules
def test_the_default_setting_shrinks_the_spread_as_fast_as_the_algebra_says(swap_momentum: bool) -> None:
    setting = {"alpha": 0.5, "gamma": 0.7, "swap_momentum": swap_momentum}
    assert simulated_growth(**setting) == pytest.approx(growth_of_moments(**setting), rel=0.03)
