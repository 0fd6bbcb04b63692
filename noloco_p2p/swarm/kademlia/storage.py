"""Checks and stores the records of other peers on a DHT node, and packs them for answers.

hivemind's own storage has a flaw. If an older record of a peer is stored again, hivemind keeps the newer record, but
with the expiry of the older one. Anybody could therefore make a peer vanish by replaying an old record. In addition,
hivemind does not limit the number of records per peer, and its reader of answers constructs any object that another
node has packed.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgpack
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from noloco_p2p.invitation import is_marked
from noloco_p2p.swarm.buckets import MAX_DEPTH, bucket_of, run_key
from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.records import EXPIRY_SLACK_S, MAX_RECORD_BYTES, TTL_S, RecordError, open_envelope

# A peer is announced under up to 8 keys: in each of two views, at two adjacent depths, the previous depth and the base.
MAX_RECORDS_OF_ONE = 8
MAX_RECORDS_PER_KEY = 256  # far more than the 48 records above which a bucket is split
MAX_RECORDS = 10_000
SWEEP_EVERY_S = 1.0
ENTRY_BYTES = 80  # the size of the peer id and the expiry that accompany each record in an answer

PACKED_RECORD_BYTES = MAX_RECORD_BYTES + 3
DICTIONARY = 0x50  # hivemind's MessagePack code for a dictionary
ENTRIES = 3  # elements of a packed dictionary; the last one is the list of its entries
MAX_PEER_ID_CHARS = 64

Record = ValueWithExpiration[bytes]


class RecordValidator(RecordValidatorBase):
    """Accepts a record if it is signed by its peer, has the key of one of that peer's buckets, and has not expired.

    In a private run, the record must also contain proof that a member wrote it. Only the envelope is checked, so that
    older nodes accept records with new fields. This matters because hivemind drops a whole answer if one of its records
    is invalid.
    """

    def validate(self, record: DHTRecord) -> bool:
        try:
            values = open_envelope(unpacked(record.value))
        except RecordError:
            return False
        remaining_s = record.expiration_time - CLOCK.now()
        return (
            record.subkey == DHTProtocol.serializer.dumps(values["id"])
            and record.key in _keys_of(values["id"], values["spec"])
            and abs(values["exp"] - record.expiration_time) <= EXPIRY_SLACK_S
            and 0 < remaining_s <= 2 * TTL_S
            and is_marked(values["spec"], values["id"], str(values.get("mark", "")))
        )


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


def unpacked(packed: bytes) -> bytes:
    """Return the bytes inside a MessagePack bin 8 or bin 16.

    Only these two types can be stored, so strangers' bytes never reach a general parser. Raises RecordError for any
    other type.
    """
    if len(packed) > PACKED_RECORD_BYTES:
        raise RecordError(f"the record has {len(packed)} bytes, but the limit is {PACKED_RECORD_BYTES}")
    header = {b"\xc4": 2, b"\xc5": 3}.get(packed[:1])
    if header is None or int.from_bytes(packed[1:header], "big") != len(packed) - header:
        raise RecordError("the record is not packed as MessagePack bytes")
    return packed[header:]


class RecordStorage(DHTLocalStorage):
    """The stored records, by key and peer id. The validator has already checked their signatures.

    Records are removed when they have expired. If a peer stores more than MAX_RECORDS_OF_ONE records, its record that
    expires first is removed as well. No other records are removed. If a key or the whole storage is full, stored
    records can still be renewed, but records of new peers are refused.
    """

    def __init__(self, *, max_records: int = MAX_RECORDS) -> None:
        super().__init__()
        self._max_records = max_records
        self._kept: dict[DHTID, dict[str, Record]] = {}
        self._keys_of: defaultdict[str, set[DHTID]] = defaultdict(set)
        self._num_records = 0  # includes expired ones until the next sweep
        self._swept_at_s = 0.0

    def __len__(self) -> int:
        return self._num_records

    def refusal(self, key: DHTID, peer_id: str, expires_at_s: float) -> str:
        """Return why this node would refuse to store such a record, or an empty string if it would store it."""
        self._sweep()
        kept = self._kept.get(key, {})
        if known := kept.get(peer_id):
            return "" if known.expiration_time < expires_at_s else "the record already stored is at least as new"
        if len(kept) >= MAX_RECORDS_PER_KEY:
            return f"this node already stores the maximum of {MAX_RECORDS_PER_KEY} records for this key"
        if len(self._keys_of.get(peer_id, ())) >= MAX_RECORDS_OF_ONE:
            return ""  # because an older record of the same peer is removed
        is_full = self._num_records >= self._max_records
        return f"this node already stores the maximum of {self._max_records} records" if is_full else ""

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Store a record. Returns False if the record is refused; `refusal` returns the reason."""
        if not isinstance(subkey, str) or self.refusal(key, subkey, expiration_time):
            return False
        if subkey not in self._kept.get(key, {}):
            self._make_room_of(subkey)
            self._keys_of[subkey].add(key)
            self._num_records += 1
        self._kept.setdefault(key, {})[subkey] = ValueWithExpiration(value, expiration_time)
        return True

    def store(self, key: Any, value: bytes, expiration_time: float, subkey: Any = None) -> bool:
        """Store a record. Returns False for a value without a subkey, because it belongs to no peer."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def get(self, key: Any) -> ValueWithExpiration[Any] | None:
        """Return all unexpired records of a key in a new dictionary, or None if there are none."""
        dictionary = DictionaryDHTValue()
        for peer_id, record in self._live(key):
            dictionary.store(peer_id, record.value, record.expiration_time)
        return ValueWithExpiration(dictionary, dictionary.latest_expiration_time) if dictionary.data else None

    def some(self, key: DHTID, *, most_bytes: int) -> list[tuple[str, Record]]:
        """Return the (peer id, record) pairs of the unexpired records of a key.

        If they need more than `most_bytes` in an answer, a random selection that fits is returned.
        """
        live = self._live(key)
        if sum(len(record.value) + ENTRY_BYTES for _, record in live) <= most_bytes:
            return live
        chosen: list[tuple[str, Record]] = []
        for peer_id, record in random.sample(live, len(live)):
            most_bytes -= len(record.value) + ENTRY_BYTES
            if most_bytes < 0:
                break
            chosen.append((peer_id, record))
        return chosen

    def _live(self, key: DHTID) -> list[tuple[str, Record]]:
        now_s = CLOCK.now()
        return [entry for entry in self._kept.get(key, {}).items() if entry[1].expiration_time > now_s]

    def _make_room_of(self, peer_id: str) -> None:
        while len(keys := self._keys_of[peer_id]) >= MAX_RECORDS_OF_ONE:
            self._forget(min(keys, key=lambda key: self._kept[key][peer_id].expiration_time), peer_id)

    def _sweep(self) -> None:
        """Remove expired records, at most once every SWEEP_EVERY_S."""
        if time.monotonic() - self._swept_at_s < SWEEP_EVERY_S:
            return
        self._swept_at_s, now_s = time.monotonic(), CLOCK.now()
        ended = [(k, p) for k, kept in self._kept.items() for p, r in kept.items() if r.expiration_time <= now_s]
        for key, peer_id in ended:
            self._forget(key, peer_id)

    def _forget(self, key: DHTID, peer_id: str) -> None:
        self._num_records -= 1
        del self._kept[key][peer_id]
        if not self._kept[key]:
            del self._kept[key]
        self._keys_of[peer_id].discard(key)
        if not self._keys_of[peer_id]:
            del self._keys_of[peer_id]


def pack_records(records: Sequence[tuple[str, ValueWithExpiration[bytes]]]) -> tuple[bytes, float]:
    """Pack records in hivemind's format for dictionaries. Returns the bytes and the latest expiry."""
    entries = [[peer_id, record.value, record.expiration_time] for peer_id, record in records]
    last_s = max(record.expiration_time for _, record in records)
    return MSGPackSerializer.dumps(
        msgpack.ExtType(DICTIONARY, MSGPackSerializer.dumps([math.inf, last_s, entries]))
    ), last_s


def told_records(packed: bytes) -> Iterator[tuple[str, bytes, float]]:
    """Yield the (peer id, packed record, expiry) entries of a dictionary that another node has packed.

    hivemind's own reader has no limits: it constructs any object that a MessagePack of this length can hold. Raises
    ValueError if the bytes are not a dictionary of records.
    """
    outer = msgpack.unpackb(packed)
    if not isinstance(outer, msgpack.ExtType) or outer.code != DICTIONARY:
        raise ValueError("the answer is not a dictionary")
    inner: Any = msgpack.unpackb(
        outer.data,
        max_array_len=MAX_RECORDS_PER_KEY,
        max_bin_len=PACKED_RECORD_BYTES,
        max_str_len=MAX_PEER_ID_CHARS,
        max_map_len=0,
        max_ext_len=0,
    )
    for entry in inner[2] if isinstance(inner, list) and len(inner) == ENTRIES and isinstance(inner[2], list) else ():
        match entry:
            case [str(peer_id), bytes(record), float(expires_at_s)]:
                yield peer_id, record, expires_at_s
            case _:
                raise ValueError("the answer contains an entry that is not a record")
