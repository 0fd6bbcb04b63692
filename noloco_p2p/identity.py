"""Manage the Ed25519 key of this peer. It is also the libp2p key, so gRPC, the DHT and the logs share one peer id.

The key file holds libp2p's protobuf `PrivateKey {Type = 1; Data = 2}`. Its 64 bytes of data are the private key,
followed by the public key. The libp2p daemon can read the file unchanged. A peer id is the identity multihash of the
protobuf `PublicKey`, in base58. It contains the public key, so the id is enough to verify a signature. The format is
described in https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from noloco_p2p.errors import IdentityError

PRIVATE_PREFIX = bytes((0x08, 0x01, 0x12, 0x40))  # field 1: type Ed25519 (1); field 2: 64 bytes follow
PUBLIC_PREFIX = bytes((0x08, 0x01, 0x12, 0x20))  # field 1: type Ed25519 (1); field 2: 32 bytes follow
MULTIHASH_PREFIX = bytes((0x00, 0x24))  # identity "hash" of 36 bytes
KEY_BYTES = 32
MAX_ID_CHARS = 64  # an Ed25519 id has 52; decoding base58 takes quadratic time
FILE_BYTES = len(PRIVATE_PREFIX) + 2 * KEY_BYTES


@dataclass(frozen=True, slots=True)
class Identity:
    """A key pair and its peer id. Create one with `load_or_create()` or `load()`."""

    peer_id: str
    public_key: bytes  # 32 bytes
    _private_key: Ed25519PrivateKey = field(repr=False)

    def sign(self, data: bytes) -> bytes:
        """Return a 64-byte signature that `verify(peer_id, data, ...)` accepts."""
        return self._private_key.sign(data)

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """Derive an identity from a 32-byte seed. The same seed always gives the same identity."""
        private_key = Ed25519PrivateKey.from_private_bytes(seed)
        public_key = private_key.public_key().public_bytes_raw()
        return cls(peer_id_of(public_key), public_key, private_key)

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a key file. Raises IdentityError if it is missing, unreadable, damaged or of another key type."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise IdentityError(f"{path} does not exist; run `noloco id` to create it") from None
        except OSError as error:
            raise IdentityError(
                f"{path}: the identity cannot be read: {error.strerror}; check the owner and mode of this file"
            ) from None
        return _decode(data, path)

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key file. If it is missing, create it atomically with mode 0600.

        If two processes create it at the same time, both get the same key.
        """
        if not path.exists():
            try:
                _create(path)
            except OSError as error:
                raise IdentityError(
                    f"{path}: the identity cannot be written: {error.strerror}; choose another folder with --state-dir"
                ) from None
        return cls.load(path)


def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Return whether `signature` was made over `data` with the key of `peer_id`.

    For an invalid id, the result is False.
    """
    try:
        _public_key(peer_id).verify(signature, data)
    except (ValueError, InvalidSignature):
        return False
    return True


def public_key_of(peer_id: str) -> bytes:
    """Return the 32-byte public key in an Ed25519 peer id. Raises ValueError if it is not an Ed25519 peer id."""
    if len(peer_id) > MAX_ID_CHARS:
        raise ValueError(f"a string of {len(peer_id)} characters is not an Ed25519 peer id")
    raw = base58.b58decode(peer_id)
    prefix = MULTIHASH_PREFIX + PUBLIC_PREFIX
    # The decoder ignores blanks, so without the last condition a peer could have many ids.
    if len(raw) != len(prefix) + KEY_BYTES or not raw.startswith(prefix) or base58.b58encode(raw).decode() != peer_id:
        raise ValueError(f"{peer_id!r} is not an Ed25519 peer id")
    return raw[len(prefix) :]


def peer_id_of(public_key: bytes) -> str:
    """Return the libp2p id (12D3Koo...) of a 32-byte Ed25519 public key."""
    return base58.b58encode(MULTIHASH_PREFIX + PUBLIC_PREFIX + public_key).decode()


def short_id(peer_id: str) -> str:
    """Return the last six characters of an id, for logs. The first characters are the same for all peers."""
    return peer_id[-6:]


@lru_cache(maxsize=4096)
def _public_key(peer_id: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer_id))


def _decode(data: bytes, path: Path) -> Identity:
    if data.startswith(b"\x08") and not data.startswith(PRIVATE_PREFIX[:2]):
        raise IdentityError(f"{path} is not an Ed25519 key; move it away and run `noloco id` to create one")
    if len(data) != FILE_BYTES or not data.startswith(PRIVATE_PREFIX):
        raise IdentityError(
            f"{path} is not a libp2p Ed25519 private key ({len(data)} bytes, expected {FILE_BYTES}); "
            "restore it from your backup, or move it away and run `noloco id` to create a new one"
        )
    body = data[len(PRIVATE_PREFIX) :]
    private_key = Ed25519PrivateKey.from_private_bytes(body[:KEY_BYTES])
    public_key = private_key.public_key().public_bytes_raw()
    if public_key != body[KEY_BYTES:]:
        raise IdentityError(f"{path}: the key is damaged: its two halves do not match; restore it from your backup")
    return Identity(peer_id_of(public_key), public_key, private_key)


def _create(path: Path) -> None:
    private_key = Ed25519PrivateKey.generate()
    data = PRIVATE_PREFIX + private_key.private_bytes_raw() + private_key.public_key().public_bytes_raw()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # unlike a rename, a link never replaces a key that was written in the meantime
        except FileExistsError:
            return
        except OSError:
            os.rename(draft, path)  # the file system has no hard links
    finally:
        draft.unlink(missing_ok=True)
