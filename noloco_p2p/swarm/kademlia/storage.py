"""Stores other peers' newest records on a DHT node, up to a total limit.

hivemind's own storage has a flaw. If an older record of a peer is stored again, hivemind keeps the newer record, but
with the expiry of the older one. Anybody could therefore make a peer vanish by replaying an old record. In addition,
hivemind does not limit the number of records per peer.
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

# A peer is announced under up to 8 keys: in each of two views, at two adjacent depths, the previous depth and the base.
MAX_RECORDS_OF_ONE = 8
MAX_RECORDS_PER_KEY = 256  # far more than the 48 records above which a bucket is split
MAX_RECORDS = 10_000
SWEEP_EVERY_S = 1.0
ENTRY_BYTES = 80  # the size of the peer id and the expiry that accompany each record in an answer

Record = ValueWithExpiration[bytes]


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


class NoStorage(DHTLocalStorage):
    """A storage that stores nothing.

    It replaces hivemind's cache, which anybody could fill, and which hivemind reads before the storage.
    """

    def store(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def store_subkey(self, *args: Any, **kwargs: Any) -> bool:
        return False
