"""The learning rate as a function of a peer's place in the run: linear warm-up, then cosine. No torch."""

from __future__ import annotations

import math

from noloco_p2p.spec import TrainSpec


def learning_rate(train: TrainSpec, progress: float) -> float:
    """The learning rate of the inner step that starts at `progress`, a fraction of the run's schedule.

    0 is the first step, 1 the end; beyond it the minimum stays. The warm-up covers warmup_steps / total_steps; its
    first step gets 1 / warmup_steps of the peak rather than 0. Raises ValueError below 0 and for NaN.
    """
    if not progress >= 0:
        raise ValueError(f"progress is a fraction of the schedule, 0 or more; it is {progress}")
    warmup = train.warmup_steps / train.total_steps
    if progress < warmup:
        return train.learning_rate * min(1.0, progress / warmup + 1 / train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))
    return train.learning_rate * (train.min_learning_rate + (1 - train.min_learning_rate) * cosine)
