"""What several commands share: how they read a run and write files, and the signals that ask to leave."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from noloco_p2p.atomic_file import write_atomically
from noloco_p2p.errors import SettingsError

if TYPE_CHECKING:
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import Ticket


def opened(run: str) -> TrainerSpec | Ticket:
    """Find the ticket in `run` or in `@FILE`, or load the spec. Raises SpecError, TicketError or SettingsError."""
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import find

    return find(run) or TrainerSpec.load(Path(run))


def leaving_signals() -> list[signal.Signals]:
    """Return the signals that ask this program to leave. A SIGHUP that `nohup` ignores is not among them."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + [signal.SIGHUP] * (not is_ignored)


def on_leaving(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for signum in leaving_signals():
        signal.signal(signum, handler)


def check_writable(path: Path | None, *, flag: str) -> None:
    """Raise SettingsError if `path` is not writable. Commands call this before their slow imports."""
    if path and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise SettingsError(f"{flag} {path} is not writable; choose a file in a folder that you can write to")


def write(path: Path | None, line: str, *, flag: str, is_secret: bool = False) -> None:
    """Write the file atomically, because other processes may read it at any moment.

    If `is_secret` is true, only this user can read the file. Raises SettingsError if the file cannot be written.
    """
    if path is None:
        return
    try:
        write_atomically(path, f"{line}\n".encode(), mode=0o600 if is_secret else 0o666)
    except OSError as error:
        raise SettingsError(f"{flag} {path} cannot be written: {error.strerror}") from None
