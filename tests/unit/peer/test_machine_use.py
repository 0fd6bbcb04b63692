"""The load of other programs on this machine, with real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from noloco_p2p.peer.pausing import MachineUse, minute_of_day

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
        first, began_s = as_peer.others_share(), time.monotonic()
        as_other.others_share()
        burn(busy)
        own, other = as_peer.others_share(), as_other.others_share()
        elapsed_s = time.monotonic() - began_s
    assert first is None, "there is nothing to compare with yet"
    assert own is not None
    assert other is not None
    burnt_share = BURNT_S / elapsed_s / (psutil.cpu_count() or 1)
    assert other - own > 0.8 * burnt_share


def test_a_process_that_has_ended_leaves_nothing_to_count() -> None:
    with process(IDLE) as ended:
        use = MachineUse(root_pid=ended.pid)
        use.others_share()
    assert use.others_share() is not None


def test_the_minute_is_that_of_the_clock_on_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    try:
        local = time.gmtime(time.time() + 7200)
        assert (minute_of_day() - 60 * local.tm_hour - local.tm_min) % 1440 in (0, 1)
    finally:
        monkeypatch.undo()
        time.tzset()
