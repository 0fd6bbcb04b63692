"""The decoder turns arbitrary bytes into a frame or raises CorruptPayload, and its memory does not grow."""

from __future__ import annotations

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.gossip.frames import (
    Abort,
    AbortCode,
    Accept,
    Alive,
    Chunk,
    Frame,
    Grid,
    Header,
    Hello,
    Offer,
    Ready,
    Received,
    Refuse,
    RefuseCode,
    Standing,
    chunk_digest,
)
from noloco_p2p.gossip.units import Slice
from noloco_p2p.net.convert import decode, encode

HELLO = Hello("12D3KooWpeer", "run", "ab" * 32, layout="cd" * 32)
STANDING = Standing(0.25, 1.5, 0.5)
FRAMES: list[Frame] = [
    Offer(HELLO, b"i" * 16, STANDING, b"\x00\x01\xff", 2),
    Accept(HELLO, STANDING, Slice(1, 2)),
    Refuse(RefuseCode.BUSY, "not now", 1.0),
    Grid(b"\x01\x02\x03"),
    Header(1, 7, 900, b"d" * 32),
    Chunk(3, b"payload" * 9, chunk_digest(b"payload" * 9)),
    Received(),
    Ready(),
    Alive(),
    Abort(AbortCode.CORRUPT, "no"),
]


def read(data: bytes) -> Frame | None:
    """Return a frame, or None for a refusal; any other exception is a failure."""
    try:
        frame, sequence = decode(data)
    except CorruptPayload:
        return None
    assert isinstance(frame, Frame)
    assert sequence >= 0
    return frame


@settings(max_examples=400)
@given(st.binary(max_size=400))
def test_any_bytes_are_a_frame_or_refused(data: bytes) -> None:
    read(data)
    read(b"\x32" + data)  # as a chunk, which has a decoder of its own


@settings(max_examples=400)
@given(st.sampled_from(FRAMES), st.data())
def test_a_frame_with_damage_is_a_frame_or_refused(frame: Frame, data: st.DataObject) -> None:
    damaged = bytearray(encode(frame, sequence=data.draw(st.integers(0, 300))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        match data.draw(st.sampled_from(["set", "insert", "cut", "repeat"])):
            case "set" if at < len(damaged):
                damaged[at] = data.draw(st.integers(0, 255))
            case "insert":
                damaged[at:at] = data.draw(st.binary(max_size=12))
            case "cut":
                del damaged[at:]
            case _:
                damaged += damaged[at:]
    read(bytes(damaged))


def test_ten_thousand_refusals_hold_no_memory() -> None:
    damaged = [encode(frame)[:-1] + b"\xff" for frame in FRAMES] + [b"\x32\xff\xff\xff\xff\x7f" + bytes(50)]
    for data in damaged:
        read(data)
    tracemalloc.start()
    try:
        for _ in range(1000):
            for data in damaged:
                read(data)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now < 100_000, now
    assert peak < 1_000_000, "a size that is announced is not believed"
