"""Restrict a private run to peers with a valid invitation.

The run spec names the run key, an Ed25519 key that the founder keeps in a file. The run key signs invitations. An
invitation is a separate key with an expiry date, and it is part of a ticket. Anyone who has the ticket is invited and
can pass it on. A peer never shows its invitation to others. It shows its membership instead, which consists of the
invitation's public key and the invitation's signature over the peer id. So nobody can steal an invitation from network
traffic.

All members also share a secret, from which two keys are derived. TLS requires the first key from callers
(`net/session.py`). The second key is used to list members in the directory. The members' records are stored under its
public half, which does not reveal the run. Its private half signs a mark in each record, which every DHT node checks.
"""

from __future__ import annotations

import base64
import binascii
import struct
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from blake3 import blake3

from noloco_p2p.errors import TicketError
from noloco_p2p.identity import Identity, peer_id_of, public_key_of, verify

INVITATION = struct.Struct(">32s8s32s32s64s")  # run key, expiry (Unix s), seed, secret, signature of the run key
MEMBERSHIP = struct.Struct(">32s8s64s64s")  # invitation's key, expiry, its signature, own signature over the peer id
KEY_BYTES, MARK_BYTES, TIME_BYTES = 32, 64, 8
INVITES, MEMBER = b"noloco_p2p invitation 1\x00", b"noloco_p2p member 1\x00"
SECRET, MARK = b"noloco_p2p run secret 1\x00", b"noloco_p2p mark 2\x00"
TLS, LISTING = "noloco_p2p tls key of members 1", "noloco_p2p listing of members 1"
# Prefix of the listing key's public half, by which the directory names a private run instead of by its digest.
PRIVATE = "p"


class NotInvited(TicketError):
    """A membership is missing, has expired, or belongs to another run or peer."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """A secret that admits a peer to a private run. Create one with `invite()`."""

    run_key: str  # encoded as a peer id, as in the run spec
    expires_at_s: int  # Unix
    seed: bytes  # the private half of this invitation's key
    secret: bytes  # shared by all members of the run
    signature: bytes  # made with the run key

    def encode(self) -> bytes:
        expires = self.expires_at_s.to_bytes(TIME_BYTES, "big")
        return public_key_of(self.run_key) + expires + self.seed + self.secret + self.signature

    @classmethod
    def decode(cls, data: bytes) -> Invitation:
        """Decode and verify an invitation.

        Raises TicketError if `data` is not an invitation, or is not signed by the run key that it names.
        """
        if len(data) != INVITATION.size:
            raise TicketError(
                f"the invitation has {len(data)} bytes instead of {INVITATION.size}; ask for a new ticket"
            )
        run_key, expires, seed, secret, signature = INVITATION.unpack(data)
        found = cls(peer_id_of(run_key), int.from_bytes(expires, "big"), seed, secret, signature)
        public_key = Identity.from_seed(seed).public_key
        if not verify(found.run_key, INVITES + expires + public_key, signature):
            raise TicketError("the invitation is not signed by the run key that it names; ask for a new ticket")
        return found

    def check_time(self, now_s: float) -> None:
        """Raise NotInvited if the invitation has expired."""
        if now_s > self.expires_at_s:
            raise NotInvited(f"the invitation expired on {date(self.expires_at_s)}; ask for a new ticket")

    def membership(self, peer_id: str) -> bytes:
        """Return the membership that a peer with this invitation shows to others."""
        key = Identity.from_seed(self.seed)
        expires = self.expires_at_s.to_bytes(TIME_BYTES, "big")
        return key.public_key + expires + self.signature + key.sign(MEMBER + peer_id.encode())

    def check(self, membership: bytes, *, peer_id: str, now_s: float) -> None:
        """Check that another peer is invited to the same run. Raises NotInvited with the reason if it is not."""
        if len(membership) != MEMBERSHIP.size:
            raise NotInvited("this run is private, and the caller presented no invitation")
        public_key, expires, signature, own_signature = MEMBERSHIP.unpack(membership)
        if not verify(self.run_key, INVITES + expires + public_key, signature):
            raise NotInvited("this run is private, and the invitation is not signed by its run key")
        if not verify(peer_id_of(public_key), MEMBER + peer_id.encode(), own_signature):
            raise NotInvited("this run is private, and the invitation belongs to another peer")
        if now_s > int.from_bytes(expires, "big"):
            raise NotInvited(f"the invitation expired on {date(int.from_bytes(expires, 'big'))}")

    def listing(self, spec_digest: str) -> Listing:
        """Return the key with which members of this run find each other in the directory."""
        seed = blake3(self.secret + bytes.fromhex(spec_digest), derive_key_context=LISTING).digest()
        return Listing(Identity.from_seed(seed))

    def tls_seed(self) -> bytes:
        """Return the 32-byte seed of the key that TLS requires from callers."""
        return blake3(self.secret, derive_key_context=TLS).digest()


@dataclass(frozen=True, slots=True)
class Listing:
    """The listing key of a private run. It is as secret as an invitation."""

    key: Identity

    @property
    def view(self) -> str:
        """Return the directory's name for the run, which is used in place of the digest of its spec."""
        return PRIVATE + self.key.public_key.hex()

    def mark(self, peer_id: str) -> str:
        """Return the proof that the record of `peer_id` was written by a member."""
        return base64.urlsafe_b64encode(self.key.sign(MARK + peer_id.encode())).decode().rstrip("=")


@lru_cache(maxsize=4096)
def is_marked(view: str, peer_id: str, mark: str) -> bool:
    """Return whether `mark` proves that the record of `peer_id` in this view was written by a member.

    In the view of a public run, every record counts as marked.
    """
    if not view.startswith(PRIVATE):
        return True
    try:
        public_key, signature = bytes.fromhex(view.removeprefix(PRIVATE)), base64.urlsafe_b64decode(mark + "==")
    except (ValueError, binascii.Error):
        return False
    is_long_enough = (len(public_key), len(signature)) == (KEY_BYTES, MARK_BYTES)
    return is_long_enough and verify(peer_id_of(public_key), MARK + peer_id.encode(), signature)


def invite(run_key: Identity, *, expires_at_s: float, seed: bytes) -> Invitation:
    """Create an invitation. `run_key` is the founder's key, and `seed` is 32 random bytes."""
    expires = int(expires_at_s).to_bytes(TIME_BYTES, "big")
    signature = run_key.sign(INVITES + expires + Identity.from_seed(seed).public_key)
    secret = blake3(run_key.sign(SECRET)).digest()  # Ed25519 signatures are deterministic
    return Invitation(run_key.peer_id, int(expires_at_s), seed, secret, signature)


def date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
