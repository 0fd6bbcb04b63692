"""What a DHT node keeps for others: the newest of each peer, so many records and no more.

hivemind's own storage forgets a newer record when an older one of the same peer is stored again: the older one is not
kept, but its moment of expiry is, and takes the newer one along. Anybody could replay what a peer said a minute ago,
and with it make the peer vanish. This file imports hivemind: only `_hivemind.py` imports it, when a node starts.
"""

from __future__ import annotations

import time
from typing import Any

from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue

MAX_RECORDS_PER_KEY = 3000  # of 1 KiB: an answer of more than 4 MiB is not delivered, and the key is unreadable
MAX_RECORDS = 50_000
COUNT_AGAIN_S = 1.0


class NewestStorage(DHTLocalStorage):
    def __init__(self, *, max_records: int = MAX_RECORDS) -> None:
        super().__init__()
        self._max_records = max_records
        self._at_most = 0  # records here: never less than there are
        self._counted_at_s = 0.0

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """False when it is not newer than what is here, or when there is no room."""
        found = self.get(key)
        kept: Any = found.value if found else None
        if isinstance(kept, DictionaryDHTValue):
            known = kept.get(subkey)
            if known is not None and known.expiration_time >= expiration_time:
                return False
            if known is None and len(kept) >= MAX_RECORDS_PER_KEY:
                return False
        if not self._has_room():
            return False
        self._at_most += 1
        return super().store_subkey(key, subkey, value, expiration_time)

    def _has_room(self) -> bool:
        """Counts anew, at most once a second, when there may be too many: records end without a word."""
        now_s = time.monotonic()
        if self._at_most >= self._max_records and now_s - self._counted_at_s >= COUNT_AGAIN_S:
            self._counted_at_s = now_s
            values = [entry.value for _, entry in self.items()]
            self._at_most = sum(len(value) if isinstance(value, DictionaryDHTValue) else 1 for value in values)
        return self._at_most < self._max_records
