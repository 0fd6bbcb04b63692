"""Records are stored within limits, and packed as hivemind packs them."""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, cast

import msgpack
import pytest
from hivemind.dht.node import _SearchState
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.kademlia.storage import (
    MAX_RECORDS_OF_ONE,
    MAX_RECORDS_PER_KEY,
    RecordStorage,
    pack_records,
    told_records,
)

KEY = DHTID.generate("run")
SOON_S, LONG_S = 0.2, 60.0


def kept(storage: DHTLocalStorage, subkey: str = "peer") -> bytes | None:
    found: Any = storage.get(KEY)
    entry = found.value.get(subkey) if found and isinstance(found.value, DictionaryDHTValue) else None
    return entry.value if entry else None


def after_a_replay(storage: DHTLocalStorage) -> bytes | None:
    """Return the remaining value after an old record arrived again behind a newer one, and the old one expired."""
    began_s = time.time()
    storage.store_subkey(KEY, "peer", b"old", began_s + SOON_S)
    storage.store_subkey(KEY, "peer", b"new", began_s + LONG_S)
    assert not storage.store_subkey(KEY, "peer", b"old", began_s + SOON_S)
    while time.time() < began_s + SOON_S + 0.01:
        pass
    return kept(storage)


def test_a_replayed_old_record_does_not_take_the_newer_one_along() -> None:
    assert after_a_replay(RecordStorage()) == b"new"
    assert after_a_replay(DHTLocalStorage()) is None, "hivemind has mended it: RecordStorage can do less"


def test_a_newer_record_replaces_an_older_one() -> None:
    storage, now_s = RecordStorage(), time.time()
    assert storage.store_subkey(KEY, "peer", b"1", now_s + 10)
    assert storage.store_subkey(KEY, "peer", b"2", now_s + 11)
    assert not storage.store_subkey(KEY, "peer", b"3", now_s + 11)
    assert kept(storage) == b"2"


def test_a_key_stays_small_enough_to_be_read() -> None:
    storage, now_s = RecordStorage(), time.time()
    taken = [storage.store_subkey(KEY, f"invented {i}", b"x", now_s + 10) for i in range(MAX_RECORDS_PER_KEY + 100)]
    assert sum(taken) == MAX_RECORDS_PER_KEY
    assert storage.store_subkey(KEY, "invented 7", b"newer", now_s + 11), "who is in may go on"


def test_what_others_answer_is_not_merged_into_what_is_kept_here() -> None:
    storage, now_s = RecordStorage(), time.time()
    storage.store_subkey(KEY, "peer", b"1", now_s + LONG_S)
    search, answer = _SearchState(KEY, float("inf"), future=cast(Any, Future())), DictionaryDHTValue()
    for number in range(MAX_RECORDS_PER_KEY + 1):
        answer.store(f"invented {number}", b"x", now_s + LONG_S)
    search.add_candidate(storage.get(KEY), source_node_id=None)
    search.add_candidate(ValueWithExpiration(answer, now_s + LONG_S), source_node_id=None)
    assert len(cast(Any, search.binary_value)) == MAX_RECORDS_PER_KEY + 2
    found = storage.get(KEY)
    assert found
    assert [subkey for subkey, _ in found.value.items()] == ["peer"]
    assert found.expiration_time == now_s + LONG_S


def test_the_known_are_kept_when_invented_ones_have_taken_all_room() -> None:
    storage, now_s = RecordStorage(max_records=10), time.time()
    assert storage.store_subkey(KEY, "peer", b"1", now_s + 30)
    for number in range(20):
        storage.store_subkey(DHTID.generate(str(number)), f"invented {number}", b"x", now_s + LONG_S)
    assert storage.store_subkey(KEY, "peer", b"2", now_s + 45)
    assert not storage.store_subkey(KEY, "newcomer", b"1", now_s + 45)
    assert kept(storage) == b"2"


def test_records_told_again_and_again_take_no_room() -> None:
    storage, now_s = RecordStorage(max_records=10), time.time()
    assert all(storage.store_subkey(KEY, "peer", b"x", now_s + 30 + number) for number in range(20))
    assert storage.store_subkey(KEY, "newcomer", b"1", now_s + 45)


def test_nothing_is_kept_in_place_of_a_cache() -> None:
    storage, now_s = RecordStorage(max_records=0), time.time()
    assert not storage.store_subkey(KEY, "peer", b"x", now_s + LONG_S)
    assert not storage.store(KEY, b"x", now_s + LONG_S)
    assert storage.get(KEY) is None


