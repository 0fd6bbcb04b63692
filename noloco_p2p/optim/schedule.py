"""Compute the learning rate from a peer's progress in the run, with linear warm-up and cosine decay.

This module does not use torch.
"""

from __future__ import annotations

import math

from noloco_p2p.spec import TrainSpec


def learning_rate(train: TrainSpec, progress: float) -> float:
    """Return the learning rate of the inner step that starts at `progress`, a fraction of the run's schedule.

    The first step has progress 0, and the schedule ends at 1. After that, the learning rate stays at the minimum. The
    warm-up covers warmup_steps / total_steps of the schedule, and its first step gets 1 / warmup_steps of the peak
    rather than 0. Raises ValueError if `progress` is negative or NaN.
    """
    if not progress >= 0:
        raise ValueError(f"progress, as a fraction of the schedule, must be at least 0, but it is {progress}")
    warmup = train.warmup_steps / train.total_steps
    if progress < warmup:
        return train.learning_rate * min(1.0, progress / warmup + 1 / train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))
    return train.learning_rate * (train.min_learning_rate + (1 - train.min_learning_rate) * cosine)
