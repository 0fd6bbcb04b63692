"""A gate on what neighbours in a pipeline send: its root mean square must be close to the usual one at that boundary.

A lying stage can still bias what it sends within the gate. The gate bounds what one frame can do.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import torch
from torch import Tensor

from noloco_p2p.errors import CorruptPayload

HISTORY_FRAMES = 64
LEAST_FRAMES = 8  # before one may be refused
MOST_TIMES = 10.0  # the median, or a tenth of it
# Sizes change most at the start, so the limit falls as one over the number of frames, and is MOST_TIMES from the 640th
# frame on. Of 134,000 honest frames it drops 5; MOST_TIMES from the start would drop 20 (benchmarks/rms_gate.py).
FIRST_TIMES = 100.0


class RmsGate:
    """The gate of one boundary and direction. All frames count for the median, so that it follows a real change."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._recent: deque[float] = deque(maxlen=HISTORY_FRAMES)
        self._num_frames = 0

    def admit(self, values: Tensor) -> None:
        """Raise CorruptPayload for a frame of more than ten times, or less than a tenth of, the usual size.

        For the first frames the limit is wider.
        """
        rms = float(torch.linalg.vector_norm(values, dtype=torch.float32)) / values.numel() ** 0.5
        usual = median(self._recent) if len(self._recent) >= LEAST_FRAMES else rms
        self._recent.append(rms)
        self._num_frames += 1
        most = min(FIRST_TIMES, max(MOST_TIMES, FIRST_TIMES * HISTORY_FRAMES / self._num_frames))
        if not usual / most <= rms <= usual * most:
            times = rms / usual if usual else float("inf")
            raise CorruptPayload(f"the RMS of {self._name} is {times:.3g} times the usual one")
