"""DiLoCo: one outer optimizer on the mean outer gradient of all replicas. For simulation only.

With outer gradient g (it points downhill), momentum m, alpha and beta of the spec:

    heavy ball                m <- alpha m + beta g       slow weights += m
    Nesterov                  m <- alpha m + beta g       slow weights += beta g + alpha m

These are `torch.optim.SGD` with lr = beta and momentum = alpha, without and with `nesterov=True`. DiLoCo (arXiv
2311.08105) publishes Nesterov with 0.9 and 0.7. The heavy ball with 0.3 and 0.7 is the baseline of NoLoCo's reference
code; it is NoLoCo with everybody in one group, so that the mixing term vanishes.
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
        """Do nothing: replicas train independently within a round."""

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
