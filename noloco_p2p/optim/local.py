"""Simulate replicas that never mix, as a baseline for all comparisons."""

from __future__ import annotations

from torch import Tensor


class Local:
    is_collective = False

    def mix_gradients(self, gradients: Tensor) -> None:
        """Do nothing, because replicas train independently."""

    def outer_step(self, slow_weights: Tensor, fast_weights: Tensor) -> None:
        slow_weights.copy_(fast_weights)

    def sent_bytes(self, num_elements: int, num_replicas: int) -> tuple[float, float]:
        return 0.0, 0.0
