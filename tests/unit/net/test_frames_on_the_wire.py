"""Frames survive the way to bytes and back, and invalid bytes raise nothing but CorruptPayload."""

from __future__ import annotations

import math
import tracemalloc
from enum import IntEnum
from typing import Any, get_args

import pytest
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.codec import CHUNK_ELEMENTS
from noloco_p2p.errors import CorruptPayload
from noloco_p2p.gossip import frames
from noloco_p2p.gossip.units import Slice
from noloco_p2p.net import convert
from noloco_p2p.net.options import MAX_MESSAGE_BYTES
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

UINT64 = st.integers(0, 2**64 - 1)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
UINT32 = st.integers(0, 2**32 - 1)
PROGRESS = st.floats(0, allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=40)
BYTES = st.binary(max_size=300)

HELLO = st.builds(frames.Hello, TEXT, TEXT, TEXT, protocol_version=TEXT, layout=TEXT)
STANDING = st.builds(frames.Standing, PROGRESS, NUMBER, NUMBER)
RETRY = st.floats(0, 3600)
KINDS: dict[type, tuple[st.SearchStrategy[Any], ...]] = {
    frames.Offer: (HELLO, BYTES, STANDING, BYTES, UINT32),
    frames.Accept: (HELLO, STANDING, st.builds(Slice, UINT32, UINT32)),
    frames.Refuse: (st.sampled_from(frames.RefuseCode), TEXT, RETRY),
    frames.Grid: (BYTES,),
    frames.Header: (BYTES,),
    frames.Chunk: (BYTES,),
    frames.Received: (),
    frames.Ready: (),
    frames.Alive: (),
    frames.Abort: (st.sampled_from(frames.AbortCode), TEXT),
}
FRAME: st.SearchStrategy[frames.Frame] = st.one_of(*(st.builds(kind, *fields) for kind, fields in KINDS.items()))


def test_every_kind_of_frame_is_tried() -> None:
    assert KINDS.keys() == set(get_args(frames.Frame))


@given(FRAME, st.integers(1, 2**64 - 1))
@settings(max_examples=300, deadline=None)
def test_a_frame_and_its_number_come_back_as_they_went(frame: frames.Frame, sequence: int) -> None:
    data = convert.encode(frame, sequence=sequence)
    assert convert.decode(data) == (frame, sequence)
    message = pb.Frame.FromString(data)
    assert message.sequence == sequence
    assert convert.decode(message.SerializeToString()) == (frame, sequence)


@given(st.builds(frames.Chunk, BYTES), st.integers(0, 300))
@settings(max_examples=200, deadline=None)
def test_a_chunk_written_by_hand_is_the_message_that_protobuf_writes(chunk: frames.Chunk, sequence: int) -> None:
    message = pb.Frame(chunk=convert.to_wire(chunk), sequence=sequence)
    assert pb.Frame.FromString(convert.encode(chunk, sequence=sequence)) == message


def test_the_largest_chunk_fits_into_a_message() -> None:
    chunk = frames.Chunk(bytes(4 * CHUNK_ELEMENTS))
    assert len(convert.encode(chunk, sequence=2**63)) <= MAX_MESSAGE_BYTES


# messages of strangers


def decoded_or_refused(data: bytes) -> frames.Frame | None:
    try:
        return convert.decode(data)[0]
    except CorruptPayload:
        return None


def test_ten_thousand_refusals_hold_no_memory() -> None:
    hello, standing = frames.Hello("peer", "run", "ab" * 32), frames.Standing(0.25, 1.5, 0.5)
    told = [
        frames.Offer(hello, b"i" * 16, standing, b"\x00\x01\xff", 2),
        frames.Refuse(frames.RefuseCode.BUSY, "not now", 1.0),
        frames.Header(b"d" * 32),
        frames.Chunk(b"payload" * 9),
        frames.Abort(frames.AbortCode.CORRUPT, "no"),
    ]
    damaged = [
        b"\x32\xff\xff\xff\xff\x7f" + bytes(50),
        *(convert.encode(frame, sequence=1)[:-1] + b"\xff" for frame in told),
    ]
    for data in damaged:
        decoded_or_refused(data)
    tracemalloc.start()
    try:
        for _ in range(1000):
            for data in damaged:
                decoded_or_refused(data)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now < 100_000, now
    assert peak < 1_000_000, "a size that is announced is not believed"


