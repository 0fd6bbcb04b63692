"""Model a ring all-reduce, so that its traffic, duration and errors can be compared with those of a swap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def ring_bytes(num_bytes: float, num_replicas: int) -> float:
    """Return the number of bytes that each replica sends in an all-reduce of a vector of `num_bytes`.

    With N replicas, this is 2 (N - 1) / N times the size of the vector.
    """
    return 2 * (num_replicas - 1) / num_replicas * num_bytes


def ring_s(num_bytes: float, num_replicas: int, *, bytes_per_s: float, delay_s: float) -> float:
    """Return how many seconds an all-reduce takes over the slowest link.

    Each replica sends `num_bytes` in 2 (N - 1) messages, each of which depends on the previous one.
    """
    return num_bytes / bytes_per_s + 2 * (num_replicas - 1) * delay_s


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring all-reduce of fp32 vectors with encoded messages.

    `coded` is a function that encodes and decodes a vector; if it is None, messages are lossless. `bytes_per_element`
    is the size of an encoded message per element.

    Each replica owns a segment of the vector. Each of the N - 1 hops of the reduce-scatter re-encodes a partial sum,
    and its receiver adds its own segment in fp32. The owner encodes the mean once, and every replica, including the
    owner, uses the encoded mean. Errors therefore accumulate with N, but the results of all replicas are bitwise
    identical. PRIME works in the same way (see `ring_allreduce` in PrimeIntellect-ai/prime at 5cc57a0).
    """

    coded: Callable[[Tensor], Tensor] | None = None
    bytes_per_element: float = 4.0

    def mean(self, vectors: Tensor) -> Tensor:
        """Return the mean of `vectors` (replicas, elements), with shape (elements,)."""
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
        """Return the number of bytes that each replica sends in one all-reduce."""
        return ring_bytes(self.bytes_per_element * num_elements, num_replicas)
