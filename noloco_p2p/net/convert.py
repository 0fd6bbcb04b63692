"""Convert frames to protobuf messages and back, with one table for each direction.

Only the form of network input is checked here. A missing or unknown variant, an unknown enum value or a number out of
range raises CorruptPayload. No message is larger than `options.MAX_MESSAGE_BYTES`. `gossip/` decides whether the
content makes sense, and compares every size and index with the one that it computes itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.gossip import frames
from noloco_p2p.gossip.units import Slice
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.transfer.kept_chunks import DIGEST_BYTES

MAX_TEXT = 1000  # characters of any name or sentence that another peer sends


def hello_to_wire(hello: frames.Hello) -> pb.Hello:
    return pb.Hello(
        protocol_version=hello.protocol_version,
        run_name=hello.run_name,
        spec_digest=hello.spec_digest,
        peer_id=hello.peer_id,
        layout=hello.layout,
    )


def hello_from_wire(message: pb.Hello) -> frames.Hello:
    return frames.Hello(
        peer_id=text(message.peer_id),
        run_name=text(message.run_name),
        spec_digest=text(message.spec_digest),
        protocol_version=text(message.protocol_version),
        layout=text(message.layout),
    )


def refuse_to_wire(refuse: frames.Refuse) -> pb.Refuse:
    return pb.Refuse(code=_enum(refuse.code), sentence=refuse.sentence, retry_after_s=refuse.retry_after_s)


def refuse_from_wire(message: pb.Refuse) -> frames.Refuse:
    retry_after_s = min(max(finite(message.retry_after_s), 0.0), 3600.0)
    return frames.Refuse(_known(frames.RefuseCode, message.code), text(message.sentence), retry_after_s)


def frame_to_wire(frame: frames.Frame) -> pb.Frame:
    name, to_wire = _TO_WIRE[type(frame)]
    return pb.Frame(**{name: to_wire(frame)})


def frame_from_wire(message: pb.Frame) -> frames.Frame:
    """Convert a message to a frame. Raises CorruptPayload if it is not a frame of this protocol version."""
    name = message.WhichOneof("frame")
    if name not in _FROM_WIRE:
        raise CorruptPayload("received a frame of an unknown kind; the sender may use a newer protocol version")
    return _FROM_WIRE[name](getattr(message, name))


def manifest_to_wire(manifest: frames.StateManifest, digests: tuple[bytes, ...]) -> pb.Manifest:
    return pb.Manifest(
        layout=manifest.layout,
        num_elements=manifest.num_elements,
        progress=manifest.progress,
        num_bytes=manifest.num_bytes,
        chunk_digests=digests,
    )


def manifest_from_wire(message: pb.Manifest) -> frames.StateManifest:
    """Convert a message to a manifest or a part of one.

    Raises CorruptPayload for a part without valid digests; otherwise, a peer could send empty parts forever.
    """
    digests = tuple(message.chunk_digests)
    if not digests or any(len(digest) != DIGEST_BYTES for digest in digests):
        raise CorruptPayload(f"received a manifest whose digests are missing or not {DIGEST_BYTES} bytes long")
    return frames.StateManifest(
        text(message.layout), message.num_elements, position(message.progress), message.num_bytes, digests
    )


def status_to_wire(status: frames.PeerStatus) -> pb.StatusReply:
    return pb.StatusReply(
        hello=hello_to_wire(status.hello),
        state=status.state,
        progress=status.progress,
        has_verified=status.has_verified,
    )


def status_from_wire(message: pb.StatusReply) -> frames.PeerStatus:
    return frames.PeerStatus(
        hello_from_wire(message.hello), text(message.state), position(message.progress), message.has_verified
    )


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


def _enum(value: int) -> Any:
    """Convert an enum value.

    Protobuf's stubs require their own enum types. A test verifies that ours have the same numbers.
    """
    return int(value)


def _known(enum: type, value: int) -> Any:
    try:
        return enum(value)
    except ValueError:
        raise CorruptPayload(
            f"received an unknown {enum.__name__} ({value}); the sender may use a newer protocol version"
        ) from None


def _standing_to_wire(standing: frames.Standing) -> pb.Standing:
    return pb.Standing(progress=standing.progress, step_s=standing.step_s, free_in_s=standing.free_in_s)


def _standing_from_wire(message: pb.Standing) -> frames.Standing:
    return frames.Standing(position(message.progress), finite(message.step_s), finite(message.free_in_s))


_TO_WIRE: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    frames.Offer: (
        "offer",
        lambda f: pb.Offer(
            hello=hello_to_wire(f.hello),
            swap_id=f.swap_id,
            standing=_standing_to_wire(f.standing),
            ages=f.ages,
            at_most=f.at_most,
        ),
    ),
    frames.Accept: (
        "accept",
        lambda f: pb.Accept(
            hello=hello_to_wire(f.hello),
            standing=_standing_to_wire(f.standing),
            slice=pb.Slice(first=f.part.first, count=f.part.count),
        ),
    ),
    frames.Refuse: ("refuse", refuse_to_wire),
    frames.Grid: ("grid", lambda f: pb.Grid(exponents=f.exponents)),
    frames.Header: (
        "header",
        lambda f: pb.Header(number=f.number, num_chunks=f.num_chunks, num_bytes=f.num_bytes, digest=f.digest),
    ),
    frames.Chunk: ("chunk", lambda f: pb.Chunk(index=f.index, payload=f.payload, digest=f.digest)),
    frames.Received: ("received", lambda f: pb.Received()),
    frames.Ready: ("ready", lambda f: pb.Ready()),
    frames.Alive: ("alive", lambda f: pb.Alive()),
    frames.Abort: ("abort", lambda f: pb.Abort(code=_enum(f.code), sentence=f.sentence)),
}

_FROM_WIRE: Mapping[str, Callable[[Any], frames.Frame]] = {
    "offer": lambda m: frames.Offer(
        hello_from_wire(m.hello), m.swap_id, _standing_from_wire(m.standing), m.ages, m.at_most
    ),
    "accept": lambda m: frames.Accept(
        hello_from_wire(m.hello), _standing_from_wire(m.standing), Slice(m.slice.first, m.slice.count)
    ),
    "refuse": refuse_from_wire,
    "grid": lambda m: frames.Grid(m.exponents),
    "header": lambda m: frames.Header(m.number, m.num_chunks, m.num_bytes, m.digest),
    "chunk": lambda m: frames.Chunk(m.index, m.payload, m.digest),
    "received": lambda m: frames.Received(),
    "ready": lambda m: frames.Ready(),
    "alive": lambda m: frames.Alive(),
    "abort": lambda m: frames.Abort(_known(frames.AbortCode, m.code), text(m.sentence)),
}
