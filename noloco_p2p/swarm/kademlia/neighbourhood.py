"""Decides which claims of other nodes a DHT node believes: their places in the key space, and the contents of their
answers.

hivemind has three weaknesses here. First, it accepts every place that a node claims, so a single identity could
surround a run's key and receive all requests for it. Second, it ends a search at an answer that claims to be valid
forever, even if the answer is empty. Third, it keeps a list of every node that has ever been reported to it. This
module limits that list and rejects such answers. It accepts a reported node only at the place that follows from its
peer id.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgpack
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.kademlia.storage import MAX_RECORDS_PER_KEY
from noloco_p2p.swarm.records import MAX_RECORD_BYTES, TTL_S

DICTIONARY = 0x50  # hivemind's MessagePack code for a dictionary
ENTRIES, PACKED_RECORD_BYTES = 3, MAX_RECORD_BYTES + 3
MAX_PEER_ID_CHARS = 64


@lru_cache(maxsize=4096)
def place_of(peer_id: str) -> DHTID:
    """Return the place of a peer's node in the key space, which stays the same after a restart."""
    return DHTID.generate(source=peer_id)


def claim(table: RoutingTable, place: DHTID, peer: PeerID) -> PeerID | None:
    """Add a node to the table at the place that it claims. Returns a neighbour to ping, or None.

    The first claim of a node may be for any place, because the places of plain hivemind nodes are random. A node cannot
    claim a second place or a place that belongs to another node.
    """
    if table.get(peer_id=peer, default=place) != place or table.get(node_id=place, default=peer) != peer:
        return None
    to_ping = table.add_or_update_node(place, peer)
    _forget_spare(table, place)
    return to_ping and to_ping[1]


def _forget_spare(table: RoutingTable, place: DHTID) -> None:
    """Limit the number of spare nodes. hivemind keeps all nodes for which a full bucket has no space."""
    bucket = table.buckets[table.get_bucket_index(place)]
    while len(bucket.replacement_nodes) > bucket.size:
        del table[next(iter(bucket.replacement_nodes))]  # the oldest spare node


def placed(nodes: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
    """Return the reported nodes whose DHT id is the place that follows from their peer id."""
    return {place: peer for place, peer in nodes.items() if place_of(str(peer)) == place}


def is_of_now(expires_at_s: float) -> bool:
    """Return whether an answer expires no later than a record can.

    hivemind would end its search at an answer that expires later.
    """
    return expires_at_s <= CLOCK.now() + 2 * TTL_S


def pack_records(records: Sequence[tuple[str, ValueWithExpiration[bytes]]]) -> tuple[bytes, float]:
    """Pack records in hivemind's format for dictionaries. Returns the bytes and the latest expiry."""
    entries = [[peer_id, record.value, record.expiration_time] for peer_id, record in records]
    last_s = max(record.expiration_time for _, record in records)
    return MSGPackSerializer.dumps(
        msgpack.ExtType(DICTIONARY, MSGPackSerializer.dumps([math.inf, last_s, entries]))
    ), last_s


def told_records(packed: bytes) -> Iterator[tuple[str, bytes, float]]:
    """Yield the (peer id, packed record, expiry) entries of a dictionary that another node has packed.

    hivemind's own reader has no limits: it constructs any object that a MessagePack of this length can hold. Raises
    ValueError if the bytes are not a dictionary of records.
    """
    outer = msgpack.unpackb(packed)
    if not isinstance(outer, msgpack.ExtType) or outer.code != DICTIONARY:
        raise ValueError("the answer is not a dictionary")
    inner: Any = msgpack.unpackb(
        outer.data,
        max_array_len=MAX_RECORDS_PER_KEY,
        max_bin_len=PACKED_RECORD_BYTES,
        max_str_len=MAX_PEER_ID_CHARS,
        max_map_len=0,
        max_ext_len=0,
    )
    for entry in inner[2] if isinstance(inner, list) and len(inner) == ENTRIES and isinstance(inner[2], list) else ():
        match entry:
            case [str(peer_id), bytes(record), float(expires_at_s)]:
                yield peer_id, record, expires_at_s
            case _:
                raise ValueError("the answer contains an entry that is not a record")
