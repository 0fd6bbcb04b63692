"""What a DHT node stores for others: the newest record of each peer, and a bounded number of records.

hivemind's own storage drops a newer record when an older one of the same peer is stored again: it does not keep the
older one, but its expiry, which then also ends the newer one. So anybody could replay an old record of a peer, and make
the peer vanish. Nor does it know of owners.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils.timed_storage import ValueWithExpiration

from noloco_p2p.swarm.clock import CLOCK

MAX_RECORDS_OF_ONE = 8  # keys under which one peer is announced: two depths, the last one and the base, in two views
MAX_RECORDS_PER_KEY = 256  # a bucket is split above 48
MAX_RECORDS = 10_000
SWEEP_EVERY_S = 1.0
ENTRY_BYTES = 80  # of a record in an answer, besides the record: the peer id and the expiry

Record = ValueWithExpiration[bytes]


class RecordStorage(DHTLocalStorage):
    """Key -> peer id -> record. The validator has checked that the key of the peer id signed the record.

    Expired records make room. If a peer has more than MAX_RECORDS_OF_ONE records, the one that expires first is
    dropped. Nothing else is: stored records may be renewed, and newcomers are refused while a key or the whole storage
    is full.
    """

    def __init__(self, *, max_records: int = MAX_RECORDS) -> None:
        super().__init__()
        self._max_records = max_records
        self._kept: dict[DHTID, dict[str, Record]] = {}
        self._keys_of: defaultdict[str, set[DHTID]] = defaultdict(set)
        self._num_records = 0  # including expired ones, until the next sweep
        self._swept_at_s = 0.0

    def __len__(self) -> int:
        return self._num_records

    def refusal(self, key: DHTID, peer_id: str, expires_at_s: float) -> str:
        """Return why this node would not store such a record; empty when it would."""
        self._sweep()
        kept = self._kept.get(key, {})
        if known := kept.get(peer_id):
            return "" if known.expiration_time < expires_at_s else "the stored record is as new"
        if len(kept) >= MAX_RECORDS_PER_KEY:
            return f"this node keeps {MAX_RECORDS_PER_KEY} records of a key"
        if len(self._keys_of.get(peer_id, ())) >= MAX_RECORDS_OF_ONE:
            return ""  # another record of the same peer makes room
        return f"this node keeps {self._max_records} records" if self._num_records >= self._max_records else ""

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Store a record. False when it is not newer than the stored one, or there is no room: `refusal` says which."""
        if not isinstance(subkey, str) or self.refusal(key, subkey, expiration_time):
            return False
        if subkey not in self._kept.get(key, {}):
            self._make_room_of(subkey)
            self._keys_of[subkey].add(key)
            self._num_records += 1
        self._kept.setdefault(key, {})[subkey] = ValueWithExpiration(value, expiration_time)
        return True

    def store(self, key: Any, value: bytes, expiration_time: float, subkey: Any = None) -> bool:
        """Stores only records, since a value without a subkey has no owner."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def get(self, key: Any) -> ValueWithExpiration[Any] | None:
        """All unexpired records under a key, in a new dictionary."""
        dictionary = DictionaryDHTValue()
        for peer_id, record in self._live(key):
            dictionary.store(peer_id, record.value, record.expiration_time)
        return ValueWithExpiration(dictionary, dictionary.latest_expiration_time) if dictionary.data else None

    def some(self, key: DHTID, *, most_bytes: int) -> list[tuple[str, Record]]:
        """The same with peer ids, or a random choice that takes at most `most_bytes` in an answer."""
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
        """Remove expired records, at most once in SWEEP_EVERY_S: records expire silently."""
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


class NoStorage(DHTLocalStorage):
    """Stores nothing. It replaces hivemind's cache, which anybody may fill, and which is read before the storage."""

    def store(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def store_subkey(self, *args: Any, **kwargs: Any) -> bool:
        return False
