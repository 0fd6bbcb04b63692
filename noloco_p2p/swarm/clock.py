"""DHT time: the clock of record expiry, on which all nodes must agree within 3 s.

It is the wall clock at the time when this peer entered, continued by a clock that is never set. So later jumps of the
wall clock have no effect; and a wall clock that is wrong at the start is detected from the answers of the first nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from noloco_p2p.errors import DirectoryError
from noloco_p2p.identity import short_id

MAX_OFFSET_S = 3.0  # hivemind's own limit between two nodes


def _steady_s() -> float:
    """A clock that continues during sleep: on macOS that is CLOCK_MONOTONIC, unlike `time.monotonic`."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class DhtClock:
    """Seconds since 1970, as this peer believes that the others count them."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = _steady_s) -> None:
        self._wall = wall
        self._steady = steady
        self._ahead_s = wall() - steady()

    def now(self) -> float:
        return self._ahead_s + self._steady()

    def follow_wall(self) -> None:
        """Until first contact, follow the wall clock, since NTP may still set it."""
        self._ahead_s = self._wall() - self._steady()

    def heard(self, offset_s: float) -> None:
        """Handle another node's clock minus this one: if it agrees with the wall clock and not with this one, adopt
        it.
        """
        jumped_s = self._wall() - self.now()
        if abs(offset_s) > MAX_OFFSET_S and abs(offset_s - jumped_s) <= MAX_OFFSET_S:
            self.follow_wall()


CLOCK = DhtClock()  # one per process, because hivemind has one for all its nodes


@dataclass(frozen=True, slots=True)
class Offset:
    """Another node's DHT time minus ours, give or take `unsure_s`."""

    seconds: float
    unsure_s: float

    def is_too_large(self) -> bool:
        return abs(self.seconds) - self.unsure_s > MAX_OFFSET_S


def check_clock(offsets: Mapping[str, Offset]) -> None:
    """`offsets`: peer id -> reported offset. Raises DirectoryError, with a remedy, when half of them or more differ."""
    wrong = {peer: offset for peer, offset in offsets.items() if offset.is_too_large()}
    if not wrong or 2 * len(wrong) < len(offsets):
        return
    offset_s = median(offset.seconds for offset in wrong.values())
    peer = short_id(next(iter(wrong)))
    others = f"..{peer}" if len(wrong) == 1 else f"..{peer} and {len(wrong) - 1} more"
    raise DirectoryError(
        f"the clock of this machine is {abs(offset_s):.1f} s {'behind' if offset_s > 0 else 'ahead of'} that of "
        f"{others}, and the DHT needs clocks within {MAX_OFFSET_S:.0f} s: set it by NTP (for example `sudo timedatectl "
        f"set-ntp true`, `sudo chronyc makestep`, or on macOS `sudo sntp -sS time.apple.com`), then start again"
    )
