"""Simulate NoLoCo with random groups of more than two replicas, which all-reduce within their group.

The size of a group is n in arXiv 2506.10911. With groups of two, this rule behaves as peers do, except that nothing is
encoded and momentum is averaged within the group. With all replicas in one group, it is DiLoCo.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from noloco_p2p.optim.allreduce import ring_bytes
from noloco_p2p.optim.noloco import outer_step

SIZE = 4


class Groups:
    """NoLoCo in groups of `size` replicas, as an outer rule. Any remaining replicas form a smaller group."""

    is_collective = False

    def __init__(self, rng: random.Random, *, alpha: float, beta: float, gamma: float, size: int = SIZE) -> None:
        self._rng = rng
        self._strengths = {"alpha": alpha, "beta": beta, "gamma": gamma}
        self._size = size
        self._momentum: Tensor | None = None

    def mix_gradients(self, gradients: Tensor) -> None:
        """Do nothing, because replicas train independently within a round."""

    def outer_step(self, slow_weights: Tensor, fast_weights: Tensor) -> None:
        momentum = torch.zeros_like(slow_weights) if self._momentum is None else self._momentum
        gradients = fast_weights - slow_weights
        order = list(range(len(slow_weights)))
        self._rng.shuffle(order)
        for start in range(0, len(order), self._size):
            group = order[start : start + self._size]
            own = slow_weights[group]
            mean_momentum = momentum[group].mean(0).expand_as(own).clone()
            mean_gradient = gradients[group].mean(0).expand_as(own)
            offset = own.mean(0) - own
            outer_step(own, mean_momentum, mean_gradient, offset, **self._strengths)
            slow_weights[group], momentum[group] = own, mean_momentum
        self._momentum = momentum

    def sent_bytes(self, num_elements: int, num_replicas: int) -> tuple[float, float]:
        num_vectors = 3 if self._strengths["alpha"] else 2  # slow weights, outer gradient, and any momentum
        return 0.0, num_vectors * ring_bytes(4.0 * num_elements, min(self._size, num_replicas))
