"""A peer accepts claims of other DHT nodes about their ids and records only if they are plausible."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from harness.identities import identity_of
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.kademlia.neighbourhood import claim, is_of_now, pack_records, place_of, placed, told_records
from noloco_p2p.swarm.kademlia.storage import MAX_RECORDS_PER_KEY
from noloco_p2p.swarm.records import TTL_S

HONEST, ROGUE = (PeerID.from_base58(identity_of(name).peer_id) for name in ("honest", "rogue"))
KEY = DHTID.generate("run")
INVENTED = [DHTID(KEY ^ number) for number in range(1, 21)]  # the ids closest to the key


def test_a_node_stands_in_one_place_until_it_is_gone() -> None:
    table = RoutingTable(DHTID.generate("me"), bucket_size=20, depth_modulo=5)
    for place in INVENTED:
        claim(table, place, ROGUE)
    assert table.uid_to_peer_id == {INVENTED[0]: ROGUE}
    del table[INVENTED[0]]
    claim(table, INVENTED[1], ROGUE)
    assert table.uid_to_peer_id == {INVENTED[1]: ROGUE}


def test_nobody_takes_the_place_of_another() -> None:
    table = RoutingTable(DHTID.generate("me"), bucket_size=20, depth_modulo=5)
    claim(table, place_of(str(HONEST)), HONEST)
    claim(table, place_of(str(HONEST)), ROGUE)
    assert table.uid_to_peer_id == {place_of(str(HONEST)): HONEST}
    assert table.peer_id_to_uid == {HONEST: place_of(str(HONEST))}


def test_nodes_without_a_place_are_kept_while_they_are_few() -> None:
    table = RoutingTable(DHTID(0), bucket_size=2, depth_modulo=1)
    peers = [PeerID(bytes([number]) * 34) for number in range(10)]
    to_ping = [claim(table, DHTID(DHTID.MAX - 100 + number), peer) for number, peer in enumerate(peers)]
    assert [*table.peer_id_to_uid] == [*peers[:2], *peers[-2:]], "two in their places, and the last two for later"
    assert to_ping[:4] == [None, None, *peers[:2]], "the first of them are looked after"


def test_a_third_node_stands_where_its_peer_id_says() -> None:
    told = {place_of(str(HONEST)): HONEST, **dict.fromkeys(INVENTED, ROGUE)}
    assert placed(told) == {place_of(str(HONEST)): HONEST}


@pytest.mark.parametrize(
    ("in_s", "is_believed"), [(TTL_S, True), (2 * TTL_S + 60, False), (math.inf, False), (math.nan, False)]
)
def test_an_answer_that_is_good_for_ever_ends_no_search(in_s: float, is_believed: bool) -> None:
    assert is_of_now(CLOCK.now() + in_s) == is_believed


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
