"""hivemind's storage and ours, given the same."""

from __future__ import annotations

import time
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue

from noloco_p2p.swarm.storage import MAX_RECORDS_PER_KEY, NewestStorage

KEY = DHTID.generate("run")
SOON_S, LONG_S = 0.2, 60.0


def kept(storage: DHTLocalStorage, subkey: str = "peer") -> bytes | None:
    found: Any = storage.get(KEY)
    entry = found.value.get(subkey) if found and isinstance(found.value, DictionaryDHTValue) else None
    return entry.value if entry else None


def after_a_replay(storage: DHTLocalStorage) -> bytes | None:
    """What is left when an old word comes again behind the new one, and its time is over."""
    began_s = time.time()
    storage.store_subkey(KEY, "peer", b"old", began_s + SOON_S)
    storage.store_subkey(KEY, "peer", b"new", began_s + LONG_S)
    assert not storage.store_subkey(KEY, "peer", b"old", began_s + SOON_S)
    while time.time() < began_s + SOON_S + 0.01:
        pass
    return kept(storage)


def test_a_replayed_old_record_does_not_take_the_newer_one_along() -> None:
    assert after_a_replay(NewestStorage()) == b"new"
    assert after_a_replay(DHTLocalStorage()) is None, "hivemind has mended it: NewestStorage can do less"


def test_a_newer_record_replaces_an_older_one() -> None:
    storage, now_s = NewestStorage(), time.time()
    assert storage.store_subkey(KEY, "peer", b"1", now_s + 10)
    assert storage.store_subkey(KEY, "peer", b"2", now_s + 11)
    assert not storage.store_subkey(KEY, "peer", b"3", now_s + 11)
    assert kept(storage) == b"2"


def test_a_key_stays_small_enough_to_be_read() -> None:
    storage, now_s = NewestStorage(), time.time()
    taken = [storage.store_subkey(KEY, f"invented {i}", b"x", now_s + 10) for i in range(MAX_RECORDS_PER_KEY + 100)]
    assert sum(taken) == MAX_RECORDS_PER_KEY
    assert storage.store_subkey(KEY, "invented 7", b"newer", now_s + 11), "who is in may go on"


def test_a_flood_of_keys_is_bounded_and_passes() -> None:
    storage, now_s = NewestStorage(max_records=100), time.time()
    taken = [storage.store_subkey(DHTID.generate(str(i)), "peer", b"x", now_s + SOON_S) for i in range(200)]
    assert sum(taken) == 100
    storage._counted_at_s = 0.0
    while time.time() < now_s + SOON_S + 0.01:
        pass
    assert storage.store_subkey(KEY, "peer", b"x", now_s + LONG_S)
