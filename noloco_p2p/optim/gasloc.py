"""Simulate GASLoC (arXiv 2606.11081), a gossip method that applies momentum to the iterates after the update.

Let y_t = slow + eta * outer gradient (post_update), let L be the averaging of random pairs, and let gamma be the
momentum. The step is

    slow <- L y_t + gamma (y_t - y_{t-1})
"""

from __future__ import annotations

import random

from torch import Tensor

from noloco_p2p.optim.pair_averaging import average_pairs


class GASLoC:
    """GASLoC as an outer rule. Each replica sends one vector to one neighbour per round."""

    is_collective = False

    def __init__(self, rng: random.Random, *, outer_rate: float, momentum: float) -> None:
        self._rng = rng
        self._outer_rate = outer_rate
        self._momentum = momentum
        self._last_update: Tensor | None = None

    def mix_gradients(self, gradients: Tensor) -> None:
        """Do nothing, because replicas train independently within a round."""

    def outer_step(self, slow_weights: Tensor, fast_weights: Tensor) -> None:
        updated = slow_weights + self._outer_rate * (fast_weights - slow_weights)
        last = updated if self._last_update is None else self._last_update
        slow_weights.copy_(updated)
        average_pairs(slow_weights, self._rng)
        slow_weights.add_(updated - last, alpha=self._momentum)
        self._last_update = updated

    def sent_bytes(self, num_elements: int, num_replicas: int) -> tuple[float, float]:
        return 0.0, 4.0 * num_elements
