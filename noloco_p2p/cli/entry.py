"""How one program hands another on the same machine the way into a run: a ticket or an address, as a file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_p2p.atomic_file import write_atomically
from noloco_p2p.errors import SettingsError

if TYPE_CHECKING:
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import Ticket

FILE_TIMEOUT_S = 120.0  # a bootstrap or a first peer that starts at the same moment needs that long at most
POLL_S = 0.2
MAX_FILE_BYTES = 64 * 1024


def resolve(text: str, *, timeout_s: float = FILE_TIMEOUT_S) -> str:
    """`@FILE` -> the one line in it, waited for until it is there; anything else as it is. Raises SettingsError."""
    if not text.startswith("@"):
        return text
    path, until_s = Path(text[1:]), time.monotonic() + timeout_s
    while not (line := _read(path)):
        if time.monotonic() > until_s:
            raise SettingsError(
                f"{text}: the file was not written within {timeout_s:.0f} s; does the peer that writes it run?"
            )
        time.sleep(POLL_S)
    return line


def opened(run: str) -> TrainerSpec | Ticket:
    """What SPEC.toml|TICKET means. Raises SpecError and TicketError."""
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import Ticket, is_ticket

    return Ticket.decode(run) if is_ticket(run) else TrainerSpec.load(Path(run))


def ticket_in(run: str) -> str:
    """`@FILE` -> the ticket in it, as a spec is named without the @; anything else as it is. Raises TicketError."""
    from noloco_p2p.ticket import Ticket

    if not run.startswith("@"):
        return run
    ticket = resolve(run)
    Ticket.decode(ticket)
    return ticket


def check_writable(path: Path | None, *, flag: str) -> None:
    """Before seconds of imports. Raises SettingsError."""
    if path and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise SettingsError(f"{flag} {path}: cannot be written there; name a file in a folder that this user may write")


def write(path: Path | None, line: str, *, flag: str, is_secret: bool = False) -> None:
    """Whole or not at all, as others may read at any moment; a secret for this user alone. Raises SettingsError."""
    if path is None:
        return
    try:
        write_atomically(path, f"{line}\n".encode(), mode=0o600 if is_secret else 0o666)
    except OSError as error:
        raise SettingsError(f"{flag} {path}: cannot be written: {error.strerror}") from None


def _read(path: Path) -> str:
    """Empty while the file is missing or empty. Raises SettingsError for what is not one line of text."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(f"@{path}: {path.stat().st_size} bytes are no ticket and no address")
        lines = path.read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"@{path}: cannot be read: {error}") from None
    if len(lines) > 1:
        raise SettingsError(f"@{path}: must hold one ticket or one address, and nothing else")
    return lines[0] if lines else ""
