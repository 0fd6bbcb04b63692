"""Convert frames to protobuf messages and back, with one table for each direction.

Only the form of network input is checked here. A missing or unknown variant, an unknown enum value or a number out of
range raises CorruptPayload. `gossip/` decides whether the content makes sense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.gossip import frames
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.transfer.kept_chunks import DIGEST_BYTES

MAX_TEXT = 1000  # characters of any name or sentence that another peer sends
MAX_ROUND = 2**53  # more rounds than any run has, and fewer than a counter in a message can hold


def hello_to_wire(hello: frames.Hello) -> pb.Hello:
    return pb.Hello(
        protocol_version=hello.protocol_version,
        run_name=hello.run_name,
        spec_digest=hello.spec_digest,
        peer_id=hello.peer_id,
        layout=hello.layout,
        features=hello.features,
    )


def hello_from_wire(message: pb.Hello) -> frames.Hello:
    return frames.Hello(
        peer_id=text(message.peer_id),
        run_name=text(message.run_name),
        spec_digest=text(message.spec_digest),
        protocol_version=text(message.protocol_version),
        layout=text(message.layout),
        features=tuple(text(feature) for feature in message.features[:64]),
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
        round=manifest.round,
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
    round_index, progress = run_position(message.round, message.progress)
    return frames.StateManifest(
        text(message.layout), message.num_elements, round_index, progress, message.num_bytes, digests
    )


def status_to_wire(status: frames.PeerStatus) -> pb.StatusReply:
    return pb.StatusReply(
        hello=hello_to_wire(status.hello),
        state=status.state,
        round=status.round,
        progress=status.progress,
        swap_known=status.swap.known,
        swap_verified=[_enum(part) for part in status.swap.verified],
        swap_committed=[_enum(part) for part in status.swap.committed],
    )


def status_from_wire(message: pb.StatusReply) -> frames.PeerStatus:
    swap = frames.SwapState(
        known=message.swap_known,
        verified=tuple(_known(frames.Part, part) for part in message.swap_verified[:8]),
        committed=tuple(_known(frames.Part, part) for part in message.swap_committed[:8]),
    )
    round_index, progress = run_position(message.round, message.progress)
    return frames.PeerStatus(hello_from_wire(message.hello), text(message.state), round_index, progress, swap)


def text(value: str) -> str:
    """Return text from another peer, cut to MAX_TEXT characters and without characters that could manipulate a
    terminal.
    """
    return "".join(char for char in value[:MAX_TEXT] if char.isprintable())


def finite(value: float) -> float:
    if not math.isfinite(value):
        raise CorruptPayload(f"received {value} instead of a finite number")
    return value


def run_position(round_index: int, progress: float) -> tuple[int, float]:
    """Return a peer's round and progress. Raises CorruptPayload if either is out of range, because newcomers adopt
    both.
    """
    if round_index > MAX_ROUND or not 0 <= progress < math.inf:
        raise CorruptPayload(f"round {round_index} at progress {progress:g} is not a valid position in a run")
    return round_index, progress


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


def _boundary_to_wire(boundary: frames.Boundary) -> pb.Boundary:
    return pb.Boundary(
        round=boundary.round,
        seconds_to_boundary=boundary.seconds_to_boundary,
        seconds_per_round=boundary.seconds_per_round,
        progress=boundary.progress,
        inner_steps=boundary.inner_steps or None,
        shortest_round_s=boundary.shortest_round_s,
    )


def _boundary_from_wire(message: pb.Boundary) -> frames.Boundary:
    to_boundary_s = finite(message.seconds_to_boundary) if message.HasField("seconds_to_boundary") else None
    per_round_s = finite(message.seconds_per_round) if message.HasField("seconds_per_round") else None
    shortest_s = finite(message.shortest_round_s) if message.HasField("shortest_round_s") else None
    round_index, progress = run_position(message.round, message.progress)
    return frames.Boundary(round_index, to_boundary_s, per_round_s, progress, message.inner_steps, shortest_s)


_TO_WIRE: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    frames.Offer: (
        "offer",
        lambda f: pb.Offer(hello=hello_to_wire(f.hello), swap_id=f.swap_id, boundary=_boundary_to_wire(f.boundary)),
    ),
    frames.Accept: (
        "accept",
        lambda f: pb.Accept(hello=hello_to_wire(f.hello), boundary=_boundary_to_wire(f.boundary)),
    ),
    frames.Refuse: ("refuse", refuse_to_wire),
    frames.Grid: ("grid", lambda f: pb.Grid(section=_enum(f.section), exponents=f.exponents)),
    frames.Header: (
        "header",
        lambda f: pb.Header(
            section=_enum(f.section),
            codec=f.codec,
            num_elements=f.num_elements,
            num_chunks=f.num_chunks,
            num_bytes=f.num_bytes,
        ),
    ),
    frames.Chunk: (
        "chunk",
        lambda f: pb.Chunk(section=_enum(f.section), index=f.index, payload=f.payload, digest=f.digest),
    ),
    frames.End: ("end", lambda f: pb.End(section=_enum(f.section), digest=f.digest)),
    frames.Ready: ("ready", lambda f: pb.Ready(part=_enum(f.part))),
    frames.Abort: ("abort", lambda f: pb.Abort(code=_enum(f.code), sentence=f.sentence)),
}

_FROM_WIRE: Mapping[str, Callable[[Any], frames.Frame]] = {
    "offer": lambda m: frames.Offer(hello_from_wire(m.hello), m.swap_id, _boundary_from_wire(m.boundary)),
    "accept": lambda m: frames.Accept(hello_from_wire(m.hello), _boundary_from_wire(m.boundary)),
    "refuse": refuse_from_wire,
    "grid": lambda m: frames.Grid(_known(frames.SectionName, m.section), m.exponents),
    "header": lambda m: frames.Header(
        _known(frames.SectionName, m.section), text(m.codec), m.num_elements, m.num_chunks, m.num_bytes
    ),
    "chunk": lambda m: frames.Chunk(_known(frames.SectionName, m.section), m.index, m.payload, m.digest),
    "end": lambda m: frames.End(_known(frames.SectionName, m.section), m.digest),
    "ready": lambda m: frames.Ready(_known(frames.Part, m.part)),
    "abort": lambda m: frames.Abort(_known(frames.AbortCode, m.code), text(m.sentence)),
}
