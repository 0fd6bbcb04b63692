"""DiLoCo: NoLoCo with everybody in one group, so that the mixing term vanishes. For simulation only.

The outer optimizer is the momentum of arXiv 2506.10911 (its DiLoCo baseline): alpha and beta are those of the spec.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noloco_p2p.optim.allreduce import ring_bytes
from noloco_p2p.optim.noloco import outer_step


class DiLoCo:
    is_collective = True

    def __init__(self, *, alpha: float, beta: float) -> None:
        self._alpha = alpha
        self._beta = beta
        self._momentum: Tensor | None = None

    def mix_gradients(self, gradients: Tensor) -> None:
        """Replicas train alone."""

    def outer_step(self, slow_weights: Tensor, fast_weights: Tensor) -> None:
        if self._momentum is None:
            self._momentum = torch.zeros_like(slow_weights[0])
        gradient = (fast_weights - slow_weights).mean(0)
        outer_step(slow_weights[0], self._momentum, gradient, None, alpha=self._alpha, beta=self._beta, gamma=0.0)
        slow_weights.copy_(slow_weights[0].clone().expand_as(slow_weights))

    def sent_bytes(self, num_elements: int, num_replicas: int) -> tuple[float, float]:
        return 0.0, ring_bytes(num_elements, num_replicas)
