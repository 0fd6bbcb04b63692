"""Decide when a peer trains on a machine that also has other work to do.

This module does no I/O. `peer/machine_use.py` observes the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.records import PausedBy

BUSY_SHARE = 0.25  # the share of all cores that other programs may use
GPU_BUSY_SHARE = 0.1  # the share of the GPU's time that other programs may use; an idle desktop uses less
QUIET_S = 120.0  # how long other programs must have been quiet before training continues


@dataclass(frozen=True, slots=True)
class Seen:
    """The use of the machine at one moment, where None means unknown.

    `minute` is the minute of the day in local time. `others_share` is the share of all cores that other programs used
    since the last observation. `gpu_others_share` is the share of the time during which they used the GPUs that this
    peer computes on.
    """

    minute: int
    on_battery: bool | None = None
    others_share: float | None = None
    gpu_others_share: float | None = None


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a peer pauses: a word for its record, and a sentence for its user."""

    word: PausedBy
    sentence: str


BATTERY = Reason("battery", "this machine is running on battery power")
IN_USE = Reason(
    "in use",
    f"other programs used more than {100 * BUSY_SHARE:.0f} % of the processor in the last {QUIET_S / 60:.0f} min",
)
GPU_IN_USE = Reason("GPU in use", f"another program used this peer's GPU in the last {QUIET_S / 60:.0f} min")


class FreeTime:
    """A policy that decides whether the settings allow training now.

    It remembers when other programs were last busy, so that training does not start and stop in quick succession.
    """

    def __init__(self, settings: PeerSettings) -> None:
        self._hours = settings.hours
        self._is_outside = Reason("hours", f"the current time is outside {settings.when}")
        self._spares_battery = settings.on_battery == "never"
        self.spares_users = settings.when == "idle"
        self.spares_gpu = self.spares_users or settings.on_busy_gpu == "never"
        self._busy_s = self._gpu_busy_s = float("-inf")

    @property
    def is_limited(self) -> bool:
        """Return whether the settings depend on the use of the machine."""
        return bool(self._hours or self._spares_battery or self.spares_gpu)

    def why_not(self, seen: Seen, *, now_s: float) -> Reason | None:
        """Return why this peer must not train now, or None if it can train.

        `now_s` is the time of a monotonic clock.
        """
        if (seen.others_share or 0.0) > BUSY_SHARE:
            self._busy_s = now_s
        if (seen.gpu_others_share or 0.0) > GPU_BUSY_SHARE:
            self._gpu_busy_s = now_s
        if self._hours and not _is_within(seen.minute, *self._hours):
            return self._is_outside
        if self._spares_battery and seen.on_battery:
            return BATTERY
        if self.spares_users and now_s - self._busy_s < QUIET_S:
            return IN_USE
        if self.spares_gpu and now_s - self._gpu_busy_s < QUIET_S:
            return GPU_IN_USE
        return None


def _is_within(minute: int, first: int, end: int) -> bool:
    """Return whether a minute lies in a period of the day.

    The period includes midnight if `end` is less than `first`.
    """
    return first <= minute < end if first < end else minute >= first or minute < end
