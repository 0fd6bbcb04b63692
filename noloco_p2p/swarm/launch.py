"""Starts a process that gets SIGTERM when its parent ends: `python -I -S launch.py PARENT_PID [--without-udp] COMMAND`.

p2pd, the peers of a demo and the ranks of a peer are such processes. This is a separate script that is run by its path
and without site packages, so it starts in 20 ms. It sets the parent-death signal in its own process, and this setting
survives the exec. The parent therefore runs no code between fork and exec, where a program with many threads can
deadlock. On Linux, the kernel watches the *thread* that started this process. On other systems, a second process
watches the parent and sends SIGTERM when the parent ends. That part was written for macOS, but has not been run there.

With --without-udp, the command can create no UDP sockets on Linux. p2pd has no flag that turns QUIC off: it would dial
the QUIC addresses that nodes claim when they connect, and thereby send packets to any host that a stranger names.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import socket
import struct
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES  # linux/seccomp.h
# linux/bpf_common.h: load 32 bits at an offset, and three operations with a constant
LOAD, AND, EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
CALL, ARCHITECTURE, FAMILY, KIND = 0, 4, 16, 24  # offsets in seccomp_data; the last two are arguments of socket()
# machine -> its number in linux/audit.h, and the number of the system call socket()
SOCKET = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
POLL_S = 0.5
WITHOUT_UDP = "--without-udp"  # an argument before the command


def with_parent(*command: str) -> list[str]:
    """Return the command line that runs `command`, and sends it SIGTERM when the current process ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    parent_pid, command = int(arguments[0]), arguments[1:]
    without_udp = command[0] == WITHOUT_UDP
    command = command[without_udp:]
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
            sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
        if without_udp and not refuse_udp():
            sys.stderr.write("this kernel cannot keep p2pd from using QUIC\n")
    else:
        start_watcher(parent_pid)
    if os.getppid() != parent_pid:  # the parent died before the death signal was set
        sys.exit("the parent process has exited")
    if without_udp:
        os.umask(0o077)  # only this user may use the control socket of p2pd
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")


def refuse_udp() -> bool:
    """Let socket() fail for UDP in this process and the programs that it runs. Returns False if that is impossible."""
    if platform.machine() not in SOCKET:
        return False
    architecture, socket_call = SOCKET[platform.machine()]
    steps = [  # (operation, steps to skip if equal, steps to skip otherwise, constant)
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 0, 8, architecture),
        (LOAD, 0, 0, CALL),
        (EQUAL, 0, 6, socket_call),
        (LOAD, 0, 0, FAMILY),
        (EQUAL, 1, 0, socket.AF_INET),
        (EQUAL, 0, 3, socket.AF_INET6),
        (LOAD, 0, 0, KIND),
        (AND, 0, 0, 0xF),  # without SOCK_NONBLOCK and SOCK_CLOEXEC
        (EQUAL, 1, 0, socket.SOCK_DGRAM),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None).prctl
    is_locked = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    return is_locked and prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0


def start_watcher(parent_pid: int) -> None:
    """Fork a process that sends SIGTERM to this one when the parent ends. The fork exits when either process ends."""
    own_pid = os.getpid()
    if os.fork():
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # release p2pd's output, so that its reader sees the end of it
        os.dup2(nowhere, stream)
    with suppress(ProcessLookupError):
        while True:
            os.kill(own_pid, 0)
            try:
                os.kill(parent_pid, 0)
            except OSError:
                os.kill(own_pid, signal.SIGTERM)
                break
            time.sleep(POLL_S)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
