"""How fast swaps move bytes, measured: what deadlines and waiting are decided by. Pure: it is given bytes and times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

REMEMBERED = 8  # transfers; a link that has changed is believed after half as many


class Goodput:
    """Seconds a byte of the last transfers, of whichever direction was slower, partner and coding included."""

    def __init__(self) -> None:
        self._seconds_per_byte: deque[float] = deque(maxlen=REMEMBERED)

    def note(self, num_bytes: int, seconds: float) -> None:
        """A transfer of `num_bytes` one way, whole or broken off; one that moved nothing tells nothing."""
        if num_bytes > 0 and seconds > 0:
            self._seconds_per_byte.append(seconds / num_bytes)

    def seconds_for(self, num_bytes: int) -> float | None:
        """What a transfer may well take: median and spread (median distance from it) added; None before the first.

        While one or two are all there is, nothing is known of the spread: it then counts as large as the median.
        """
        samples = self._seconds_per_byte
        if not samples:
            return None
        return num_bytes * (2 * median(samples) if len(samples) < 3 else cautious(samples))


def cautious(values: Iterable[float]) -> float:
    """Median plus spread (median absolute deviation): more than most of `values`; 0 when there are none."""
    known = list(values)
    if not known:
        return 0.0
    middle = median(known)
    return middle + median(abs(value - middle) for value in known)
