"""Decide when a peer trains on a machine that also has other work to do.

This module does no I/O. `peer/machine_use.py` observes the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.records import PausedBy

BUSY_SHARE = 0.25  # the share of all cores that other programs may use
QUIET_S = 120.0  # how long other programs must have been quiet before training continues


@dataclass(frozen=True, slots=True)
class Seen:
    """The use of the machine at one moment.

    `minute` is the minute of the day in local time. `others_share` is the share of all cores that other programs used
    since the last observation, or None if it is unknown.
    """

    minute: int
    others_share: float | None = None


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a peer pauses: a word for its record, and a sentence for its user."""

    word: PausedBy
    sentence: str


IN_USE = Reason(
    "in use",
    f"other programs used more than {100 * BUSY_SHARE:.0f} % of the processor in the last {QUIET_S / 60:.0f} min",
)


class FreeTime:
    """A policy that decides whether the settings allow training now.

    It remembers when other programs were last busy, so that training does not start and stop in quick succession.
    """

    def __init__(self, settings: PeerSettings) -> None:
        self._hours = settings.hours
        self._is_outside = Reason("hours", f"the current time is outside {settings.when}")
        self._spares_users = settings.when == "idle"
        self._busy_s = float("-inf")

    def why_not(self, seen: Seen, *, now_s: float) -> Reason | None:
        """Return why this peer must not train now, or None if it can train.

        `now_s` is the time of a monotonic clock.
        """
        if (seen.others_share or 0.0) > BUSY_SHARE:
            self._busy_s = now_s
        if self._hours and not _is_within(seen.minute, *self._hours):
            return self._is_outside
        if self._spares_users and now_s - self._busy_s < QUIET_S:
            return IN_USE
        return None


def _is_within(minute: int, first: int, end: int) -> bool:
    """Return whether a minute lies in a period of the day.

    The period includes midnight if `end` is less than `first`.
    """
    return first <= minute < end if first < end else minute >= first or minute < end