def test_one_owner_has_few_records_and_loses_the_one_that_ends_first() -> None:
    storage, now_s = RecordStorage(), time.time()
    for number in range(100):
        assert storage.store_subkey(DHTID.generate(str(number)), "peer", b"x", now_s + 10 + number)
    left = [number for number in range(100) if storage.get(DHTID.generate(str(number)))]
    assert left == [*range(100 - MAX_RECORDS_OF_ONE, 100)]
    assert len(storage) == MAX_RECORDS_OF_ONE


def test_a_refusal_says_why() -> None:
    storage, now_s = RecordStorage(max_records=MAX_RECORDS_PER_KEY + 1), time.time()
    for number in range(MAX_RECORDS_PER_KEY):
        storage.store_subkey(KEY, f"invented {number}", b"x", now_s + 10)
    assert storage.refusal(KEY, "invented 1", now_s + 10) == "the record already stored is at least as new"
    assert (
        storage.refusal(KEY, "newcomer", now_s + 10)
        == f"this node already stores the maximum of {MAX_RECORDS_PER_KEY} records for this key"
    )
    elsewhere = DHTID.generate("elsewhere")
    assert storage.store_subkey(elsewhere, "newcomer", b"x", now_s + 10)
    assert (
        storage.refusal(elsewhere, "late", now_s + 10)
        == f"this node already stores the maximum of {MAX_RECORDS_PER_KEY + 1} records"
    )
    assert not storage.refusal(elsewhere, "newcomer", now_s + 11)


def test_an_answer_is_a_choice_of_a_full_key() -> None:
    storage, now_s = RecordStorage(), time.time()
    for number in range(MAX_RECORDS_PER_KEY):
        storage.store_subkey(KEY, f"peer {number}", bytes(1000), now_s + 10)
    answers = [storage.some(KEY, most_bytes=64 * 1024) for _ in range(50)]
    assert all(50 < len(answer) <= 64 for answer in answers)
    assert len({peer for answer in answers for peer, _ in answer}) == MAX_RECORDS_PER_KEY


def test_a_flood_of_keys_is_bounded_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, now_s = RecordStorage(max_records=100), time.time()
    monkeypatch.setattr(CLOCK, "now", lambda: now_s)
    taken = [storage.store_subkey(DHTID.generate(str(i)), f"peer {i}", b"x", now_s + SOON_S) for i in range(200)]
    assert sum(taken) == 100
    storage._swept_at_s = 0.0
    monkeypatch.setattr(CLOCK, "now", lambda: now_s + SOON_S + 0.01)
    assert storage.store_subkey(KEY, "peer", b"x", now_s + LONG_S)
    assert len(storage) == 1


def packed(num_records: int) -> bytes:
    dictionary = DictionaryDHTValue()
    for number in range(num_records):
        dictionary.store(f"peer {number}", b"value", time.time() + 30.0)
    return MSGPackSerializer.dumps(dictionary)


def test_records_come_back_as_hivemind_packs_them() -> None:
    told = list(told_records(packed(3)))
    assert [(peer, value) for peer, value, _ in told] == [(f"peer {number}", b"value") for number in range(3)]


def test_records_are_packed_as_hivemind_reads_them() -> None:
    ends_s = time.time() + 30.0
    records = [("a", ValueWithExpiration(b"1", ends_s)), ("b", ValueWithExpiration(b"2", ends_s - 1))]
    data, last_s = pack_records(records)
    read: Any = MSGPackSerializer.loads(data)
    assert isinstance(read, DictionaryDHTValue)
    assert [(peer, *entry) for peer, entry in read.items()] == [("a", b"1", ends_s), ("b", b"2", ends_s - 1)]
    assert last_s == read.latest_expiration_time == ends_s


@pytest.mark.parametrize(
    "data",
    [
        packed(MAX_RECORDS_PER_KEY + 1),
        msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([1, 2.0, [["peer", b"x" * 2000, 1.0]]]))),
        msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([1, 2.0, [["peer", b"x", {}]]]))),
        msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([1, 2.0, [[b"peer", b"x", 1.0]]]))),
        msgpack.packb(msgpack.ExtType(0x51, b"")),
        msgpack.packb([1, 2]),
        b"",
    ],
)
def test_what_is_no_answer_is_told_as_such(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        list(told_records(data))


@given(st.binary(max_size=200))
def test_any_bytes_end_in_records_or_in_a_fault(data: bytes) -> None:
    for told in (data, MSGPackSerializer.dumps(msgpack.ExtType(0x50, data))):
        with suppress(ValueError):
            assert all(isinstance(peer, str) for peer, _, _ in told_records(told))
