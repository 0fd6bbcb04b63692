"""What a DHT node believes of others: one place in the key space for each, and answers of now.

hivemind takes all places that a node claims, so one identity could stand on every side of a run's key and be the only
one that is asked; and an answer that says to be good for ever ends a search, empty as it may be. It keeps whoever was
heard of once, too, in a list that only grows.

Of itself a node may claim one place, the first (that of a plain hivemind node is random). Of a third one only the place
is believed that follows from its peer id.
This file imports hivemind: only `_hivemind.py` imports it, when a node starts.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.p2p import PeerID

from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.records import TTL_S


@lru_cache(maxsize=4096)
def place_of(peer_id: str) -> DHTID:
    """Where the node of a peer stands; the same after a restart."""
    return DHTID.generate(source=peer_id)


def believe_less(protocol: DHTProtocol) -> None:
    """From now on what others say of places and of times is checked."""
    update_routing_table, call_find = protocol.update_routing_table, protocol.call_find

    async def update(node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        if node_id is None or protocol.routing_table.get(peer_id=peer_id, default=node_id) == node_id:
            await update_routing_table(node_id, peer_id, responded)
        if node_id is not None:
            _forget_spare(protocol.routing_table, node_id)

    async def find(peer: PeerID, keys: Collection[DHTID]) -> dict[DHTID, tuple[Any, dict[DHTID, PeerID]]] | None:
        found = await call_find(peer, keys)
        return found and {key: (_of_now(value), _placed(nearest)) for key, (value, nearest) in found.items()}

    protocol.update_routing_table, protocol.call_find = update, find


def _forget_spare(table: RoutingTable, node_id: DHTID) -> None:
    """hivemind keeps every node that a full bucket has no place for; as many as there are places are enough."""
    bucket = table.buckets[table.get_bucket_index(node_id)]
    while len(bucket.replacement_nodes) > bucket.size:
        del table[next(iter(bucket.replacement_nodes))]  # who was heard of longest ago


def _placed(nodes: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
    return {node_id: peer_id for node_id, peer_id in nodes.items() if place_of(str(peer_id)) == node_id}


def _of_now(value: Any) -> Any:
    """None in place of an answer that ends later than any record may."""
    return value if value and value.expiration_time <= CLOCK.now() + 2 * TTL_S else None
