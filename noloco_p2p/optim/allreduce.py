"""A ring all-reduce, for comparison with a swap: its bytes, its time, and the effect of coding its messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def ring_bytes(num_bytes: float, num_replicas: int) -> float:
    """The bytes that each replica sends to all-reduce a vector of `num_bytes`: 2 (N - 1) / N times its size."""
    return 2 * (num_replicas - 1) / num_replicas * num_bytes


def ring_s(num_bytes: float, num_replicas: int, *, bytes_per_s: float, delay_s: float) -> float:
    """The duration over the slowest link: each replica sends `num_bytes`, in 2 (N - 1) dependent messages."""
    return num_bytes / bytes_per_s + 2 * (num_replicas - 1) * delay_s


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring all-reduce of fp32 vectors whose messages are coded.

    coded: applies encode and decode to a vector; None = lossless. bytes_per_element: of a message.

    Each replica owns a segment of the vector. The N - 1 hops of the reduce-scatter code a partial sum again, and its
    receiver adds its own segment in fp32. The owner codes the mean once, and every replica, including the owner, uses
    the coded mean. So errors accumulate with N, and all replicas end with the same bits. PRIME does the same
    (`ring_allreduce` of PrimeIntellect-ai/prime at 5cc57a0).
    """

    coded: Callable[[Tensor], Tensor] | None = None
    bytes_per_element: float = 4.0

    def mean(self, vectors: Tensor) -> Tensor:
        """The mean: (replicas, elements) -> (elements,)."""
        num_replicas = len(vectors)
        if self.coded is None or num_replicas == 1:
            return vectors.mean(0)
        means = []
        for owner, segments in enumerate(vectors.tensor_split(num_replicas, dim=1)):
            total = segments[(owner + 1) % num_replicas]
            for hop in range(2, num_replicas + 1):
                total = self.coded(total) + segments[(owner + hop) % num_replicas]
            means.append(self.coded(total / num_replicas))
        return torch.cat(means)

    def sent_bytes(self, num_elements: int, num_replicas: int) -> float:
        """The bytes that each replica sends."""
        return ring_bytes(self.bytes_per_element * num_elements, num_replicas)
