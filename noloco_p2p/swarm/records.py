"""Defines the records in which peers announce themselves in the DHT. Each record is signed by its peer.

    value = signature:64 | canonical JSON       at most MAX_RECORD_BYTES

The signature covers a domain prefix and the JSON. The expiry is part of the JSON, so nobody can extend the lifetime of
a record whose peer has left. Unknown JSON fields are ignored. This module does not import hivemind; the validator,
which needs it, is in another file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from noloco_p2p import peer_name
from noloco_p2p._version import __version__
from noloco_p2p.errors import DirectoryError
from noloco_p2p.gossip.frames import PROTOCOL_VERSION
from noloco_p2p.identity import Identity, verify
from noloco_p2p.swarm.buckets import MAX_DEPTH
from noloco_p2p.telemetry.metrics import DEFAULTS, FAILED, LARGEST, METRICS, RECORDED, Metrics

TTL_S = 60.0
MAX_RECORD_BYTES = 1024
MAX_TEXT_CHARS = 320  # enough for a host name of 253 characters, followed by a peer id
MAX_ADDRESSES = 4  # limit for each kind of address
MAX_COUNTS = 16  # maximum number of counts in a list
SIGNATURE_BYTES = 64
EXPIRY_SLACK_S = 1e-3  # allowed difference between the expiry in a record and the expiry in the DHT
DOMAIN = b"noloco_p2p record 1\x00"
STATES = frozenset({"training", "paused", "leaving", "done"})
# `asked` stands for `noloco pause`; the other reasons concern the use of the machine.
PausedBy = Literal["", "asked", "hours", "in use"]
PAUSED_BY = get_args(PausedBy)
SERVING = frozenset({"training", "done"})  # peers that compute for the other stages of a run


class RecordError(DirectoryError, ValueError):
    """A record is too large, malformed or not signed by its peer, or it has an impossible value."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """The state of one peer at one moment. The directory fills in `sequence`, `expires_at_s` and `multiaddrs`."""

    peer_id: str
    run_name: str
    spec_digest: str
    addresses: tuple[str, ...] = ()  # gRPC HOST:PORT, most useful first; see `address_filter.nearby`
    multiaddrs: tuple[str, ...] = ()  # libp2p, each ending in /p2p/ and the id of this peer
    protocol_version: str = PROTOCOL_VERSION
    sequence: int = 0  # increases with every announcement, even across restarts
    expires_at_s: float = 0.0  # DHT time (Unix)
    state: str = "training"
    metrics: Metrics = field(default_factory=Metrics)  # the encoded record holds the metrics that have a key
    reachability: str = "unknown"
    software: str = __version__
    depths: tuple[int, ...] = ()  # depth at which it reads, then other depths at which it is announced; () = (0,)
    session_key: str = ""  # identifies its gRPC server; base64; new at every start
    started_at_ms: int = 0  # Unix time by its own clock; distinguishes two processes with the same key
    mark: str = ""  # in a private run: proof that a member wrote the record
    stage: int = 0  # its stage in a run with stages; 0 = the head
    stages: int = 0  # the number of stages of the run; 0 = every peer holds the whole model
    sends_to: tuple[str, ...] = ()  # the short ids of the peers to which it sends microbatches
    name: str = ""  # chosen by the peer; it proves nothing
    paused_by: PausedBy = ""  # why it is paused


# The JSON names of the fields of a record and of its metrics.
KEYS = {
    "peer_id": "id",
    "run_name": "run",
    "spec_digest": "spec",
    "addresses": "grpc",
    "multiaddrs": "p2p",
    "protocol_version": "proto",
    "sequence": "seq",
    "expires_at_s": "exp",
    "reachability": "reach",
    "software": "sw",
    "depths": "at",
    "session_key": "key",
    "started_at_ms": "up",
    "stage": "st",
    "stages": "of",
    "sends_to": "to",
    "paused_by": "pause",
} | {name: METRICS[name].key for name in RECORDED}
FAILURES = [METRICS[name].key for name in FAILED]  # form a single list in the record
PLAIN: dict[str, Any] = {item.name: item.default for item in fields(PeerRecord) if item.name != "metrics"}
TYPES = {item.name: str(item.type) for item in (*fields(PeerRecord), *fields(Metrics)) if item.name != "metrics"}
TYPES["paused_by"] = "str"


def encode_record(record: PeerRecord, identity: Identity) -> bytes:
    """Pack and sign a record.

    If the record is too large, fields are left out until it fits: first the least useful addresses, then `sends_to`
    and the name. Raises RecordError if it still does not fit.
    """
    if record.peer_id != identity.peer_id:
        raise RecordError(f"the record of {record.peer_id} cannot be signed by {identity.peer_id}")
    record = replace(record, addresses=record.addresses[:MAX_ADDRESSES], multiaddrs=record.multiaddrs[:MAX_ADDRESSES])
    _check(record)
    body = _pack(record)
    while len(body) + SIGNATURE_BYTES > MAX_RECORD_BYTES:
        if len(record.multiaddrs) > 1:
            record = replace(record, multiaddrs=record.multiaddrs[:-1])
        elif len(record.addresses) > 1:
            record = replace(record, addresses=record.addresses[:-1])
        elif record.sends_to:
            record = replace(record, sends_to=())  # only used for display
        elif record.name:
            record = replace(record, name="")
        else:
            raise RecordError(
                f"the record has {len(body)} bytes, but the limit is {MAX_RECORD_BYTES - SIGNATURE_BYTES}; "
                f"use shorter host names"
            )
        body = _pack(record)
    return identity.sign(DOMAIN + body) + body


def decode_record(data: bytes) -> PeerRecord:
    """Check and unpack a record. Raises RecordError if `encode_record` could not have produced it."""
    values = open_envelope(data)
    # a newer sender may know other kinds of failures, which are ignored
    values = {**values, **dict(zip(FAILURES, _counts("why", values.get("why", [])), strict=False))}
    known: dict[str, Any] = {name: values[KEYS.get(name, name)] for name in PLAIN if KEYS.get(name, name) in values}
    for name in ("addresses", "multiaddrs", "sends_to"):
        known[name] = _texts(name, known.get(name, []))
    known["depths"] = _counts("depths", known.get("depths", []))
    known["name"] = peer_name.shown(known.get("name"))
    # a newer sender may know other reasons
    known["paused_by"] = known["paused_by"] if known.get("paused_by") in PAUSED_BY else ""
    known["metrics"] = Metrics(**{name: values[KEYS[name]] for name in RECORDED if KEYS[name] in values})
    try:
        record = PeerRecord(**known)
    except TypeError:
        raise RecordError("the record does not contain the name of its run") from None
    record = replace(record, multiaddrs=tuple(f"{address}/p2p/{record.peer_id}" for address in record.multiaddrs))
    _check(record)
    return record


@lru_cache(maxsize=4096)
def open_envelope(data: bytes) -> dict[str, Any]:
    """Return the fields of a record after checking its size, signature, id, run and expiry.

    Other fields are not checked. A check takes 0.1 ms, and a reader sees the same record in every answer, so results
    are cached. Callers must not change them. Raises RecordError if a check fails.
    """
    if not SIGNATURE_BYTES < len(data) <= MAX_RECORD_BYTES:
        raise RecordError(f"the record has {len(data)} bytes, but the limit is {MAX_RECORD_BYTES}")
    signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    try:
        values = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise RecordError("the record is not valid JSON") from None
    if not isinstance(values, dict):
        raise RecordError("the record is not a JSON object")
    peer_id, expires_at_s = _text("peer_id", values.get("id")), _number("expires_at_s", values.get("exp"))
    _text("spec_digest", values.get("spec"))
    if not verify(peer_id, DOMAIN + body, signature):
        raise RecordError(f"the record of {peer_id} is not signed by that peer")
    return values | {"exp": expires_at_s}


def _pack(record: PeerRecord) -> bytes:
    # Leave out empty values that are read as empty anyway, because addresses need the space.
    values = {KEYS.get(name, name): value for name, value, default in _named(record) if value or value != default}
    if record.state == "training":
        del values["state"]
    values["exp"] = record.expires_at_s
    if any(failures := [values.pop(key, 0) for key in FAILURES]):
        values["why"] = failures
    suffix = f"/p2p/{record.peer_id}"  # all multiaddrs end in this suffix, which has 57 bytes
    values["p2p"] = [address.removesuffix(suffix) for address in record.multiaddrs]
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.encode()  # non-ASCII letters take two or three bytes each, and would take six if escaped


def _named(record: PeerRecord) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, value and default of each field and each metric in the record."""
    for name, default in PLAIN.items():
        yield name, getattr(record, name), default
    for name in RECORDED:
        yield name, getattr(record.metrics, name), DEFAULTS[name]


