"""Encode and decode tickets. A ticket is one string that names a run and the addresses through which to join it.

    noloco1 + base32( fields.. | checksum:4 )      lower case, no padding, one line

A field is `id:1 | length:2 | bytes`. Readers skip unknown ids, so newer tickets can have more fields. Numbers are
big-endian.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

from blake3 import blake3

from noloco_p2p.errors import TicketError
from noloco_p2p.invitation import Invitation

PREFIX = "noloco1"
MAX_TICKET_CHARS = 4096
MAX_ADDRESSES = 16
LENGTH_BYTES = 2
CHECKSUM_BYTES = 4
RUN_NAME, SPEC_DIGEST, ADDRESS, INVITATION = 1, 2, 3, 4

_LOOKS_LIKE = re.compile(r"noloco[1-9][a-z0-9]{16,}", re.IGNORECASE)
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
        """Decode a ticket.

        Raises TicketError with the reason if it is not a ticket, needs a newer version, or is damaged.
        """
        text = text.strip().lower()
        if len(text) > MAX_TICKET_CHARS:
            raise TicketError(
                f"not a ticket: it has {len(text)} characters, but a ticket has at most {MAX_TICKET_CHARS}"
            )
        if not text.startswith(PREFIX):
            if text[:6] == PREFIX[:6] and text[6:7] in set("23456789"):
                raise TicketError(
                    f"this ticket has version {text[6]}, but this program reads only version 1; install a newer "
                    "noloco_p2p"
                )
            raise TicketError(
                f"not a ticket: tickets begin with {PREFIX}; `noloco join` and `noloco ticket` print them"
            )
        body = text[len(PREFIX) :].upper()
        try:
            data = base64.b32decode(body + "=" * (-len(body) % 8))
        except ValueError:
            data = b""
        fields, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
        if checksum != _checksum(fields):
            raise TicketError("the ticket is damaged: a part is missing or mistyped; copy the whole ticket again")
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
    """Return whether `text` is meant to be a ticket (of any version, possibly damaged) rather than a file name."""
    return _LOOKS_LIKE.fullmatch(text.strip()) is not None


def _field(number: int, value: bytes) -> bytes:
    return bytes((number,)) + len(value).to_bytes(LENGTH_BYTES, "big") + value


def _checksum(fields: bytes) -> bytes:
    return blake3(PREFIX.encode() + fields).digest(CHECKSUM_BYTES)
