"""Other DHT nodes say where they stand and until when they know something: only what can be is believed."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import ValueWithExpiration

from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.neighbourhood import believe_less, place_of
from noloco_p2p.swarm.records import TTL_S
from noloco_p2p.testing.identities import identity_of

HONEST, ROGUE = (PeerID.from_base58(identity_of(name).peer_id) for name in ("honest", "rogue"))
KEY = DHTID.generate("run")
INVENTED = [DHTID(KEY ^ number) for number in range(1, 21)]  # the places nearest to a key


def test_a_node_stands_in_one_place_until_it_is_gone() -> None:
    table = RoutingTable(DHTID.generate("me"), bucket_size=20, depth_modulo=5)

    async def update(node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        if responded and node_id is not None:
            table.add_or_update_node(node_id, peer_id)
        else:
            del table[table.peer_id_to_uid[peer_id]]

    protocol: Any = SimpleNamespace(update_routing_table=update, call_find=None, routing_table=table)
    believe_less(protocol)
    for place in INVENTED:
        asyncio.run(protocol.update_routing_table(place, ROGUE, responded=True))
    assert table.uid_to_peer_id == {INVENTED[0]: ROGUE}
    asyncio.run(protocol.update_routing_table(None, ROGUE, responded=False))
    asyncio.run(protocol.update_routing_table(INVENTED[1], ROGUE, responded=True))
    assert table.uid_to_peer_id == {INVENTED[1]: ROGUE}


def test_nodes_without_a_place_are_kept_while_they_are_few() -> None:
    table = RoutingTable(DHTID(0), bucket_size=2, depth_modulo=1)

    async def update(node_id: DHTID, peer_id: PeerID, responded: bool) -> None:
        table.add_or_update_node(node_id, peer_id)

    protocol: Any = SimpleNamespace(update_routing_table=update, call_find=None, routing_table=table)
    believe_less(protocol)
    peers = [PeerID(bytes([number]) * 34) for number in range(10)]
    for number, peer in enumerate(peers):
        asyncio.run(protocol.update_routing_table(DHTID(DHTID.MAX - 100 + number), peer))
    assert [*table.peer_id_to_uid] == [*peers[:2], *peers[-2:]], "two in their places, and the last two for later"


def test_a_third_node_stands_where_its_peer_id_says() -> None:
    async def find(peer: PeerID, keys: object) -> Any:
        return {KEY: (None, {place_of(str(HONEST)): HONEST, **dict.fromkeys(INVENTED, ROGUE)})}

    protocol: Any = SimpleNamespace(update_routing_table=None, call_find=find)
    believe_less(protocol)
    assert asyncio.run(protocol.call_find(ROGUE, [KEY])) == {KEY: (None, {place_of(str(HONEST)): HONEST})}


@pytest.mark.parametrize(
    ("in_s", "is_believed"), [(TTL_S, True), (2 * TTL_S + 60, False), (math.inf, False), (math.nan, False)]
)
def test_an_answer_that_is_good_for_ever_ends_no_search(in_s: float, is_believed: bool) -> None:
    async def find(peer: PeerID, keys: object) -> Any:
        return {KEY: (ValueWithExpiration(DictionaryDHTValue(), CLOCK.now() + in_s), {})}

    protocol: Any = SimpleNamespace(update_routing_table=None, call_find=find)
    believe_less(protocol)
    ((value, _),) = cast(Any, asyncio.run(protocol.call_find(ROGUE, [KEY]))).values()
    assert (value is not None) == is_believed


def test_who_does_not_answer_is_not_taken_for_one_who_does() -> None:
    async def find(peer: PeerID, keys: object) -> None:
        return None

    protocol: Any = SimpleNamespace(update_routing_table=None, call_find=find)
    believe_less(protocol)
    assert asyncio.run(protocol.call_find(ROGUE, [KEY])) is None
