"""Make identities for tests. The same name gives the same key, and no key is written to a file."""

from __future__ import annotations

from blake3 import blake3

from noloco_p2p.identity import Identity


def identity_of(name: str) -> Identity:
    return Identity.from_seed(blake3(name.encode()).digest())
