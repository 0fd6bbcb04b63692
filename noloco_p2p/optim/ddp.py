"""Simulate synchronous data-parallel training, which averages gradients at every step, as DDP and FSDP do."""

from __future__ import annotations

from torch import Tensor

from noloco_p2p.optim.allreduce import Ring


class DataParallel:
    """Synchronous data-parallel training as an outer rule.

    Replicas that start out bitwise identical stay bitwise identical. Together they train one model with the batches of
    all replicas.
    """

    is_collective = True

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def mix_gradients(self, gradients: Tensor) -> None:
        gradients.copy_(self._ring.mean(gradients).expand_as(gradients))

    def outer_step(self, slow_weights: Tensor, fast_weights: Tensor) -> None:
        slow_weights.copy_(fast_weights)

    def sent_bytes(self, num_elements: int, num_replicas: int) -> tuple[float, float]:
        return self._ring.sent_bytes(num_elements, num_replicas), 0.0
