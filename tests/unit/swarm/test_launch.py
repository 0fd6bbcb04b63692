"""p2pd dies with its parent on systems where the kernel does not arrange that; real processes that do not see Linux."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
from harness.processes import until

from noloco_p2p.swarm import launch

DEADLINE_S = 30.0
LAUNCH = """
import sys
from noloco_p2p.swarm import launch
sys.platform = "darwin"
launch.main(sys.argv[1:])
"""
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {LAUNCH!r}, str(os.getpid()), *sys.argv[1:]])
print(child.pid, flush=True)
child.wait()
"""


@contextmanager
def parent_of(*command: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """Yield a process, and the child that it started with `launch`."""
    with subprocess.Popen([sys.executable, "-c", PARENT, *command], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            yield parent, child
        finally:
            parent.kill()
            if child.is_running():
                child.kill()


def watcher_of(child: psutil.Process) -> psutil.Process:
    """Return the watcher of a child, once the child runs its command."""
    until(lambda: child.name() == "sleep", timeout_s=DEADLINE_S, what="the command runs")
    (watcher,) = child.children()
    return watcher


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE  # nobody may reap it


def test_the_watcher_ends_the_command_when_the_parent_is_killed_and_ends_itself() -> None:
    with parent_of("/bin/sleep", "600") as (parent, child):
        watcher = watcher_of(child)
        parent.kill()
        parent.wait()
        until(lambda: is_gone(child) and is_gone(watcher), timeout_s=DEADLINE_S, what="both have ended")


def test_the_watcher_ends_when_the_command_has_ended() -> None:
    with parent_of("/bin/sleep", "600") as (parent, child):
        watcher = watcher_of(child)
        child.terminate()
        until(lambda: is_gone(watcher), timeout_s=DEADLINE_S, what="the watcher has ended")
        assert parent.wait(DEADLINE_S) == 0


def test_the_end_of_the_output_of_a_command_is_seen_at_once() -> None:
    command = [sys.executable, "-c", LAUNCH, str(os.getpid()), "/bin/sh", "-c", "echo up; exit 7"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (ended.returncode, ended.stdout) == (7, "up\n")


def test_a_parent_that_is_gone_already_starts_nothing() -> None:
    command = [sys.executable, "-I", "-S", str(launch.__file__), "1", "/bin/echo", "up"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "the parent process has exited\n")


class Queue:
    """A kqueue as on macOS: process 41 runs and will end next; 40 has ended."""

    def control(self, changes: list[SimpleNamespace] | None, most: int) -> list[SimpleNamespace]:
        for event in changes or ():
            assert (event.filter, event.flags, event.fflags) == ("proc", "add", "exit")
            if event.ident == 40:
                raise ProcessLookupError
        return [SimpleNamespace(ident=41)] if most else []


@pytest.mark.parametrize(("pids", "first"), [((42, 41), 41), ((42, 40), 40)])
def test_where_the_kernel_tells_of_ends_it_is_asked(
    pids: tuple[int, ...], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def event(ident: int, filter: str, flags: str, fflags: str) -> SimpleNamespace:
        return SimpleNamespace(ident=ident, filter=filter, flags=flags, fflags=fflags)

    names = {"KQ_FILTER_PROC": "proc", "KQ_EV_ADD": "add", "KQ_NOTE_EXIT": "exit", "kqueue": Queue, "kevent": event}
    for name, value in names.items():
        monkeypatch.setattr(select, name, value, raising=False)
    assert launch.first_to_end(*pids) == first
