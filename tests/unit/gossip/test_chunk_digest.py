"""The digest of a chunk is part of the wire format: all peers compute the same one, and damage changes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.gossip.frames import chunk_digest


def test_it_is_the_published_xxh3_of_128_bits() -> None:
    assert chunk_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"  # of empty input, from the tests of xxHash


@given(st.binary(min_size=1, max_size=2000), st.data())
def test_a_flipped_bit_changes_it(payload: bytes, data: st.DataObject) -> None:
    damaged = bytearray(payload)
    damaged[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert chunk_digest(bytes(damaged)) != chunk_digest(memoryview(payload)) == chunk_digest(payload)
