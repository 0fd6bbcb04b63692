"""Identities of tests: the same name gives the same key, and keys are in no file."""

from __future__ import annotations

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_p2p.identity import Identity, peer_id_of


def identity_of(name: str) -> Identity:
    key = Ed25519PrivateKey.from_private_bytes(blake3(name.encode()).digest())
    public_key = key.public_key().public_bytes_raw()
    return Identity(peer_id_of(public_key), public_key, key)
