"""Starts p2pd so that it ends with its parent: `python -I -S launch.py PARENT_PID P2PD ARGUMENT ..`.

This is a separate script that is run by its path and without site packages, so it starts in 20 ms. It sets the
parent-death signal in its own process, and this setting survives the exec. The parent therefore runs no code between
fork and exec, where a program with many threads can deadlock. On Linux, the kernel watches the *thread* that started
this process. On other systems, a second process watches the parent and sends SIGTERM when the parent ends. That part
was written for macOS, but has not been run there.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_S = 0.5


def main(arguments: list[str]) -> None:
    parent_pid, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
            sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    else:
        start_watcher(parent_pid)
    if os.getppid() != parent_pid:  # the parent died before the death signal was set
        sys.exit("the parent process has exited")
    os.umask(0o077)  # only this user may use the control socket
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")


def start_watcher(parent_pid: int) -> None:
    """Fork a process that sends SIGTERM to this one when the parent ends. The fork exits when either process ends."""
    own_pid = os.getpid()
    if os.fork():
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # release p2pd's output, so that its reader sees the end of it
        os.dup2(nowhere, stream)
    if first_to_end(parent_pid, own_pid) == parent_pid:
        with suppress(ProcessLookupError):
            os.kill(own_pid, signal.SIGTERM)
    os._exit(0)


def first_to_end(*pids: int) -> int:
    """Wait until one of these processes has ended, and return its id.

    This uses kqueue where available, and otherwise polls every POLL_S.
    """
    if hasattr(select, "kqueue"):
        queue = select.kqueue()
        for pid in pids:
            event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
            try:
                queue.control([event], 0)
            except OSError:  # it has already ended
                return pid
        return queue.control(None, 1)[0].ident
    while True:
        for pid in pids:
            try:
                os.kill(pid, 0)
            except OSError:
                return pid
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
