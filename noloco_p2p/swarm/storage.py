"""What a DHT node keeps for others: the newest of each peer, so many records and no more.

hivemind's own storage forgets a newer record when an older one of the same peer is stored again: the older one is not
kept, but its moment of expiry is, and takes the newer one along. Anybody could replay what a peer said a minute ago,
and with it make the peer vanish. This file imports hivemind: only `_hivemind.py` imports it, when a node starts.
"""

from __future__ import annotations

import time
from copy import copy
from typing import Any

from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils.timed_storage import ValueWithExpiration

MAX_RECORDS_PER_KEY = 3000  # of 1 KiB: an answer of more than 4 MiB is not delivered, and the key is unreadable
MAX_RECORDS = 50_000
COUNT_AGAIN_S = 1.0


class NewestStorage(DHTLocalStorage):
    def __init__(self, *, max_records: int = MAX_RECORDS) -> None:
        super().__init__()
        self._max_records = max_records
        self._at_most = 0  # records here: never less than there are
        self._counted_at_s = 0.0

    def get(self, key: Any) -> ValueWithExpiration[Any] | None:
        """A copy of a dictionary: hivemind's search merges into what it gets here what others answer, unbounded."""
        found = super().get(key)
        return found and ValueWithExpiration(_copied(found.value), found.expiration_time)

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """False when it is not newer than what is here, or when there is no room."""
        found = super().get(key)
        kept: Any = found.value if found else DictionaryDHTValue()
        if not isinstance(kept, DictionaryDHTValue):
            return False
        known = kept.get(subkey)
        if known is None and (len(kept) >= MAX_RECORDS_PER_KEY or not self._has_room()):
            return False
        if known is not None and known.expiration_time >= expiration_time:
            return False
        self._at_most += known is None
        if expiration_time > kept.latest_expiration_time:
            self.store(key, kept, expiration_time)
        return kept.store(subkey, value, expiration_time)

    def _has_room(self) -> bool:
        """Counts anew, at most once a second, when there may be too many: records end without a word."""
        now_s = time.monotonic()
        if self._at_most >= self._max_records and now_s - self._counted_at_s >= COUNT_AGAIN_S:
            self._counted_at_s = now_s
            values = [entry.value for _, entry in self.items()]
            self._at_most = sum(len(value) if isinstance(value, DictionaryDHTValue) else 1 for value in values)
        return self._at_most < self._max_records


class NoStorage(DHTLocalStorage):
    """Keeps nothing. In place of hivemind's cache, which anybody may fill, and which comes before what is kept here."""

    def store(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def store_subkey(self, *args: Any, **kwargs: Any) -> bool:
        return False


def _copied(value: Any) -> Any:
    if not isinstance(value, DictionaryDHTValue):
        return value
    copied = copy(value)  # entries are values, and stay; what holds them is copied
    for name in ("data", "expiration_heap", "key_to_heap"):
        setattr(copied, name, copy(getattr(value, name)))
    return copied
