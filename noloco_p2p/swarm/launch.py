"""Starts p2pd so that it dies with its parent: `python -I -S launch.py PARENT_PID P2PD ARGUMENT ..`.

A script of its own, run by path and without site packages (20 ms): the wish to die is expressed in this process and
survives the exec, so nothing runs between fork and exec in a program full of threads, where that can deadlock.
On Linux the kernel watches the *thread* that started this process; elsewhere nothing is arranged.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> None:
    parent_pid, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it died before the line above
        sys.exit("the parent is gone")
    os.umask(0o077)  # the control socket is for this user alone
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