def _check(record: PeerRecord) -> None:
    for name, value, _ in _named(record):
        _CHECKS[TYPES[name]](name, value)
    if record.state not in STATES:
        raise RecordError(f"unknown state {record.state!r} in the record of {record.peer_id}")
    if any(depth > MAX_DEPTH for depth in record.depths):  # readers would look for buckets at this depth
        raise RecordError(f"a depth in the record of {record.peer_id} is greater than {MAX_DEPTH}")
    suffix = f"/p2p/{record.peer_id}"
    if not all(address.startswith("/") and address.endswith(suffix) for address in record.multiaddrs):
        raise RecordError(f"a multiaddr in the record of {record.peer_id} does not end in {suffix}")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS or not value.isprintable():
        raise RecordError(f"{name} in the record is not a short printable string")  # it is printed to terminals
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > 2 * MAX_ADDRESSES:
        raise RecordError(f"{name} in the record is not a short list")
    return tuple(_text(name, item) for item in value)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise RecordError(f"{name} in the record is not a valid count")
    return value


def _counts(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_COUNTS:
        raise RecordError(f"{name} in the record is not a short list")
    return tuple(_count(name, item) for item in value)


def _maybe_count(name: str, value: object) -> int | None:
    return None if value is None else _count(name, value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RecordError(f"{name} in the record is not a number")
    if not abs(value) <= LARGEST:  # this also excludes NaN
        raise RecordError(f"{name} in the record is non-finite or larger than 2^53")
    return float(value)


def _maybe_number(name: str, value: object) -> float | None:
    return None if value is None else _number(name, value)


def _refuse_constant(name: str) -> float:
    raise RecordError(f"the record contains {name}")


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "str": _text,
    "tuple[str, ...]": _texts,
    "tuple[int, ...]": _counts,
    "int": _count,
    "int | None": _maybe_count,
    "float": _number,
    "float | None": _maybe_number,
}