@pytest.mark.parametrize(
    "message",
    [
        pb.Frame(),
        pb.Frame(refuse=pb.Refuse(sentence="no code")),
        pb.Frame(refuse=pb.Refuse(code=99, sentence="no")),  # pyright: ignore[reportArgumentType]
        pb.Frame(abort=pb.Abort()),
    ],
    ids=str,
)
def test_an_unknown_value_is_refused_with_a_sentence(message: pb.Frame) -> None:
    with pytest.raises(CorruptPayload, match="newer protocol"):
        convert.decode(message.SerializeToString())


def test_a_frame_of_a_later_protocol_is_refused_with_a_sentence() -> None:
    unknown_variant = bytes((15 << 3 | 2, 1, 0))
    with pytest.raises(CorruptPayload, match="newer protocol"):
        convert.decode(unknown_variant)


def test_unknown_fields_are_ignored() -> None:
    known = pb.Grid(exponents=b"e").SerializeToString() + bytes((15 << 3, 1))
    message = bytes((4 << 3 | 2, len(known))) + known + bytes((14 << 3, 1))
    assert convert.decode(message) == (frames.Grid(b"e"), 0)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(number: float) -> None:
    for standing in (pb.Standing(step_s=number), pb.Standing(free_in_s=number)):
        for frame in (pb.Frame(offer=pb.Offer(standing=standing)), pb.Frame(accept=pb.Accept(standing=standing))):
            with pytest.raises(CorruptPayload, match="finite"):
                convert.decode(frame.SerializeToString())
    with pytest.raises(CorruptPayload, match="finite"):
        convert.from_wire(frames.Refuse, pb.Refuse(code=pb.REFUSE_BUSY, retry_after_s=number))


@pytest.mark.parametrize("progress", [-0.01, math.nan, math.inf, -math.inf])
def test_a_place_that_nobody_can_be_at_is_refused(progress: float) -> None:
    """A peer that adopted the value would end its learning rate schedule."""
    standing = pb.Standing(progress=progress)
    for frame in (pb.Frame(offer=pb.Offer(standing=standing)), pb.Frame(accept=pb.Accept(standing=standing))):
        with pytest.raises(CorruptPayload, match="not a valid position in a run"):
            convert.decode(frame.SerializeToString())
    with pytest.raises(CorruptPayload, match="not a valid position in a run"):
        convert.from_wire(frames.PeerStatus, pb.StatusReply(progress=progress))
    with pytest.raises(CorruptPayload, match="not a valid position in a run"):
        convert.manifest_from_wire(pb.Manifest(progress=progress, chunk_digests=[bytes(32)]))


@pytest.mark.parametrize(("sent_s", "believed_s"), [(-5.0, 0.0), (1e9, 3600.0), (7.0, 7.0)])
def test_nobody_can_send_us_away_for_more_than_an_hour(sent_s: float, believed_s: float) -> None:
    assert (
        convert.from_wire(frames.Refuse, pb.Refuse(code=pb.REFUSE_BUSY, retry_after_s=sent_s)).retry_after_s
        == believed_s
    )


def test_the_text_of_a_stranger_is_bounded_and_cannot_play_with_a_terminal() -> None:
    refuse = convert.from_wire(
        frames.Refuse, pb.Refuse(code=pb.REFUSE_BUSY, sentence="\x1b[2Jhello\n\r\x07" + "x" * 10_000)
    )
    assert refuse.sentence.startswith("[2Jhello")
    assert len(refuse.sentence) <= convert.MAX_TEXT


@given(st.builds(frames.PeerStatus, HELLO, TEXT, PROGRESS, st.booleans()))
@settings(max_examples=100, deadline=None)
def test_a_status_comes_back_as_it_went(status: frames.PeerStatus) -> None:
    message = pb.StatusReply.FromString(convert.to_wire(status).SerializeToString())
    assert convert.from_wire(frames.PeerStatus, message) == status


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (frames.RefuseCode, pb.RefuseCode, "REFUSE_"),
        (frames.AbortCode, pb.AbortCode, "ABORT_"),
    ],
)
def test_our_enums_have_the_numbers_of_the_proto(ours: type[IntEnum], theirs: EnumTypeWrapper, prefix: str) -> None:
    assert {f"{prefix}{value.name}": value.value for value in ours} | {f"{prefix}UNSPECIFIED": 0} == dict(
        theirs.items()
    )
