"""Defines DHT time, the clock by which records expire. The clocks of all nodes must agree within 3 s.

DHT time is the wall clock at the time when this peer entered the DHT, advanced by a steady clock that nobody sets.
A later jump of the wall clock therefore has no effect, unless another node's clock confirms the new time. If the wall
clock was wrong at the start, the answers of the first nodes reveal it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from noloco_p2p.errors import DirectoryError
from noloco_p2p.identity import short_id

MAX_OFFSET_S = 3.0  # hivemind uses the same limit between two nodes


def _steady_s() -> float:
    """Return the time of a clock that keeps running while the machine sleeps.

    On macOS this is CLOCK_MONOTONIC, which differs from `time.monotonic`.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class DhtClock:
    """A clock that returns DHT time in seconds since 1970."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = _steady_s) -> None:
        self._wall = wall
        self._steady = steady
        self._ahead_s = wall() - steady()

    def now(self) -> float:
        return self._ahead_s + self._steady()

    def follow_wall(self) -> None:
        """Set DHT time to the wall clock, which NTP may still correct before the first contact."""
        self._ahead_s = self._wall() - self._steady()

    def heard(self, offset_s: float) -> None:
        """Set DHT time to the wall clock if another node's clock agrees with the wall clock, but not with this clock.

        `offset_s` is the other node's clock minus this one.
        """
        jumped_s = self._wall() - self.now()
        if abs(offset_s) > MAX_OFFSET_S and abs(offset_s - jumped_s) <= MAX_OFFSET_S:
            self.follow_wall()


CLOCK = DhtClock()  # one per process, because hivemind uses a single clock for all its nodes


@dataclass(frozen=True, slots=True)
class Offset:
    """Another node's DHT time minus this node's, with an uncertainty of `unsure_s` in either direction."""

    seconds: float
    unsure_s: float

    def is_too_large(self) -> bool:
        return abs(self.seconds) - self.unsure_s > MAX_OFFSET_S


def check_clock(offsets: Mapping[str, Offset]) -> None:
    """Check this machine's clock. `offsets` maps the peer ids of other nodes to their clock offsets.

    Raises DirectoryError, with a remedy in the message, if at least half of the offsets are too large.
    """
    wrong = {peer: offset for peer, offset in offsets.items() if offset.is_too_large()}
    if not wrong or 2 * len(wrong) < len(offsets):
        return
    offset_s = median(offset.seconds for offset in wrong.values())
    peer = short_id(next(iter(wrong)))
    others = f"that of ..{peer}" if len(wrong) == 1 else f"those of {len(wrong)} nodes, including ..{peer}"
    raise DirectoryError(
        f"this machine's clock is {abs(offset_s):.1f} s {'behind' if offset_s > 0 else 'ahead of'} {others}, but "
        f"the clocks of DHT nodes must agree to within {MAX_OFFSET_S:.0f} s; synchronize it with NTP (for example, "
        f"run `sudo timedatectl set-ntp true`, `sudo chronyc makestep`, or `sudo sntp -sS time.apple.com` on macOS), "
        f"then try again"
    )
