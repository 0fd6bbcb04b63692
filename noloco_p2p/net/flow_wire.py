"""Convert frames of a pipeline to the bytes of a protobuf `FlowFrame` message, and back.

A payload is sent in pieces, after its Forward or Backward, so that more urgent frames can be sent in between. On the
wire, these two frames have the number of bytes in place of the payload.

Only the form of network input is checked here. A missing or unknown variant or a number out of range raises
CorruptPayload. `flow/` decides whether the content makes sense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from google.protobuf.message import DecodeError

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.flow.frames import Frame
from noloco_p2p.gossip.frames import Hello, Refuse
from noloco_p2p.net import convert
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

PIECE_BYTES = 1 << 18  # a piece takes 0.1 s at 20 Mbit/s, so a more urgent frame can be delayed by that much


@dataclass(frozen=True, slots=True)
class FlowHello:
    """The first frame of a stream. `hello` has no layout, because each stage has a different one."""

    hello: Hello
    stage: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next PIECE_BYTES of the payload that the last Backward or Forward announced, or all that remain."""

    is_backward: bool
    payload: bytes | memoryview


WireFrame = FlowHello | Refuse | Piece | Frame
# The names of the frames in a FlowFrame, which a FlowHello shortens to "hello".
KINDS: dict[str, type] = {kind.__name__.lower().removeprefix("flow"): kind for kind in get_args(WireFrame)}


def encode(frame: WireFrame) -> bytes:
    return pb.FlowFrame(
        **{type(frame).__name__.lower().removeprefix("flow"): convert.to_wire(frame)}
    ).SerializeToString()


def decode(data: bytes) -> WireFrame:
    """Decode a frame. Raises CorruptPayload if `data` is not a frame of this protocol version."""
    try:
        message = pb.FlowFrame.FromString(data)
    except DecodeError:
        raise CorruptPayload("received a message that is not a valid pipeline frame") from None
    name = message.WhichOneof("frame")
    if name not in KINDS:
        raise CorruptPayload("received a frame of an unknown kind; the sender may use a newer protocol version")
    return convert.from_wire(KINDS[name], getattr(message, name))
