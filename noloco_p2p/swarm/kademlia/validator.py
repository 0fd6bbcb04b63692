"""Validates the records that a DHT node is asked to store, and the records that it receives in answers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID

from noloco_p2p.invitation import is_marked
from noloco_p2p.swarm.buckets import MAX_DEPTH, bucket_of, run_key
from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.records import EXPIRY_SLACK_S, MAX_RECORD_BYTES, TTL_S, RecordError, open_envelope


class RecordValidator(RecordValidatorBase):
    """Accepts a record if it is signed by its peer, has the key of one of that peer's buckets, and has not expired.

    In a private run, the record must also contain proof that a member wrote it. Only the envelope is checked, so that
    older nodes accept records with new fields. This matters because hivemind drops a whole answer if one of its records
    is invalid.
    """

    def validate(self, record: DHTRecord) -> bool:
        try:
            return _is_valid(record)
        except RecordError:
            return False


def _is_valid(record: DHTRecord) -> bool:
    values = open_envelope(_unpack(record.value))
    remaining_s = record.expiration_time - CLOCK.now()
    return (
        record.subkey == DHTProtocol.serializer.dumps(values["id"])
        and record.key in _keys_of(values["id"], values["spec"])
        and abs(values["exp"] - record.expiration_time) <= EXPIRY_SLACK_S
        and 0 < remaining_s <= 2 * TTL_S
        and is_marked(values["spec"], values["id"], _mark(values))
    )


def _mark(values: dict[str, Any]) -> str:
    mark = values.get("mark", "")
    return mark if isinstance(mark, str) else ""


@lru_cache(maxsize=4096)
def _keys_of(peer_id: str, spec_digest: str) -> frozenset[bytes]:
    """Return the keys under which a peer may announce itself, which are the keys of its bucket at every depth."""
    keys = (bucket_of(peer_id, depth).key(run_key(spec_digest)) for depth in range(MAX_DEPTH + 1))
    return frozenset(DHTID.generate(key).to_bytes() for key in keys)


def peer_of(packed: bytes) -> str | None:
    """Return the peer id in a packed subkey, or None if it is not a MessagePack str 8 with the length of a peer id."""
    if not 34 <= len(packed) <= 66 or packed[0] != 0xD9 or packed[1] != len(packed) - 2 or not packed[2:].isascii():
        return None
    return packed[2:].decode()


def _unpack(packed: bytes) -> bytes:
    """Return the bytes inside a MessagePack bin 8 or bin 16.

    Only these two types can be stored, so strangers' bytes never reach a general parser. Raises RecordError for any
    other type.
    """
    if len(packed) > MAX_RECORD_BYTES + 3:
        raise RecordError(f"the record has {len(packed)} bytes, but the limit is {MAX_RECORD_BYTES + 3}")
    header = {b"\xc4": 2, b"\xc5": 3}.get(packed[:1])
    if header is None or int.from_bytes(packed[1:header], "big") != len(packed) - header:
        raise RecordError("the record is not packed as MessagePack bytes")
    return packed[header:]
