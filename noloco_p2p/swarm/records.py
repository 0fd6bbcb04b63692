"""What a peer tells the swarm about itself: a small record, signed with its key.

    value = signature:64 | canonical JSON       at most MAX_RECORD_BYTES

The signature covers a domain prefix and the JSON. The moment of expiry is inside, so nobody can prolong the record of
a peer that is gone. Unknown JSON fields are ignored. Imports no hivemind: the validator has its own file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from noloco_p2p._version import __version__
from noloco_p2p.errors import DirectoryError
from noloco_p2p.gossip.frames import PROTOCOL_VERSION
from noloco_p2p.identity import Identity, verify
from noloco_p2p.swarm.buckets import MAX_DEPTH

TTL_S = 60.0
MAX_RECORD_BYTES = 1024
MAX_TEXT_CHARS = 320  # a host name of 253, and a peer id after it
MAX_ADDRESSES = 4  # of each kind
LARGEST = 2.0**53  # of any number: whole numbers are exact so far in a page, too, and sums of them are finite
MAX_CAUSES = 16  # of lonely rounds; a newer peer may know more than this one
SIGNATURE_BYTES = 64
EXPIRY_SLACK_S = 1e-3  # between what a record says and what the DHT was told
DOMAIN = b"noloco_p2p record 1\x00"
STATES = frozenset({"training", "paused", "leaving", "done"})
SERVING = frozenset({"training", "done"})  # who computes for the other stages of a run


class RecordError(DirectoryError, ValueError):
    """A record is oversize, malformed, not signed by its peer, or holds a value that cannot be."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """One peer at one moment. `sequence`, `expires_at_s` and `multiaddrs` are filled in by the directory."""

    peer_id: str
    run_name: str
    spec_digest: str
    addresses: tuple[str, ...] = ()  # gRPC HOST:PORT, most useful first
    multiaddrs: tuple[str, ...] = ()  # libp2p, each ending in /p2p/PEER_ID of this peer
    protocol_version: str = PROTOCOL_VERSION
    sequence: int = 0  # rises with every announcement, over restarts too
    expires_at_s: float = 0.0  # DHT time (Unix)
    state: str = "training"
    progress: float = 0.0  # fraction of the run's schedule
    round: int = 0
    swaps: int = 0
    alone: int = 0
    inner_steps_per_s: float = 0.0
    tokens_per_s: float = 0.0
    loss: float | None = None
    last_partner: str = ""
    reachability: str = "unknown"
    bytes_sent: int = 0
    bytes_received: int = 0
    software: str = __version__
    halves: int = 0
    late: int = 0
    lonely: tuple[int, ...] = ()  # rounds alone by cause, in the order of `gossip.outcome.LonelyCause`
    validation_loss: float | None = None
    blocked_s: float = 0.0
    sketch: str = ""  # of the slow weights at a mark of the schedule, `codec.sketch`
    depths: tuple[int, ...] = ()  # of its buckets, `swarm.buckets`: where it reads, then where else it is; () = (0,)
    session_key: str = ""  # by which its gRPC server is known, base64; a new one at every start
    started_at_ms: int = 0  # Unix, by its own clock: tells two starts of one key apart
    mark: str = ""  # of a private run: that an invited peer wrote it
    stage: int = 0  # in a run with stages; 0 = the head
    stages: int = 0  # of the run; 0 = every peer holds the whole model
    capacity: float = 0.0  # tokens/s that its stage can compute
    queue: int = 0  # microbatches that it holds now
    microbatches: int = 0  # whose gradients it has counted
    lost_microbatches: int = 0
    late_microbatches: int = 0  # counted in a later inner step than their forward pass
    sends_to: tuple[str, ...] = ()  # ends of the ids of those that it sends microbatches to


KEYS = {
    "peer_id": "id",
    "run_name": "run",
    "spec_digest": "spec",
    "addresses": "grpc",
    "multiaddrs": "p2p",
    "protocol_version": "proto",
    "sequence": "seq",
    "expires_at_s": "exp",
    "progress": "prog",
    "inner_steps_per_s": "steps/s",
    "tokens_per_s": "tok/s",
    "last_partner": "with",
    "reachability": "reach",
    "bytes_sent": "out",
    "bytes_received": "in",
    "software": "sw",
    "halves": "half",
    "lonely": "why",
    "validation_loss": "val",
    "blocked_s": "wait",
    "depths": "at",
    "session_key": "key",
    "started_at_ms": "up",
    "stage": "st",
    "stages": "of",
    "capacity": "cap",
    "queue": "q",
    "microbatches": "mb",
    "lost_microbatches": "mbx",
    "late_microbatches": "mbl",
    "sends_to": "to",
}


def tellable(value: float | None) -> float | None:
    """None for what a record cannot tell: a peer that diverges goes on speaking."""
    return value if value is not None and abs(value) <= LARGEST else None


def encode_record(record: PeerRecord, identity: Identity) -> bytes:
    """Sign and pack. Until it fits, the least useful addresses are dropped, then `sends_to`, and at last the sketch.

    Raises RecordError when even that fails.
    """
    if record.peer_id != identity.peer_id:
        raise RecordError(f"a record of {record.peer_id} cannot be signed by {identity.peer_id}")
    record = replace(record, addresses=record.addresses[:MAX_ADDRESSES], multiaddrs=record.multiaddrs[:MAX_ADDRESSES])
    _check(record)
    body = _pack(record)
    while len(body) + SIGNATURE_BYTES > MAX_RECORD_BYTES:
        if len(record.multiaddrs) > 1:
            record = replace(record, multiaddrs=record.multiaddrs[:-1])
        elif len(record.addresses) > 1:
            record = replace(record, addresses=record.addresses[:-1])
        elif record.sends_to:
            record = replace(record, sends_to=())  # it is only drawn
        elif record.sketch:
            record = replace(record, sketch="")  # to be reached is worth more than to be measured
        else:
            raise RecordError(
                f"the record has {len(body)} bytes, over {MAX_RECORD_BYTES - SIGNATURE_BYTES}: shorten the host names"
            )
        body = _pack(record)
    return identity.sign(DOMAIN + body) + body


def decode_record(data: bytes) -> PeerRecord:
    """Check and unpack. Raises RecordError for anything that `encode_record` could not have made."""
    values = open_envelope(data)
    known = {f.name: values[KEYS.get(f.name, f.name)] for f in fields(PeerRecord) if KEYS.get(f.name, f.name) in values}
    for name in ("addresses", "multiaddrs", "sends_to"):
        known[name] = _texts(name, known.get(name, []))
    for name in ("lonely", "depths"):
        known[name] = _counts(name, known.get(name, []))
    try:
        record = PeerRecord(**known)
    except TypeError:
        raise RecordError("a record lacks the name of its run") from None
    record = replace(record, multiaddrs=tuple(f"{address}/p2p/{record.peer_id}" for address in record.multiaddrs))
    _check(record)
    return record


@lru_cache(maxsize=4096)
def open_envelope(data: bytes) -> dict[str, Any]:
    """The fields of a record whose size and signature are right, with id, run and expiry checked; the rest is not.

    Cached: a reader sees the same record in every answer, and a check costs 0.1 ms. The answer must not be changed.
    """
    if not SIGNATURE_BYTES < len(data) <= MAX_RECORD_BYTES:
        raise RecordError(f"a record of {len(data)} bytes; the limit is {MAX_RECORD_BYTES}")
    signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    try:
        values = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise RecordError("a record is not JSON") from None
    if not isinstance(values, dict):
        raise RecordError("a record is not a JSON object")
    peer_id, expires_at_s = _text("peer_id", values.get("id")), _number("expires_at_s", values.get("exp"))
    _text("spec_digest", values.get("spec"))
    if not verify(peer_id, DOMAIN + body, signature):
        raise RecordError(f"a record of {peer_id} is not signed by it")
    return values | {"exp": expires_at_s}


def _pack(record: PeerRecord) -> bytes:
    named = {f: getattr(record, f.name) for f in fields(record)}
    # What is empty and would be read as empty stays out: addresses and a sketch need the room.
    values = {KEYS.get(f.name, f.name): value for f, value in named.items() if value or value != f.default}
    if record.state == "training":
        del values["state"]
    values["exp"] = record.expires_at_s
    suffix = f"/p2p/{record.peer_id}"  # the same for all of them, and 57 bytes each
    values["p2p"] = [address.removesuffix(suffix) for address in record.multiaddrs]
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _check(record: PeerRecord) -> None:
    for field in fields(record):
        _CHECKS[str(field.type)](field.name, getattr(record, field.name))
    if record.state not in STATES:
        raise RecordError(f"unknown state {record.state!r} in the record of {record.peer_id}")
    if any(depth > MAX_DEPTH for depth in record.depths):  # a reader looks there
        raise RecordError(f"a depth in the record of {record.peer_id} is over {MAX_DEPTH}")
    suffix = f"/p2p/{record.peer_id}"
    if not all(address.startswith("/") and address.endswith(suffix) for address in record.multiaddrs):
        raise RecordError(f"a multiaddr in the record of {record.peer_id} does not end in {suffix}")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS or not value.isprintable():
        raise RecordError(f"{name} in a record is not a short printable text")  # it is shown in terminals
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > 2 * MAX_ADDRESSES:
        raise RecordError(f"{name} in a record is not a short list")
    return tuple(_text(name, item) for item in value)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise RecordError(f"{name} in a record is not a count")
    return value


def _counts(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_CAUSES:
        raise RecordError(f"{name} in a record is not a short list")
    return tuple(_count(name, item) for item in value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RecordError(f"{name} in a record is not a number")
    if not abs(value) <= LARGEST:  # nor is it NaN
        raise RecordError(f"{name} in a record is not finite, or over 2^53")
    return float(value)


def _maybe_number(name: str, value: object) -> float | None:
    return None if value is None else _number(name, value)


def _refuse_constant(name: str) -> float:
    raise RecordError(f"{name} in a record")


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "str": _text,
    "tuple[str, ...]": _texts,
    "tuple[int, ...]": _counts,
    "int": _count,
    "float": _number,
    "float | None": _maybe_number,
}
