"""Sketch the slow weights for the record of a peer, in the background, at marks of the schedule that all peers share.

Weights at different times differ more than weights of different peers: from one round to the next, the mean of all
peers moves by about as much as the spread. So a monitor compares only sketches of the same mark, which is a fixed
fraction of the schedule. A peer sketches its slow weights after the first outer step that reaches a mark. Both partners
of a swap compute the swap's position in the schedule from the same numbers (`outer.progress.swap_progress`), so they
agree on which swap reached a mark. Weights are not interpolated to the exact mark. The difference between two peers
changes from round to round, so the midpoint between two states has up to 30 % less spread than either state (measured
on four peers).

The spacing of marks is the length of the schedule divided by a power of two. A peer chooses the smallest spacing that
lasts at least MARK_EVERY_S and at least one round at its speed. Peers with other speeds choose other spacings, but the
marks of a wide spacing are a subset of the marks of any narrower spacing. A record has space for one sketch. The record
is renewed more often than marks are reached, so a monitor that keeps the last few sketches of every peer
(`monitor/spread.py`) misses none.

A peer that has stopped training sketches its newest weights under the mark AT_REST, and again after each closing round.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from noloco_p2p.swarm.records import TTL_S

if TYPE_CHECKING:
    from torch import Tensor

MARK_EVERY_S = TTL_S / 3  # enough for an announcement (every TTL_S / 4) and for reading it
FINEST = 24  # the narrowest spacing is 2^-24 of the schedule, which is the unit of marks
LAST_ROUNDS = 32  # the number of rounds from which the speed is computed
MIN_ROUNDS = 3
LONGEST_JUMP = 2.0  # in rounds; if a peer jumps further, its weights say nothing about the marks in between


class Sketcher:
    """A background worker that sketches slow weights. `latest` is the packed sketch of the newest mark, or "" if there
    is none.
    """

    def __init__(self, run: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a sketcher. `run` is the digest of the spec, from which all peers derive the same maps."""
        self.latest = ""
        self._run = run
        self._clock = clock
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="noloco-sketch")
        self._step_rate: deque[tuple[float, float]] = deque(maxlen=LAST_ROUNDS)  # (seconds, progress) of outer steps
        self._reached = 0.0  # the progress up to which marks have been passed
        self._lock = threading.Lock()
        self._state = 0  # increases with every change of the slow weights

    def sketch(self, slow_weights: Tensor, *, progress: float, at_rest: bool) -> None:
        """Begin a sketch in the background after an outer step, if the step reached a mark or if training is over."""
        self._step_rate.append((self._clock(), progress))
        mark, state = self._mark(progress, at_rest=at_rest), self._state
        self._reached = max(self._reached, progress)
        if mark is not None:
            with suppress(RuntimeError):  # the pool is closed
                self._executor.submit(self._make, slow_weights, state, mark)

    def weights_change(self) -> None:
        """Discard an unfinished sketch, so that its mark gets no sketch. Call this before the slow weights change.

        An unfinished sketch would mix two states, and a sketch after the next outer step would be one round late.
        """
        with self._lock:
            self._state += 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _mark(self, progress: float, *, at_rest: bool) -> int | None:
        """Return the mark that this outer step reached, or None."""
        from noloco_p2p.codec.sketch import AT_REST

        if at_rest:
            return AT_REST
        if len(self._step_rate) < MIN_ROUNDS:
            return None
        rounds = list(pairwise(self._step_rate))
        round_s, step = (median(later[index] - sooner[index] for sooner, later in rounds) for index in (0, 1))
        level = finest_level(round_s=round_s, round_progress=step)
        if level is None:
            return None
        return roundest(max(self._reached, progress - LONGEST_JUMP * step), progress, level=level)

    def _make(self, slow_weights: Tensor, state: int, mark: int) -> None:
        from noloco_p2p.codec import sketch

        if state != self._state:  # the sketch waited behind another one
            return
        values, norm = sketch.sketch(slow_weights, run=self._run, mark=mark), sketch.norm(slow_weights)
        with self._lock:
            if state == self._state:
                self.latest = sketch.pack(values, mark=mark, norm=norm)


def finest_level(*, round_s: float, round_progress: float) -> int | None:
    """Return L such that 2^-L is the spacing of marks for a peer with rounds of this duration and progress.

    The result is None if even the whole schedule is shorter than that.
    """
    if round_progress <= 0:
        return None
    spacing = round_progress * max(1.0, MARK_EVERY_S / max(round_s, 1e-3))
    return min(FINEST, math.floor(-math.log2(spacing))) if spacing <= 1 else None


def roundest(after: float, until: float, *, level: int) -> int | None:
    """Return the multiple of 2^-LEVEL in (after, until] that most other peers have as a mark, in units of 2^-FINEST.

    This is the multiple that is divisible by the largest power of two. The result is None if there is no multiple in
    the interval, or if `until` is far past the end.
    """
    if not 0 <= until < 1 << (32 - FINEST - 1):
        return None
    for coarser in range(level + 1):
        index = math.floor(until * (1 << coarser))
        if index and index > after * (1 << coarser):
            return index << (FINEST - coarser)
    return None
