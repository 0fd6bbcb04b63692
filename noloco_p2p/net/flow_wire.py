"""Convert frames of a pipeline to the bytes of a protobuf `FlowFrame` message, and back.

A payload is sent in pieces, after its Forward or Backward, so that more urgent frames can be sent in between. On the
wire, these two frames have the number of bytes in place of the payload.

Only the form of network input is checked here. A missing or unknown variant or a number out of range raises
CorruptPayload. `flow/` decides whether the content makes sense.
"""

from __future__ import annotations

from collections.abc import Callable
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


KINDS: dict[str, type] = {
    "hello": FlowHello,
    "refuse": Refuse,
    "want": Want,
    "credit": Credit,
    "forward": Forward,
    "backward": Backward,
    "piece": Piece,
    "answer": Answer,
    "lost": Lost,
    "mark": Mark,
}
NAMES = {kind: name for name, kind in KINDS.items()}


def encode(frame: WireFrame) -> bytes:
    return pb.FlowFrame(**{NAMES[type(frame)]: _to_wire(frame)}).SerializeToString()


def decode(data: bytes) -> WireFrame:
    """Decode a frame. Raises CorruptPayload if `data` is not a frame of this protocol version."""
    try:
        message = pb.FlowFrame.FromString(data)
    except DecodeError:
        raise CorruptPayload("received a message that is not a valid pipeline frame") from None
    name = message.WhichOneof("frame")
    if name not in KINDS:
        raise CorruptPayload("received a frame of an unknown kind; the sender may use a newer protocol version")
    return _from_wire(KINDS[name], getattr(message, name))


def _to_wire(value: Any) -> Any:
    """Convert a frame, or a part of one, to its message, whose fields have the same names."""
    kind = type(value)
    if kind in (Hello, Refuse):
        return convert.to_wire(value)
    if kind not in (*NAMES, MicrobatchId, MicrobatchTicket):
        return value
    made = pb.Ticket if kind is MicrobatchTicket else vars(pb)[kind.__name__]
    return made(**{_wire_name(kind, name): _to_wire(getattr(value, name)) for name in kind.__annotations__})


def _from_wire(kind: type, message: Any) -> Any:
    if kind in (Hello, Refuse):
        return convert.from_wire(kind, message)
    values = {name: getattr(message, _wire_name(kind, name)) for name in kind.__annotations__}
    return kind(**{name: _READ[name](value) if name in _READ else value for name, value in values.items()})


def _wire_name(kind: type, name: str) -> str:
    return "num_bytes" if kind in (Forward, Backward) and name == "payload" else name


def _number(number: int) -> int:
    if number > MAX_NUMBER:
        raise CorruptPayload(f"microbatch number {number} is too large")
    return number


def _signature(signature: bytes) -> bytes:
    if len(signature) != SIGNATURE_BYTES:
        raise CorruptPayload(f"received a ticket whose signature is not {SIGNATURE_BYTES} bytes long")
    return signature


def _sinks(sinks: Any) -> tuple[str, ...]:
    if len(sinks) > MAX_SINKS:
        raise CorruptPayload(f"received a Want with more than {MAX_SINKS} sinks")
    return tuple(convert.text(sink) for sink in sinks)


_READ: dict[str, Callable[[Any], Any]] = {
    "hello": lambda message: _from_wire(Hello, message),
    "id": lambda message: _from_wire(MicrobatchId, message),
    "ticket": lambda message: _from_wire(MicrobatchTicket, message),
    "head": convert.text,
    "number": _number,
    "mark": convert.finite,
    "signature": _signature,
    "sinks": _sinks,
    "remaining_s": lambda seconds: max(0.0, convert.finite(seconds)),
}
