"""Measure how much other programs use the processor and the GPUs (with NVML), and detect battery power."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

import psutil

from noloco_p2p.peer.free_time import Seen

BUSY = ("user", "nice", "system", "irq", "softirq")  # processor times spent working; the other fields count waiting


class MachineUse:
    """An observer of this machine.

    `root_pid` is the id of the process that, together with its children, makes up this peer. `gpu` is None if GPUs are
    not observed.
    """

    def __init__(self, *, root_pid: int | None = None, gpu: GpuUse | None = None) -> None:
        self._root = psutil.Process(own_root() if root_pid is None else root_pid)
        self._gpu = gpu
        self._before: tuple[float, float, float] | None = None

    def look(self) -> Seen:
        """Observe the machine. This takes a few milliseconds. `others_share` is known from the second call on."""
        own = self._own_processes()
        local = time.localtime()
        return Seen(
            minute=60 * local.tm_hour + local.tm_min,
            on_battery=on_battery(),
            others_share=self._others_share(own),
            gpu_others_share=self._gpu.others_share({process.pid for process in own}) if self._gpu else None,
        )

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


class GpuUse:
    """An observer of NVIDIA GPUs, based on NVML.

    It considers only GPUs on which it finds this peer's own processes. `why_unknown` says why there are no
    observations, and is empty if NVML works.
    """

    def __init__(self) -> None:
        self.why_unknown = ""
        self._nvml: Any = None
        self._since: dict[int, int] = {}  # the time of the newest sample read from each GPU, on NVML's clock
        try:
            pynvml = import_module("pynvml")
        except ModuleNotFoundError:
            self.why_unknown = "the package nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.why_unknown = f"NVML cannot be used: {error}"
            return
        self._nvml = pynvml

    def others_share(self, own: set[int]) -> float | None:
        """Return the share of time in which other processes used the busiest of these GPUs, or None if it is unknown.

        In a container, NVML reports the process ids of the host, so this peer's processes are not found among them.
        """
        if self._nvml is None:
            return None
        try:
            shares = [self._share(index, own) for index in range(self._nvml.nvmlDeviceGetCount())]
        except self._nvml.NVMLError:  # the card has no such counter, or the driver was replaced
            return None
        return max((share for share in shares if share is not None), default=None)

    def _share(self, index: int, own: set[int]) -> float | None:
        nvml = self._nvml
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        if own.isdisjoint(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)):
            return None
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(device, self._since.get(index, 0))
        except nvml.NVMLError_NotFound:  # no process has been busy since then
            return 0.0
        self._since[index] = max((sample.timeStamp for sample in samples), default=self._since.get(index, 0))
        return sum(sample.smUtil for sample in samples if sample.pid not in own) / 100


def own_root() -> int:
    """Return the id of the process that, together with its children, makes up this peer.

    With several GPUs, this is the process that started one process per GPU.
    """
    return os.getppid() if "LOCAL_RANK" in os.environ else os.getpid()


def on_battery() -> bool | None:
    """Return whether the machine runs on battery, or None if it has no battery or the system does not report it."""
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError):  # the system has no such call
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def _used_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # the process has just ended
        return 0.0
    return times.user + times.system + times.children_user + times.children_system
