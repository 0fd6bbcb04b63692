"""Encode and decode tickets. A ticket is one string that names a run and the addresses through which to join it.

    noloco1 + base32( fields.. | checksum:4 )      lower case, no padding, one line

A field is `id:1 | length:2 | bytes`. Readers skip unknown ids, so newer tickets can have more fields. Numbers are
big-endian. Readers find a ticket in any text around it, such as a mail that breaks it into lines: it ends where the
checksum is right.
"""

from __future__ import annotations

import base64
import logging
import re
import time
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from noloco_p2p.errors import SettingsError, TicketError
from noloco_p2p.invitation import Invitation

log = logging.getLogger(__name__)

PREFIX = "noloco1"
MAX_TICKET_CHARS = 4096
MAX_ADDRESSES = 16
LENGTH_BYTES = 2
CHECKSUM_BYTES = 4
RUN_NAME, SPEC_DIGEST, ADDRESS, INVITATION = 1, 2, 3, 4
# The longest time that a bootstrap node or a first peer, started at the same moment, takes to write its file.
FILE_TIMEOUT_S = 120.0
POLL_S = 0.2
MAX_FILE_BYTES = 64 * 1024

_BEGINS = re.compile(r"(?<![a-z0-9/])noloco([1-9])")
_LOOKS_LIKE = re.compile(_BEGINS.pattern + r"\s*[a-z2-7]{16}")
_PIECE = re.compile(r"[a-z2-7]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MULTIADDR = re.compile(r"/[!-~]{1,200}/p2p/[1-9A-HJ-NP-Za-km-z]{40,64}")


@dataclass(frozen=True, slots=True)
class Ticket:
    """A ticket to a run.

    `addresses` are libp2p multiaddrs of the peers to dial first, each ending in /p2p/PEER_ID. A ticket with an
    `invitation` to a private run is a secret.
    """

    run_name: str
    spec_digest: str  # 64 hexadecimal digits
    addresses: tuple[str, ...] = ()
    invitation: Invitation | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.run_name):
            raise TicketError(f"{self.run_name!r} is not a valid run name")
        if not _DIGEST.fullmatch(self.spec_digest):
            raise TicketError(f"{self.spec_digest!r} is not the digest of a run spec (64 hexadecimal digits)")
        if len(self.addresses) > MAX_ADDRESSES:
            raise TicketError(f"a ticket cannot contain {len(self.addresses)} addresses; the limit is {MAX_ADDRESSES}")
        for address in self.addresses:
            if not _MULTIADDR.fullmatch(address):
                raise TicketError(
                    f"{address!r} is not a dialable address such as /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo.."
                )

    @property
    def run_id(self) -> str:
        """Return the short name of the run, as `Spec.run_id` does."""
        return f"{self.run_name}-{self.spec_digest[:8]}"

    def encode(self) -> str:
        """Return the ticket as one line. Raises TicketError if it would exceed 4,096 characters."""
        fields = _field(RUN_NAME, self.run_name.encode()) + _field(SPEC_DIGEST, bytes.fromhex(self.spec_digest))
        fields += b"".join(_field(ADDRESS, address.encode()) for address in self.addresses)
        if self.invitation:
            fields += _field(INVITATION, self.invitation.encode())
        text = PREFIX + base64.b32encode(fields + _checksum(fields)).decode().rstrip("=").lower()
        if len(text) > MAX_TICKET_CHARS:
            raise TicketError(
                f"the ticket would have {len(text)} characters; the limit is {MAX_TICKET_CHARS}, so use fewer addresses"
            )
        return text

    @classmethod
    def decode(cls, text: str) -> Ticket:
        """Decode the ticket in a text, which may contain other words, quotes and line breaks.

        Raises TicketError with the reason if there is none, or if it needs a newer version or is damaged.
        """
        text = text.lower()
        begins = list(_BEGINS.finditer(text))
        if not begins:
            what = "a run spec, not a ticket" if text.strip().endswith(".toml") else "not a ticket"
            raise TicketError(f"{what}: tickets begin with {PREFIX}; `noloco join` and `noloco ticket` print them")
        for begin in begins:
            body = ""
            for piece in _PIECE.finditer(text, begin.end()):
                body += piece[0]
                if len(body) > MAX_TICKET_CHARS:
                    break
                if begin[1] == "1" and (fields := _checked(body)):
                    return cls._of(fields)
        if all(begin[1] != "1" for begin in begins):
            raise TicketError(
                f"this ticket has version {begins[0][1]}, but this program reads only version 1; install a newer "
                "noloco_p2p"
            )
        raise TicketError("the ticket is damaged: a part is missing or mistyped; copy the whole ticket again")

    @classmethod
    def _of(cls, fields: bytes) -> Ticket:
        name, digest, addresses, invitation = "", "", [], None
        while fields:
            end = 1 + LENGTH_BYTES + int.from_bytes(fields[1 : 1 + LENGTH_BYTES], "big")
            if len(fields) < max(end, 1 + LENGTH_BYTES):
                raise TicketError("the ticket is malformed: a field is longer than the ticket; ask for a new ticket")
            number, value, fields = fields[0], fields[1 + LENGTH_BYTES : end], fields[end:]
            if number == RUN_NAME:
                name = value.decode(errors="replace")
            elif number == SPEC_DIGEST:
                digest = value.hex()
            elif number == ADDRESS:
                addresses.append(value.decode(errors="replace"))
            elif number == INVITATION:
                invitation = Invitation.decode(value)
        return cls(name, digest, tuple(addresses), invitation)


def is_ticket(text: str) -> bool:
    """Return whether `text` has a ticket (of any version, possibly damaged) in it, so that it is no file name."""
    return _LOOKS_LIKE.search(text.lower()) is not None


def find(text: str) -> Ticket | None:
    """Return the ticket in `text`, or in FILE for `@FILE`. The result is None if `text` is meant as something else.

    Raises TicketError, and SettingsError if FILE cannot be read.
    """
    return Ticket.decode(contents(text)) if text.startswith("@") or is_ticket(text) else None


def contents(text: str, *, timeout_s: float = FILE_TIMEOUT_S) -> str:
    """For `@FILE`, wait until FILE has been written, and return its text. Return any other text unchanged.

    Raises SettingsError if the file is not written in time, or is unreadable or too large.
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
            if found := path.read_text(encoding="utf-8-sig").strip():
                return found
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{text} cannot be read: {error}") from None
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


def _checked(body: str) -> bytes:
    """Return the fields if the checksum after them is right, or else nothing."""
    try:
        data = base64.b32decode(body.upper() + "=" * (-len(body) % 8))
    except ValueError:
        return b""
    fields, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    return fields if checksum == _checksum(fields) else b""


def _field(number: int, value: bytes) -> bytes:
    return bytes((number,)) + len(value).to_bytes(LENGTH_BYTES, "big") + value


def _checksum(fields: bytes) -> bytes:
    return blake3(PREFIX.encode() + fields).digest(CHECKSUM_BYTES)
