"""Defines the records in which peers announce themselves in the DHT. Each record is signed by its peer.

    value = signature:64 | canonical JSON       at most MAX_RECORD_BYTES

The signature covers a domain prefix and the JSON. The expiry is part of the JSON, so nobody can extend the lifetime of
a record whose peer has left. Unknown JSON fields are ignored. This module does not import hivemind; the validator,
which needs it, is in another file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from noloco_p2p import peer_name
from noloco_p2p._version import __version__
from noloco_p2p.errors import DirectoryError
from noloco_p2p.gossip.frames import PROTOCOL_VERSION
from noloco_p2p.identity import Identity, verify
from noloco_p2p.swarm.addresses import CIRCUIT, dialled_host, grpc_host, host_of, is_near, may_be_dialled
from noloco_p2p.swarm.buckets import MAX_DEPTH
from noloco_p2p.telemetry.metrics import DEFAULTS, LARGEST, METRICS, RECORDED, Metrics, is_text, rounded

TTL_S = 60.0
MAX_RECORD_BYTES = 1024
MAX_ADDRESSES = 4  # limit for each kind of address
MAX_ITEMS = 8  # in any list that is read
MAX_RELAYS = 2  # addresses through relays that are believed; each has the host of its relay
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
    addresses: tuple[str, ...] = ()  # gRPC HOST:PORT, most useful first; see `believable`
    multiaddrs: tuple[str, ...] = ()  # libp2p, each ending in /p2p/ and the id of this peer
    protocol_version: str = PROTOCOL_VERSION
    sequence: int = 0  # increases with every announcement, even across restarts
    expires_at_s: float = 0.0  # DHT time (Unix)
    state: str = "training"
    metrics: Metrics = field(default_factory=Metrics)  # those with a key are published
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

    @property
    def start(self) -> tuple[int, str]:
        """Return when its process was started. Of two processes with one key, the one with the greater value stays."""
        return self.started_at_ms, self.session_key


# The JSON names of the fields of a record and of its metrics.
KEYS = {
    "peer_id": "id",
    "run_name": "run",
    "spec_digest": "spec",
    "addresses": "grpc",
    "multiaddrs": "p2p",
    "protocol_version": "ver",
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
} | {name: METRICS[name].shown.key for name in RECORDED}
PLAIN: dict[str, Any] = {item.name: item.default for item in fields(PeerRecord) if item.name != "metrics"}
TYPES = {item.name: str(item.type) for item in (*fields(PeerRecord), *fields(Metrics))} | {"paused_by": "str"}


def encode_record(record: PeerRecord, identity: Identity) -> bytes:
    """Pack and sign a record.

    Metrics are rounded, and those that are not finite are left out. If the record is too large, fields are left out
    until it fits: first the least useful addresses, then `sends_to` and the name. Raises RecordError if it still does
    not fit.
    """
    if record.peer_id != identity.peer_id:
        raise RecordError(f"the record of {record.peer_id} cannot be signed by {identity.peer_id}")
    suffix = f"/p2p/{record.peer_id}"
    if not all(address.endswith(suffix) for address in record.multiaddrs):
        raise RecordError(f"a multiaddr in the record of {record.peer_id} does not end in {suffix}")
    record = replace(record, addresses=record.addresses[:MAX_ADDRESSES], multiaddrs=record.multiaddrs[:MAX_ADDRESSES])
    while len(body := _pack(record)) + SIGNATURE_BYTES > MAX_RECORD_BYTES:
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
    data = identity.sign(DOMAIN + body) + body
    decode_record(data)  # raises RecordError if other peers would refuse this record
    return data


def decode_record(data: bytes) -> PeerRecord:
    """Unpack a record and check all its fields. Raises RecordError if a check fails."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in open_envelope(data).items()
    }
    own = {name: values[key] for name in PLAIN if (key := KEYS.get(name, name)) in values}
    own["name"] = peer_name.shown(own.get("name"))
    if own.get("paused_by") not in PAUSED_BY:  # a newer sender may know other reasons
        own["paused_by"] = ""
    told = {name: values[KEYS[name]] for name in RECORDED if KEYS[name] in values}
    for name, value in told.items():
        _check_value(name, value)
    metrics = Metrics(**told)
    try:
        record = PeerRecord(**own, metrics=metrics)
    except TypeError:
        raise RecordError("the record does not contain the name of its run") from None
    _check(record)
    return replace(record, multiaddrs=tuple(f"{address}/p2p/{record.peer_id}" for address in record.multiaddrs))


