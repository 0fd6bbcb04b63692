"""Starts p2pd without UDP sockets: `python -I -S launch.py P2PD ..`.

p2pd has no flag that turns QUIC off: it would dial the QUIC addresses that nodes claim when they connect, and thereby
send packets to any host that a stranger names. On Linux, it can create no UDP sockets. The filter is set in a separate
process, and survives the exec, so the parent runs no code between fork and exec, where a program with many threads can
deadlock. This is a script that is run by its path and without site packages, so it starts in 20 ms.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys

PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38  # linux/prctl.h
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES  # linux/seccomp.h
# linux/bpf_common.h: load 32 bits at an offset, and three operations with a constant
LOAD, AND, EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
CALL, ARCHITECTURE, FAMILY, KIND = 0, 4, 16, 24  # offsets in seccomp_data; the last two are arguments of socket()
# machine -> its number in linux/audit.h, and the number of the system call socket()
SOCKET = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}


def main(command: list[str]) -> None:
    if sys.platform == "linux" and not refuse_udp():
        sys.stderr.write("this kernel cannot keep p2pd from using QUIC\n")
    os.umask(0o077)  # only this user may use the control socket
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


if __name__ == "__main__":
    main(sys.argv[1:])
