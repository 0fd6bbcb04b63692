"""What several commands share: files that pass a ticket or an address on, and the signals that ask to leave."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from noloco_p2p.atomic_file import write_atomically
from noloco_p2p.errors import SettingsError

if TYPE_CHECKING:
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import Ticket

log = logging.getLogger(__name__)

# The longest time that a bootstrap node or a first peer, started at the same moment, takes to write its file.
FILE_TIMEOUT_S = 120.0
POLL_S = 0.2
MAX_FILE_BYTES = 64 * 1024


def resolve(text: str, *, timeout_s: float = FILE_TIMEOUT_S) -> str:
    """For `@FILE`, wait until FILE has been written, and return its only word. Return any other text unchanged.

    Raises SettingsError if the file is not written in time, is unreadable or too large, or has more than one word.
    """
    if not text.startswith("@"):
        return text
    path, until_s, has_said = Path(text[1:]), time.monotonic() + timeout_s, False
    if not path.absolute().parent.is_dir():
        raise SettingsError(f"{text}: the folder {path.absolute().parent} does not exist; check the path after the @")
    while True:
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise SettingsError(f"{text} is too large for a ticket or an address ({path.stat().st_size} bytes)")
            words = path.read_text(encoding="utf-8-sig").split()
        except FileNotFoundError:
            words = []
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{text} cannot be read: {error}") from None
        if len(words) > 1:
            raise SettingsError(f"{text} must contain one ticket or one address and nothing else")
        if words:
            return words[0]
        if time.monotonic() > until_s:
            raise SettingsError(
                f"{text}: the file was not written within {timeout_s:.0f} s; is the peer that writes it running?"
            )
        if not has_said:
            has_said = True
            log.warning(
                "waiting up to %.0f s for %s to be written; check the path if nothing writes it", timeout_s, path
            )
        time.sleep(POLL_S)


def opened(run: str) -> TrainerSpec | Ticket:
    """Load the spec from a file, or decode a ticket or the ticket in `@FILE`. Raises SpecError or TicketError."""
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import Ticket, is_ticket

    if run.startswith("@"):
        return Ticket.decode(resolve(run))
    return Ticket.decode(run) if is_ticket(run) else TrainerSpec.load(Path(run))


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
