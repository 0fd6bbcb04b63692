"""Convert frames of a pipeline to the bytes of a protobuf `FlowFrame` message, and back.

A payload is sent in pieces, after its Forward or Backward, so that more urgent frames can be sent in between. On the
wire, these two frames have the number of bytes in place of the payload.

Only the form of network input is checked here. A missing or unknown variant or a number out of range raises
CorruptPayload. `flow/` decides whether the content makes sense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.flow.frames import (
    Answer,
    Backward,
    Credit,
    Forward,
    Frame,
    Lost,
    Mark,
    MicrobatchId,
    MicrobatchTicket,
    Want,
)
from noloco_p2p.flow.limits import MAX_SINKS
from noloco_p2p.gossip.frames import Hello, Refuse
from noloco_p2p.net import convert
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

PIECE_BYTES = 1 << 18  # a piece takes 0.1 s at 20 Mbit/s, so a more urgent frame can be delayed by that much
MAX_NUMBER = 2**63 - 1  # the largest number that a microbatch can have
SIGNATURE_BYTES = 64


@dataclass(frozen=True, slots=True)
class FlowHello:
    """The first frame of a stream. `hello` has no layout, because each stage has a different one."""

    hello: Hello
    stage: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next PIECE_BYTES of the payload that the last Backward or Forward announced, or all that remain.

    `digest` comes from `chunk_digest`.
    """

    is_backward: bool
    payload: bytes
    digest: bytes


WireFrame = FlowHello | Refuse | Piece | Frame


def encode(frame: WireFrame) -> bytes:
    name, to_wire = _TO_WIRE[type(frame)]
    return pb.FlowFrame(**{name: to_wire(frame)}).SerializeToString()


def decode(data: bytes) -> WireFrame:
    """Decode a frame. Raises CorruptPayload if `data` is not a frame of this protocol version."""
    try:
        message = pb.FlowFrame.FromString(data)
    except DecodeError:
        raise CorruptPayload("received a message that is not a valid pipeline frame") from None
    name = message.WhichOneof("frame")
    if name not in _FROM_WIRE:
        raise CorruptPayload("received a frame of an unknown kind; the sender may use a newer protocol version")
    return _FROM_WIRE[name](getattr(message, name))


def _id_to_wire(id: MicrobatchId) -> pb.MicrobatchId:
    return pb.MicrobatchId(head=id.head, number=id.number)


def _id_from_wire(message: pb.MicrobatchId) -> MicrobatchId:
    if message.number > MAX_NUMBER:
        raise CorruptPayload(f"microbatch number {message.number} is too large")
    return MicrobatchId(convert.text(message.head), message.number)


def _ticket_to_wire(ticket: MicrobatchTicket) -> pb.Ticket:
    return pb.Ticket(
        id=_id_to_wire(ticket.id),
        mark=ticket.mark,
        num_tokens=ticket.num_tokens,
        is_training=ticket.is_training,
        signature=ticket.signature,
    )


def _ticket_from_wire(message: pb.Ticket) -> MicrobatchTicket:
    if len(message.signature) != SIGNATURE_BYTES:
        raise CorruptPayload(f"received a ticket whose signature is not {SIGNATURE_BYTES} bytes long")
    mark = convert.finite(message.mark)
    return MicrobatchTicket(_id_from_wire(message.id), mark, message.num_tokens, message.is_training, message.signature)


def _want_from_wire(message: pb.Want) -> Want:
    if len(message.sinks) > MAX_SINKS:
        raise CorruptPayload(f"received a Want with more than {MAX_SINKS} sinks")
    sinks = tuple(convert.text(sink) for sink in message.sinks)
    return Want(_ticket_from_wire(message.ticket), _remaining(message.remaining_s), sinks)


def _remaining(seconds: float) -> float:
    return max(0.0, convert.finite(seconds))


_TO_WIRE: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    FlowHello: ("hello", lambda f: pb.FlowHello(hello=convert.to_wire(f.hello), stage=f.stage)),
    Refuse: ("refuse", convert.to_wire),
    Want: (
        "want",
        lambda f: pb.Want(ticket=_ticket_to_wire(f.ticket), remaining_s=f.remaining_s, sinks=f.sinks),
    ),
    Credit: ("credit", lambda f: pb.Credit(id=_id_to_wire(f.id), has_room=f.has_room)),
    Forward: (
        "forward",
        lambda f: pb.Forward(id=_id_to_wire(f.id), remaining_s=f.remaining_s, num_bytes=f.payload),
    ),
    Backward: ("backward", lambda f: pb.Backward(id=_id_to_wire(f.id), num_bytes=f.payload)),
    Piece: ("piece", lambda f: pb.Piece(is_backward=f.is_backward, payload=f.payload, digest=f.digest)),
    Answer: ("answer", lambda f: pb.Answer(id=_id_to_wire(f.id), is_taken=f.is_taken)),
    Lost: ("lost", lambda f: pb.Lost(id=_id_to_wire(f.id))),
    Mark: ("mark", lambda f: pb.Mark(ticket=_ticket_to_wire(f.ticket))),
}

_FROM_WIRE: Mapping[str, Callable[[Any], WireFrame]] = {
    "hello": lambda m: FlowHello(convert.from_wire(Hello, m.hello), m.stage),
    "refuse": lambda m: convert.from_wire(Refuse, m),
    "want": _want_from_wire,
    "credit": lambda m: Credit(_id_from_wire(m.id), m.has_room),
    "forward": lambda m: Forward(_id_from_wire(m.id), _remaining(m.remaining_s), m.num_bytes),
    "backward": lambda m: Backward(_id_from_wire(m.id), m.num_bytes),
    "piece": lambda m: Piece(m.is_backward, m.payload, m.digest),
    "answer": lambda m: Answer(_id_from_wire(m.id), m.is_taken),
    "lost": lambda m: Lost(_id_from_wire(m.id)),
    "mark": lambda m: Mark(_ticket_from_wire(m.ticket)),
}
