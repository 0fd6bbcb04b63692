"""Convert frames to protobuf messages and back.

A field of a message has the same name as the field of the dataclass in `gossip/frames.py` or `flow/frames.py`. Only the
form of network input is checked here. A missing or unknown variant, an unknown enum value or a number out of range
raises CorruptPayload. No message is larger than `options.MAX_MESSAGE_BYTES`. `gossip/` decides whether the content
makes sense, and compares every size and index with the one that it computes itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.flow.limits import MAX_SINKS
from noloco_p2p.gossip import frames
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.transfer.fetch import DIGEST_BYTES

T = TypeVar("T")

MAX_TEXT = 1000  # characters of any name or sentence that another peer sends
LONGEST_RETRY_S = 3600.0
MAX_NUMBER = 2**63 - 1  # the largest number that a microbatch can have
SIGNATURE_BYTES = 64  # of a ticket
# Tags: field number << 3 | 2 for length-delimited; see peer.proto.
FRAME_CHUNK, CHUNK_PAYLOAD = 0x32, 0x0A

MESSAGES: dict[type, str] = {
    frames.PeerStatus: "StatusReply",
    frames.StateManifest: "Manifest",
    frames.WantSpec: "SpecRequest",
    frames.WantManifest: "ManifestRequest",
    frames.WantLayout: "LayoutRequest",
    frames.WantChunks: "ChunksRequest",
}  # where the name of a message is not the name of its dataclass
KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(frames.Frame)}
WANTS: dict[str, type] = {
    "spec": frames.WantSpec,
    "manifest": frames.WantManifest,
    "layout": frames.WantLayout,
    "chunks": frames.WantChunks,
}


def to_wire(value: Any) -> Any:
    """Convert a frame, or a part of one, to its message."""
    made = vars(pb)[MESSAGES.get(type(value), type(value).__name__)]
    return made(**{name: _plain(getattr(value, name)) for name, _ in _fields_of(type(value))})


def from_wire(kind: type[T], message: Message) -> T:
    """Convert a message to a frame, or to a part of one. Raises CorruptPayload."""
    return kind(*[_read(name, what, getattr(message, name)) for name, what in _fields_of(kind)])


def encode(frame: frames.Frame, *, sequence: int) -> bytes:
    """Return the bytes of the `Frame` message with a frame and its number.

    Nearly all bytes of a swap are payloads of chunks. protobuf needs 1 to 2 ms to encode a payload of 1 MiB. Here, it
    is copied once, and appended to what protobuf has encoded.
    """
    number = pb.Frame(sequence=sequence).SerializeToString()
    if not isinstance(frame, frames.Chunk):
        return pb.Frame(**{type(frame).__name__.lower(): to_wire(frame)}).SerializeToString() + number
    head = _tagged(CHUNK_PAYLOAD, len(frame.payload))
    return b"".join((_tagged(FRAME_CHUNK, len(head) + len(frame.payload)), head, frame.payload, number))


def decode(data: bytes) -> tuple[frames.Frame, int]:
    """Return a frame and its number.

    Raises CorruptPayload if `data` is not a frame of this protocol version.
    """
    try:
        message = pb.Frame.FromString(data)
    except DecodeError:
        raise CorruptPayload("received a message that is not a valid frame") from None
    name = message.WhichOneof("frame")
    if name not in KINDS:
        raise CorruptPayload("received a frame of an unknown kind; the sender may use a newer protocol version")
    return from_wire(KINDS[name], getattr(message, name)), message.sequence


def want_to_wire(want: frames.FetchWant, hello: frames.Hello) -> pb.FetchRequest:
    name = next(name for name, kind in WANTS.items() if isinstance(want, kind))
    return pb.FetchRequest(hello=to_wire(hello), **{name: to_wire(want)})


def want_from_wire(request: pb.FetchRequest) -> frames.FetchWant:
    """Raises CorruptPayload if the request is of an unknown kind, or names too many chunks."""
    name = request.WhichOneof("what")
    if name is None:
        raise CorruptPayload("received a request of an unknown kind; the caller may use a newer protocol version")
    if len(request.chunks.indices) > frames.MAX_CHUNKS_PER_REQUEST:
        raise CorruptPayload(f"at most {frames.MAX_CHUNKS_PER_REQUEST} chunks can be requested at once")
    return from_wire(WANTS[name], getattr(request, name))


def manifest_from_wire(message: pb.Manifest) -> frames.StateManifest:
    """Convert a message to a manifest or a part of one.

    Raises CorruptPayload for a part without valid digests; otherwise, a peer could send empty parts forever.
    """
    if not message.chunk_digests or any(len(digest) != DIGEST_BYTES for digest in message.chunk_digests):
        raise CorruptPayload(f"received a manifest whose digests are missing or not {DIGEST_BYTES} bytes long")
    return from_wire(frames.StateManifest, message)


def text(value: str) -> str:
    """Return text from another peer, cut to MAX_TEXT characters and without characters that could manipulate a
    terminal.
    """
    return "".join(char for char in value[:MAX_TEXT] if char.isprintable())


def finite(value: float) -> float:
    if not math.isfinite(value):
        raise CorruptPayload(f"received {value} instead of a finite number")
    return value


def position(progress: float) -> float:
    """Return a peer's progress. Raises CorruptPayload if it is out of range, because newcomers adopt it."""
    if not 0 <= progress < math.inf:
        raise CorruptPayload(f"progress {progress:g} is not a valid position in a run")
    return progress


def _signature(value: bytes) -> bytes:
    if len(value) != SIGNATURE_BYTES:
        raise CorruptPayload(f"received a ticket whose signature is not {SIGNATURE_BYTES} bytes long")
    return value


def _number(value: int) -> int:
    if value > MAX_NUMBER:
        raise CorruptPayload(f"number {value} is too large")
    return value


def _sinks(value: Any) -> tuple[str, ...]:
    if len(value) > MAX_SINKS:
        raise CorruptPayload(f"received a Want with more than {MAX_SINKS} sinks")
    return tuple(map(text, value))


CHECKS: dict[object, Callable[[Any], Any]] = {  # by the name of a field, or by its type
    "progress": position,
    "retry_after_s": lambda value: min(max(finite(value), 0.0), LONGEST_RETRY_S),
    "remaining_s": lambda value: max(0.0, finite(value)),
    "signature": _signature,
    "number": _number,
    "sinks": _sinks,
    str: text,
    float: finite,
}


@cache
def _fields_of(kind: type) -> list[tuple[str, Any]]:
    """Return the name and the type of each field of a dataclass or a named tuple."""
    return list(get_type_hints(kind).items())


def _read(name: str, kind: Any, value: Any) -> Any:
    """Return the value of a field of a message, as its dataclass holds it."""
    if check := CHECKS.get(name) or CHECKS.get(kind):
        return check(value)
    if get_origin(kind) is tuple:
        return tuple(value)
    if isinstance(value, Message):
        return from_wire(kind, value)
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        try:
            return kind(value)
        except ValueError:
            what = f"received an unknown {kind.__name__} ({value})"
            raise CorruptPayload(f"{what}; the sender may use a newer protocol version") from None
    return value


def _plain(value: Any) -> Any:
    """Return a value as protobuf takes it. A test verifies that its enums have the same numbers as ours."""
    if is_dataclass(value) or hasattr(value, "_fields"):
        return to_wire(value)
    return int(value) if isinstance(value, IntEnum) else bytes(value) if isinstance(value, memoryview) else value


def _tagged(tag: int, value: int) -> bytes:
    """Encode a tag and a varint."""
    out = bytearray((tag,))
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
