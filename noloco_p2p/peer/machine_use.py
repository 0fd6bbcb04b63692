"""Measure how much other programs use the processor."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil

from noloco_p2p.peer.free_time import Seen

BUSY = ("user", "nice", "system", "irq", "softirq")  # processor times spent working; the other fields count waiting


class MachineUse:
    """An observer of this machine.

    `root_pid` is the id of the process that, together with its children, makes up this peer.
    """

    def __init__(self, *, root_pid: int | None = None) -> None:
        self._root = psutil.Process(own_root() if root_pid is None else root_pid)
        self._before: tuple[float, float, float] | None = None

    def look(self) -> Seen:
        """Observe the machine. This takes a few milliseconds. `others_share` is known from the second call on."""
        local = time.localtime()
        return Seen(60 * local.tm_hour + local.tm_min, self._others_share(self._own_processes()))

    def _own_processes(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return [self._root, *self._root.children(recursive=True)]
        return []

    def _others_share(self, own: list[psutil.Process]) -> float | None:
        """Return the share of all cores that other programs used since the last call.

        The time that a child used is added to its parent's time once the child has ended.
        """
        times = psutil.cpu_times()
        busy_s = sum(getattr(times, name, 0.0) for name in BUSY)
        now = time.monotonic(), busy_s, sum(map(_used_s, own))
        before, self._before = self._before, now
        if before is None or now[0] <= before[0]:
            return None
        elapsed_s, all_s, own_s = (new - old for new, old in zip(now, before, strict=True))
        return max(0.0, (all_s - own_s) / elapsed_s / (psutil.cpu_count() or 1))


def own_root() -> int:
    """Return the id of the process that, together with its children, makes up this peer.

    With several GPUs, this is the process that started one process per GPU.
    """
    return os.getppid() if "LOCAL_RANK" in os.environ else os.getpid()


def _used_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # the process has just ended
        return 0.0
    return times.user + times.system + times.children_user + times.children_system
