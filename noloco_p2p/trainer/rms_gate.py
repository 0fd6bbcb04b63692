"""Refuse a frame from a pipeline neighbour if its root mean square (RMS) is far from the usual value.

This bounds the damage that a single frame can do. A dishonest stage can still bias its frames within the limits.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import torch
from torch import Tensor

from noloco_p2p.errors import CorruptPayload

HISTORY_FRAMES = 64
LEAST_FRAMES = 8  # the first frames are always admitted
MOST_TIMES = 10.0  # limit for the ratio of a frame's RMS to the median, in either direction
# The RMS changes most at the start. The limit is therefore wide at first, falls in inverse proportion to the number of
# frames, and reaches MOST_TIMES with the 640th frame. This limit drops 5 of 134,000 honest frames. A limit of
# MOST_TIMES from the start would drop 20.
FIRST_TIMES = 100.0


class RmsGate:
    """The gate of one boundary and direction. All frames count toward its median, so that it follows real changes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._recent: deque[float] = deque(maxlen=HISTORY_FRAMES)
        self._num_frames = 0

    def admit(self, values: Tensor) -> None:
        """Raise CorruptPayload if the RMS of a frame is more than ten times, or less than a tenth of, the usual value.

        The limits are wider for the first frames.
        """
        rms = float(torch.linalg.vector_norm(values, dtype=torch.float32)) / values.numel() ** 0.5
        usual = median(self._recent) if len(self._recent) >= LEAST_FRAMES else rms
        self._recent.append(rms)
        self._num_frames += 1
        most = min(FIRST_TIMES, max(MOST_TIMES, FIRST_TIMES * HISTORY_FRAMES / self._num_frames))
        if not usual / most <= rms <= usual * most:
            times = rms / usual if usual else float("inf")
            raise CorruptPayload(f"the RMS of {self._name} is {times:.3g} times its usual value")
