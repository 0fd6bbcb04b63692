"""The load of other programs on this machine: real processes, and a double of NVML, as few test machines have a GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from noloco_p2p.peer.machine_use import GpuUse, MachineUse, on_battery

BURN = "print(flush=True)\nwhile True: pass"
BURN_IN_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"
IDLE = "import sys; print(flush=True); sys.stdin.read()"
BURNT_S = 1.0


@contextmanager
def process(program: str) -> Iterator[psutil.Process]:
    """Yield a process that is running; kill it and its children afterwards."""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout
        started.stdout.readline()
        seen = psutil.Process(started.pid)
        try:
            yield seen
        finally:
            for child in [*seen.children(recursive=True), seen]:
                child.kill()


def burn(tree: psutil.Process) -> None:
    """Wait until this process and its children have used the processor for a while."""

    def used_s() -> float:
        return sum(sum(each.cpu_times()[:2]) for each in [tree, *tree.children(recursive=True)])

    until_s = used_s() + BURNT_S
    while used_s() < until_s:
        time.sleep(0.05)  # between two checks


@pytest.mark.parametrize("program", [BURN, BURN_IN_A_CHILD])
def test_what_other_programs_use_is_told_from_what_this_peer_uses(program: str) -> None:
    with process(program) as busy, process(IDLE) as calm:
        as_peer, as_other = MachineUse(root_pid=busy.pid), MachineUse(root_pid=calm.pid)
        first, began_s = as_peer.look(), time.monotonic()
        as_other.look()
        burn(busy)
        own, other = as_peer.look().others_share, as_other.look().others_share
        elapsed_s = time.monotonic() - began_s
    assert first.others_share is None, "there is nothing to compare with yet"
    assert own is not None
    assert other is not None
    burnt_share = BURNT_S / elapsed_s / (psutil.cpu_count() or 1)
    assert other - own > 0.8 * burnt_share


def test_a_process_that_has_ended_leaves_nothing_to_count() -> None:
    with process(IDLE) as ended:
        use = MachineUse(root_pid=ended.pid)
        use.look()
    assert use.look().others_share is not None


def test_the_minute_is_that_of_the_clock_on_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    try:
        local = time.gmtime(time.time() + 7200)
        assert (MachineUse().look().minute - 60 * local.tm_hour - local.tm_min) % 1440 in (0, 1)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("battery", "is_on"),
    [
        (None, None),
        (SimpleNamespace(power_plugged=None), None),
        (SimpleNamespace(power_plugged=True), False),
        (SimpleNamespace(power_plugged=False), True),
    ],
)
def test_a_battery(monkeypatch: pytest.MonkeyPatch, battery: Any, is_on: bool | None) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert on_battery() is is_on


def test_a_system_without_batteries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psutil, "sensors_battery", raising=False)
    assert on_battery() is None


# NVML

OWN, GAME, DESKTOP = 10, 20, 30


class NVMLError(Exception):
    pass


class NVMLErrorNotFound(NVMLError):
    pass


@dataclass
class Nvml:
    """The part of pynvml that is used. computing: pids by GPU. samples: (pid, share in percent, time) by GPU."""

    computing: dict[int, list[int]]
    samples: dict[int, list[tuple[int, int, int]]]
    fault: str = ""

    NVMLError = NVMLError
    NVMLError_NotFound = NVMLErrorNotFound

    def nvmlInit(self) -> None:  # noqa: N802 - names of pynvml
        if self.fault == "init":
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.computing)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self.computing[gpu]]

    def nvmlDeviceGetProcessUtilization(self, gpu: int, since: int) -> list[Any]:  # noqa: N802
        if self.fault == "samples":
            raise NVMLError("Not Supported")
        newer = [(pid, share, at) for pid, share, at in self.samples[gpu] if at > since]
        if not newer:
            raise NVMLErrorNotFound("Not Found")
        return [SimpleNamespace(pid=pid, smUtil=share, timeStamp=at) for pid, share, at in newer]


def gpu_use(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> GpuUse:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    return GpuUse()


def test_only_others_on_a_gpu_of_this_peer_count(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml({0: [GAME], 1: [OWN]}, {0: [(GAME, 90, 5)], 1: [(OWN, 95, 5), (DESKTOP, 3, 5)]})
    use = gpu_use(monkeypatch, nvml)
    assert use.why_unknown == ""
    assert use.others_share({OWN}) == 0.03
    nvml.samples[1].append((GAME, 60, 9))
    assert use.others_share({OWN}) == 0.6, "what was seen before is not counted again"
    assert use.others_share({OWN}) == 0.0, "nobody was busy since"


def test_the_pids_of_a_container_are_not_known_to_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    use = gpu_use(monkeypatch, Nvml({0: [GAME]}, {0: [(GAME, 90, 5)]}))
    assert use.others_share({OWN}) is None, "it may be this peer itself, by its number outside"


def test_a_card_that_does_not_count_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_use(monkeypatch, Nvml({0: [OWN]}, {0: []}, fault="samples")).others_share({OWN}) is None


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    use = gpu_use(monkeypatch, Nvml({}, {}, fault="init"))
    assert (use.why_unknown, use.others_share({OWN})) == ("NVML cannot be used: Driver Not Loaded", None)
