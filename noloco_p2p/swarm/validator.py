"""The rule that every DHT node applies to a record it is asked to store, and to every record it is given.

This file imports hivemind (seconds, 290 MB): only `node.py` imports it, and only when a node starts.
"""

from __future__ import annotations

from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID

from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.records import MAX_RECORD_BYTES, TTL_S, RecordError, bucket_key, open_envelope

EXPIRY_SLACK_S = 1e-3


class RecordValidator(RecordValidatorBase):
    """Accepts what a peer signed about itself, under the key of the run it names, until the moment it names.

    Only the envelope is looked at: a field that a newer version adds must not make older nodes drop the record, for
    hivemind drops the whole answer in which one record fails.
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
        and record.key == DHTID.generate(bucket_key(values["spec"])).to_bytes()
        and abs(values["exp"] - record.expiration_time) <= EXPIRY_SLACK_S
        and 0 < remaining_s <= 2 * TTL_S
    )


def _unpack(packed: bytes) -> bytes:
    """The bytes inside a MessagePack bin 8 or bin 16: all that may be stored, so no general parser is let near it."""
    if len(packed) > MAX_RECORD_BYTES + 3:
        raise RecordError(f"a record of {len(packed)} bytes")
    header = {b"\xc4": 2, b"\xc5": 3}.get(packed[:1])
    if header is None or int.from_bytes(packed[1:header], "big") != len(packed) - header:
        raise RecordError("a record is not packed as bytes")
    return packed[header:]
