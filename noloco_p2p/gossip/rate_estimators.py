"""This module measures how long inner steps take and how fast swaps transfer data. Callers supply the current time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from noloco_p2p.gossip.frames import Boundary

WINDOW_STEPS = 32
HEARD_FOR_ROUNDS = 20  # rounds of this peer after which an announcement expires, because its sender may be gone
HEARD_PEERS = 64
REMEMBERED = 8  # number of transfers in the estimate; a change in the link takes effect after half as many


class StepRate:
    """Measures how many seconds an inner step and a round of this peer take.

    The duration of a step is the median over the last 32 steps, so that occasional evaluations do not distort it. The
    main thread writes to this object, and the network thread reads it. `inner_steps` is the length of a round until
    `open_round` changes it.
    """

    def __init__(self, inner_steps: int) -> None:
        self.inner_steps = inner_steps
        self._durations_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._last_step_s: float | None = None
        self._steps_left = inner_steps
        self.seconds_per_step: float | None = None
        self.shortest_round_s: float | None = None  # the shortest round that this peer can keep up with, as announced
        self._heard: dict[str, tuple[float, float]] = {}  # by peer, oldest first: the announced seconds, and the time

    def hear(self, peer_id: str, boundary: Boundary, *, now_s: float) -> None:
        """Record a position that another peer announced, even if it led to no swap. The network thread calls this."""
        if boundary.shortest_round_s is not None:
            self._heard.pop(peer_id, None)
            self._heard[peer_id] = (boundary.shortest_round_s, now_s)
            if len(self._heard) > HEARD_PEERS:
                del self._heard[next(iter(self._heard))]

    def others_s(self, now_s: float) -> list[float]:
        """Return the durations, in seconds, of the shortest rounds that other peers have announced recently."""
        long_s = HEARD_FOR_ROUNDS * (self.seconds_per_round() or math.inf)
        return [shortest_s for shortest_s, heard_s in list(self._heard.values()) if now_s - heard_s <= long_s]

    def open_round(
        self,
        now_s: float,
        *,
        steps_done: int = 0,
        inner_steps: int | None = None,
        shortest_round_s: float | None = None,
    ) -> None:
        self.shortest_round_s = shortest_round_s
        self.inner_steps = inner_steps or self.inner_steps
        self._steps_left = self.inner_steps - steps_done
        self._last_step_s = now_s

    def step(self, now_s: float) -> None:
        """Record that an inner step ended at `now_s`, in monotonic time."""
        if self._last_step_s is not None:
            self._durations_s.append(now_s - self._last_step_s)
            self.seconds_per_step = median(self._durations_s)
        self._last_step_s = now_s
        self._steps_left -= 1

    def seconds_to_boundary(self, now_s: float) -> float | None:
        if self.seconds_per_step is None or self._last_step_s is None:
            return None
        return max(0.0, self._steps_left * self.seconds_per_step - (now_s - self._last_step_s))

    def seconds_per_round(self) -> float | None:
        return None if self.seconds_per_step is None else self.inner_steps * self.seconds_per_step

    def boundary(self, *, round_index: int, progress: float, now_s: float) -> Boundary:
        return Boundary(
            round_index,
            self.seconds_to_boundary(now_s),
            self.seconds_per_round(),
            progress,
            self.inner_steps,
            self.shortest_round_s,
        )


class Goodput:
    """Estimates the duration of a transfer from the rates of the last transfers.

    The rates are those of the slower direction. The measured times include encoding and waiting for the partner.
    """

    def __init__(self) -> None:
        self._seconds_per_byte: deque[float] = deque(maxlen=REMEMBERED)

    def note(self, num_bytes: int, seconds: float) -> None:
        """Record a complete or incomplete transfer of `num_bytes` in one direction. Empty transfers are ignored."""
        if num_bytes > 0 and seconds > 0:
            self._seconds_per_byte.append(seconds / num_bytes)

    def seconds_for(self, num_bytes: int) -> float | None:
        """Return a cautious estimate of the duration of a transfer in seconds, or None before the first transfer.

        The estimate is the median plus the spread. After only one or two transfers, the spread is unknown, so the
        median is used in its place.
        """
        samples = self._seconds_per_byte
        if not samples:
            return None
        return num_bytes * (2 * median(samples) if len(samples) < 3 else cautious(samples))


def cautious(values: Iterable[float]) -> float:
    """Return the median of `values` plus their median absolute deviation, or 0 if there are none.

    Most of `values` are below the result.
    """
    known = list(values)
    if not known:
        return 0.0
    middle = median(known)
    return middle + median(abs(value - middle) for value in known)