def believable(record: PeerRecord, *, is_outside: bool, own: Sequence[str] = ()) -> PeerRecord:
    """Return the record without invalid addresses, and without direct addresses of any host but the first.

    If `is_outside` is true, private addresses are removed as well. `own` contains the gRPC addresses of this peer: the
    public one, then the private one. A peer that seems to be behind the same router keeps its private address: it has
    the same public host, and a private host in the same network.
    """
    addresses = [each for each in record.addresses if may_be_dialled(grpc_host(each), is_outside=is_outside)]
    ways = [each for each in record.multiaddrs if may_be_dialled(dialled_host(each), is_outside=is_outside)]
    direct = [each for each in ways if CIRCUIT not in each]
    relayed = [each for each in ways if CIRCUIT in each][:MAX_RELAYS]
    host = next(iter((*map(grpc_host, addresses), *map(dialled_host, direct))), "")
    near = ()
    if len(record.addresses) > 1 < len(own) and grpc_host(record.addresses[0]) == host_of(own[0]):
        near = record.addresses[1:2] if is_near(record.addresses[1], own[1]) else ()
    return replace(
        record,
        addresses=(*(each for each in addresses if grpc_host(each) == host), *near),
        multiaddrs=(*relayed, *(each for each in direct if dialled_host(each) == host)),
    )


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
    for name in ("peer_id", "expires_at_s", "spec_digest"):
        _check_value(name, values.get(KEYS[name]))
    peer_id = values["id"]
    if not verify(peer_id, DOMAIN + body, signature):
        raise RecordError(f"the record of {peer_id} is not signed by that peer")
    return values | {"exp": float(values["exp"])}


def _pack(record: PeerRecord) -> bytes:
    # Leave out empty values that are read as empty anyway, because addresses need the space.
    named = [(name, getattr(record, name), default) for name, default in PLAIN.items()]
    named += [(name, rounded(name, getattr(record.metrics, name)), DEFAULTS[name]) for name in RECORDED]
    values = {KEYS.get(name, name): value for name, value, default in named if value or value != default}
    if record.state == "training":
        del values["state"]
    suffix = f"/p2p/{record.peer_id}"  # all multiaddrs end in this suffix, which has 57 bytes
    values |= {"exp": record.expires_at_s, "p2p": [address.removesuffix(suffix) for address in record.multiaddrs]}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.encode()  # non-ASCII letters take two or three bytes each, and would take six if escaped


def _check(record: PeerRecord) -> None:
    for name in PLAIN:
        _check_value(name, getattr(record, name))
    if record.state not in STATES:
        raise RecordError(f"unknown state {record.state!r} in the record of {record.peer_id}")
    if any(depth > MAX_DEPTH for depth in record.depths):  # readers would look for buckets at this depth
        raise RecordError(f"a depth in the record of {record.peer_id} is greater than {MAX_DEPTH}")
    if not all(address.startswith("/") for address in record.multiaddrs):
        raise RecordError(f"a multiaddr in the record of {record.peer_id} does not begin with /")


def _check_value(name: str, value: object) -> None:
    kind = TYPES[name]
    what, fits = LIMITS[kind.removesuffix(" | None")]
    if not (fits(value) or (value is None and kind.endswith(" | None"))):
        raise RecordError(f"{name} in the record is not {what}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST  # excludes NaN


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 0


def _are(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and len(value) <= MAX_ITEMS and all(map(fits, value))


def _refuse_constant(name: str) -> float:
    raise RecordError(f"the record contains {name}")


LIMITS: dict[str, tuple[str, Callable[[object], bool]]] = {  # by the type of a field
    "str": ("a short printable string", is_text),
    "int": ("a valid count", _is_count),
    "float": ("a finite number of at most 2^53", _is_number),
    "tuple[str, ...]": ("a short list of short printable strings", _are(is_text)),
    "tuple[int, ...]": ("a short list of valid counts", _are(_is_count)),
}
