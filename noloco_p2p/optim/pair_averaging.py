"""Simulate plain averaging of random pairs, which AD-PSGD (arXiv 1710.06952) does after every step."""

from __future__ import annotations

import random

from torch import Tensor


class PairAveraging:
    is_collective = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def mix_gradients(self, gradients: Tensor) -> None:
        """Do nothing, because replicas train independently within a round."""

    def outer_step(self, slow_weights: Tensor, fast_weights: Tensor) -> None:
        slow_weights.copy_(fast_weights)
        average_pairs(slow_weights, self._rng)

    def sent_bytes(self, num_elements: int, num_replicas: int) -> tuple[float, float]:
        return 0.0, 4.0 * num_elements


def average_pairs(vectors: Tensor, rng: random.Random) -> None:
    """Average random pairs of rows of `vectors` (replicas, elements) in place.

    If the number of rows is odd, one row stays unchanged.
    """
    order = list(range(len(vectors)))
    rng.shuffle(order)
    for one, other in zip(order[::2], order[1::2], strict=False):
        mean = (vectors[one] + vectors[other]).mul_(0.5)
        vectors[one].copy_(mean)
        vectors[other].copy_(mean)
