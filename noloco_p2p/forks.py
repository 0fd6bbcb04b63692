"""Keep locks and listening sockets from the processes that this one forks, such as the workers of a DataLoader.

A fork inherits them. If a peer was killed, its workers would otherwise hold its state folder and its port.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import IO, TypeVar
from weakref import WeakSet

T = TypeVar("T", IO[bytes], socket.socket)

_kept: WeakSet[IO[bytes] | socket.socket] = WeakSet()


def kept_from_forks(held: T) -> T:
    """Close this file or socket in every process that is forked from now on, and return it."""
    _kept.add(held)
    return held


def _close_all() -> None:
    for each in list(_kept):
        with suppress(OSError):
            each.close()


os.register_at_fork(after_in_child=_close_all)
