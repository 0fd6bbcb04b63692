"""A peer accepts claims of other DHT nodes about places and times only if they are plausible."""

from __future__ import annotations

import math

import pytest
from harness.identities import identity_of
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.p2p import PeerID

from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.kademlia.protocol import claim, is_of_now, place_of, placed
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
