"""Decide whether this peer pauses.

It pauses if `noloco pause` asked for it, or if the machine is used in a way that the setting `when` excludes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from dataclasses import dataclass

import psutil

from noloco_p2p.settings import PeerSettings, parse_hours
from noloco_p2p.swarm.records import PausedBy

log = logging.getLogger(__name__)

LOOK_S = 5.0  # between two observations of the machine
BUSY_SHARE = 0.25  # the share of all cores that other programs may use
QUIET_S = 120.0  # how long other programs must have been quiet before training continues
BUSY = ("user", "nice", "system", "irq", "softirq")  # processor times spent working; the other fields count waiting


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a peer pauses: a word for its record, and a sentence for its user."""

    word: PausedBy
    sentence: str


IN_USE = Reason(
    "in use",
    f"other programs used more than {100 * BUSY_SHARE:.0f} % of the processor less than {QUIET_S / 60:.0f} min ago",
)


class Pausing:
    """The state of a pause. `requested` is set while a pause is requested, and only the network thread changes it."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.is_asked = False  # whether `noloco pause` asked for a pause
        self._machine: Reason | None = None

    def ask(self) -> None:
        self.is_asked = True
        self.requested.set()

    def resume(self) -> None:
        """Withdraw the request of `noloco pause`. The use of the machine may still require a pause."""
        self.is_asked = False
        self.heed(self._machine)

    def heed(self, machine: Reason | None) -> None:
        """Set the reason why the use of the machine requires a pause now, or None if it does not."""
        self._machine = machine
        if self.is_asked or machine:
            self.requested.set()
        else:
            self.requested.clear()

    @property
    def word(self) -> PausedBy:
        """Return the reason as a word for the record, or "" if no pause is requested."""
        if self._machine and not self.is_asked:
            return self._machine.word
        return "asked" if self.requested.is_set() else ""

    @property
    def sentence(self) -> str:
        """Return a sentence with the reason and how the pause ends, or "" if no pause is requested."""
        if self._machine and not self.is_asked:
            return f"{self._machine.sentence}; training will resume automatically"
        asked = (
            "requested with `noloco pause`; run `noloco resume` to resume training, or `noloco leave` to stop the peer"
        )
        return asked if self.requested.is_set() else ""


class FreeTime:
    """The policy of the setting `when`.

    It remembers when other programs were last busy, so that training does not start and stop in quick succession.
    """

    def __init__(self, settings: PeerSettings) -> None:
        self._hours = parse_hours(settings.when)
        self._is_outside = Reason("hours", f"the current time is outside {settings.when}")
        self._spares_users = settings.when == "idle"
        self._busy_s = float("-inf")

    def why_not(self, *, minute: int, others_share: float | None = None, now_s: float) -> Reason | None:
        """Return why this peer must not train now, or None if it can train.

        `minute` is the minute of the day in local time. `others_share` is the share of all cores that other programs
        use, or None if it is unknown. `now_s` is the time of a monotonic clock.
        """
        if (others_share or 0.0) > BUSY_SHARE:
            self._busy_s = now_s
        if self._hours:
            first, end = self._hours
            is_within = first <= minute < end if first < end else minute >= first or minute < end  # over midnight
            return None if is_within else self._is_outside
        return IN_USE if self._spares_users and now_s - self._busy_s < QUIET_S else None


class MachineUse:
    """Measures how much other programs use the processor.

    `root_pid` is the id of the process that, together with its children, makes up this peer. With several GPUs, this is
    the process that started one process per GPU.
    """

    def __init__(self, *, root_pid: int | None = None) -> None:
        own_root = os.getppid() if "LOCAL_RANK" in os.environ else os.getpid()
        self._root = psutil.Process(own_root if root_pid is None else root_pid)
        self._before: tuple[float, float, float] | None = None

    def others_share(self) -> float | None:
        """Return the share of all cores that other programs used since the last call, which is unknown at first.

        The time that a child used is added to its parent's time once the child has ended.
        """
        try:
            own = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            own = []
        times = psutil.cpu_times()
        busy_s = sum(getattr(times, name, 0.0) for name in BUSY)
        now = time.monotonic(), busy_s, sum(map(_used_s, own))
        before, self._before = self._before, now
        if before is None or now[0] <= before[0]:
            return None
        elapsed_s, all_s, own_s = (new - old for new, old in zip(now, before, strict=True))
        return max(0.0, (all_s - own_s) / elapsed_s / (psutil.cpu_count() or 1))


def _used_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # the process has just ended
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def minute_of_day() -> int:
    local = time.localtime()
    return 60 * local.tm_hour + local.tm_min


async def watch_machine(settings: PeerSettings, pausing: Pausing) -> None:
    """Observe this machine every few seconds, on another thread, and tell `pausing` why this peer must not train."""
    use, free_time = MachineUse(), FreeTime(settings)
    while settings.when != "always":
        try:
            share = await asyncio.to_thread(use.others_share)
            pausing.heed(free_time.why_not(minute=minute_of_day(), others_share=share, now_s=time.monotonic()))
        except Exception:  # the peer stays in its present state
            log.exception("the load on this machine could not be measured")
        await asyncio.sleep(LOOK_S)
