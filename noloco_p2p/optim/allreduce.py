"""What an all-reduce costs: the counterpart of a swap."""

from __future__ import annotations


def ring_bytes(num_elements: int, num_replicas: int) -> float:
    """Bytes that each of `num_replicas` sends in a ring all-reduce of fp32 numbers: 2 (N - 1) / N times their size."""
    return 2 * (num_replicas - 1) / num_replicas * 4 * num_elements


def ring_s(num_bytes: float, num_replicas: int, *, bytes_per_s: float, delay_s: float) -> float:
    """Seconds of it over the slowest link: `num_bytes` sent by each, in 2 (N - 1) dependent messages."""
    return num_bytes / bytes_per_s + 2 * (num_replicas - 1) * delay_s
