"""Frames of a pipeline survive the way to bytes and back, and invalid bytes raise nothing but CorruptPayload."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from harness.identities import identity_of
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.flow.frames import Answer, Backward, Credit, Forward, Lost, Mark, MicrobatchId, MicrobatchTicket, Want
from noloco_p2p.flow.limits import MAX_SINKS
from noloco_p2p.gossip.frames import Hello, Refuse, RefuseCode
from noloco_p2p.net import flow_wire
from noloco_p2p.net.convert import MAX_NUMBER
from noloco_p2p.net.flow_wire import PIECE_BYTES, FlowHello, Piece, WireFrame
from noloco_p2p.net.options import MAX_MESSAGE_BYTES
from noloco_p2p.net.tickets import Tickets
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

TEXT = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=40)
BYTES = st.binary(max_size=300)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
SECONDS = st.floats(0, allow_nan=False, allow_infinity=False)
UINT64 = st.integers(0, 2**64 - 1)
ID = st.builds(MicrobatchId, TEXT, st.integers(0, MAX_NUMBER))
TICKET = st.builds(MicrobatchTicket, ID, NUMBER, UINT64, st.booleans(), st.binary(min_size=64, max_size=64))
HELLO = st.builds(Hello, TEXT, TEXT, TEXT, protocol_version=TEXT)
FRAME: st.SearchStrategy[WireFrame] = st.one_of(
    st.builds(FlowHello, HELLO, st.integers(0, 2**32 - 1)),
    st.builds(Refuse, st.sampled_from(RefuseCode), TEXT, st.floats(0, 3600)),
    st.builds(Want, TICKET, SECONDS, st.lists(TEXT, max_size=MAX_SINKS).map(tuple)),
    st.builds(Credit, ID, st.booleans()),
    st.builds(Forward, ID, SECONDS, UINT64),
    st.builds(Backward, ID, UINT64),
    st.builds(Piece, st.booleans(), BYTES),
    st.builds(Answer, ID, st.booleans()),
    st.builds(Lost, ID),
    st.builds(Mark, TICKET),
)
HEAD = identity_of("head")
SPEC_DIGEST = "ab" * 32
ID_7 = MicrobatchId("head", 7)
UNSIGNED = MicrobatchTicket(MicrobatchId(HEAD.peer_id, 7), 0.25, 30)


@given(FRAME)
@settings(max_examples=300)
def test_every_frame_comes_back_as_it_went(frame: WireFrame) -> None:
    assert flow_wire.decode(flow_wire.encode(frame)) == frame


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (Credit(ID_7, has_room=True), "220c0a080a046865616410071001"),
        (Answer(ID_7, is_taken=False), "420a0a080a04686561641007"),
        (Lost(ID_7), "4a0a0a080a04686561641007"),
        (Forward(ID_7, 1.5, 300), "2a160a080a0468656164100711000000000000f83f18ac02"),
        (Backward(ID_7, 300), "320d0a080a0468656164100710ac02"),
        (Piece(True, b"\x01"), "3a050801120101"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_bytes_are_those_of_the_documentation(frame: WireFrame, expected: str) -> None:
    assert flow_wire.encode(frame).hex() == expected


SIGNED = pb.MicrobatchTicket(signature=bytes(64))


@pytest.mark.parametrize(
    "message",
    [
        pb.FlowFrame(),
        pb.FlowFrame(credit=pb.Credit(id=pb.MicrobatchId(number=2**63))),
        pb.FlowFrame(forward=pb.Forward(remaining_s=math.nan)),
        pb.FlowFrame(want=pb.Want(ticket=SIGNED, remaining_s=math.inf)),
        pb.FlowFrame(want=pb.Want(ticket=SIGNED, sinks=["sink"] * (MAX_SINKS + 1))),
        pb.FlowFrame(mark=pb.Mark(ticket=pb.MicrobatchTicket(signature=bytes(63)))),
        pb.FlowFrame(mark=pb.Mark(ticket=pb.MicrobatchTicket(signature=bytes(64), mark=math.nan))),
        pb.FlowFrame(refuse=pb.Refuse(sentence="no code")),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused(message: pb.FlowFrame) -> None:
    with pytest.raises(CorruptPayload):
        flow_wire.decode(message.SerializeToString())


def test_a_frame_of_a_later_protocol_is_refused_with_a_sentence() -> None:
    with pytest.raises(CorruptPayload, match="newer protocol"):
        flow_wire.decode(bytes((15 << 3 | 2, 1, 0)))


def test_the_largest_piece_fits_into_a_message() -> None:
    assert len(flow_wire.encode(Piece(True, bytes(PIECE_BYTES)))) <= MAX_MESSAGE_BYTES


# tickets


def tickets(name: str = "replica", spec_digest: str = SPEC_DIGEST) -> Tickets:
    return Tickets(identity_of(name), spec_digest=spec_digest, max_tokens=30)


def test_a_ticket_is_signed_by_its_head_and_checked_by_everybody() -> None:
    signed = tickets("head").signed(UNSIGNED)
    tickets().check(signed)
    assert tickets().signed(signed) is signed
    assert tickets().signed(UNSIGNED).signature == b""


def test_the_words_of_a_ticket_are_those_of_the_documentation() -> None:
    words = b"noloco_p2p ticket 1\0" + bytes.fromhex(SPEC_DIGEST) + bytes.fromhex("0000000000000007")
    words += bytes.fromhex("3fd0000000000000" + "000000000000001e" + "01") + HEAD.peer_id.encode()
    assert tickets("head").signed(UNSIGNED).signature == HEAD.sign(words)


@pytest.mark.parametrize(
    "change",
    [
        {"mark": 0.5},
        {"num_tokens": 29},
        {"is_training": False},
        {"id": MicrobatchId(HEAD.peer_id, 8)},
        {"id": MicrobatchId(identity_of("other").peer_id, 7)},
        {"id": MicrobatchId("nobody", 7)},
        {"signature": bytes(64)},
    ],
    ids=str,
)
def test_a_ticket_that_was_changed_is_refused(change: dict[str, object]) -> None:
    signed = tickets("head").signed(UNSIGNED)
    with pytest.raises(CorruptPayload, match="not signed"):
        tickets().check(replace(signed, **change))
    with pytest.raises(CorruptPayload, match="not signed"):
        tickets(spec_digest="cd" * 32).check(signed)


@pytest.mark.parametrize("change", [{"mark": 1.01}, {"mark": -0.01}, {"num_tokens": 31}], ids=str)
def test_a_ticket_that_no_head_of_the_run_would_sign_is_refused(change: dict[str, object]) -> None:
    signed = tickets("head").signed(replace(UNSIGNED, **change))
    with pytest.raises(CorruptPayload, match="impossible values"):
        tickets().check(signed)
