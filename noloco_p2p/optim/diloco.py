"""Simulate DiLoCo, which applies one outer optimizer to the mean outer gradient of all replicas.

With the outer gradient g (which points downhill), the momentum m, and alpha and beta from the spec, the steps are

    heavy ball                m <- alpha m + beta g       slow weights += m
    Nesterov                  m <- alpha m + beta g       slow weights += beta g + alpha m

`torch.optim.SGD` with lr = beta and momentum = alpha takes the same steps; `nesterov=True` selects the second one.
DiLoCo (arXiv 2311.08105) uses Nesterov momentum with alpha = 0.9 and beta = 0.7. NoLoCo's reference code uses the heavy
ball with alpha = 0.3 and beta = 0.7 as its baseline. This baseline is NoLoCo with all replicas in one group, where the
mixing term vanishes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noloco_p2p.optim.allreduce import Ring


class DiLoCo:
    is_collective = True

    def __init__(self, ring: Ring, *, alpha: float, beta: float, is_nesterov: bool = False) -> None:
        self._ring = ring
        self._alpha = alpha
        self._beta = beta
        self._is_nesterov = is_nesterov
        self._momentum: Tensor | None = None

    def mix_gradients(self, gradients: Tensor) -> None:
        """Do nothing, because replicas train independently within a round."""

    def outer_step(self, slow_weights: Tensor, fast_weights: Tensor) -> None:
        if self._momentum is None:
            self._momentum = torch.zeros_like(slow_weights[0])
        gradient = self._ring.mean(fast_weights - slow_weights)
        self._momentum.mul_(self._alpha).add_(gradient, alpha=self._beta)
        update = self._momentum
        if self._is_nesterov:
            update = self._beta * gradient + self._alpha * self._momentum
        slow_weights.copy_((slow_weights[0] + update).expand_as(slow_weights))

    def sent_bytes(self, num_elements: int, num_replicas: int) -> tuple[float, float]:
        return 0.0, self._ring.sent_bytes(num_elements, num_replicas)
