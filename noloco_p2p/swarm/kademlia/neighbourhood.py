"""What a DHT node believes of others: one place in the key space each, current answers, and valid records.

hivemind accepts all places that a node claims, so one identity could surround a run's key and be the only one that is
asked. An answer that claims to be valid forever ends a search, even if it is empty. hivemind also keeps every node that
it ever heard of, in a list that only grows. Here, a third node is believed only at the place that follows from its id.
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

DICTIONARY = 0x50  # hivemind's MessagePack code of a dictionary
ENTRIES, PACKED_RECORD_BYTES = 3, MAX_RECORD_BYTES + 3
MAX_PEER_ID_CHARS = 64


@lru_cache(maxsize=4096)
def place_of(peer_id: str) -> DHTID:
    """The place of a peer's node; the same after a restart."""
    return DHTID.generate(source=peer_id)


def claim(table: RoutingTable, place: DHTID, peer: PeerID) -> PeerID | None:
    """Add a node that answers to the table, at the place that it claims. Returns a node to ping, if any.

    A node may claim only one place for itself, the first one (that of a plain hivemind node is random), and none that
    belongs to another node.
    """
    if table.get(peer_id=peer, default=place) != place or table.get(node_id=place, default=peer) != peer:
        return None
    to_ping = table.add_or_update_node(place, peer)
    _forget_spare(table, place)
    return to_ping and to_ping[1]


def _forget_spare(table: RoutingTable, place: DHTID) -> None:
    """Bound the spare nodes: hivemind keeps every node for which a full bucket has no place."""
    bucket = table.buckets[table.get_bucket_index(place)]
    while len(bucket.replacement_nodes) > bucket.size:
        del table[next(iter(bucket.replacement_nodes))]  # the one heard of longest ago


def placed(nodes: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
    """Return those of the reported `nodes` whose DHT id is the place of their peer id."""
    return {place: peer for place, peer in nodes.items() if place_of(str(peer)) == place}


def is_of_now(expires_at_s: float) -> bool:
    """Whether an answer expires no later than a record may; hivemind stops a search at one that expires late."""
    return expires_at_s <= CLOCK.now() + 2 * TTL_S


def pack_records(records: Sequence[tuple[str, ValueWithExpiration[bytes]]]) -> tuple[bytes, float]:
    """Return (a dictionary as hivemind packs it, when the last of its records expires)."""
    entries = [[peer_id, record.value, record.expiration_time] for peer_id, record in records]
    last_s = max(record.expiration_time for _, record in records)
    return MSGPackSerializer.dumps(
        msgpack.ExtType(DICTIONARY, MSGPackSerializer.dumps([math.inf, last_s, entries]))
    ), last_s


def told_records(packed: bytes) -> Iterator[tuple[str, bytes, float]]:
    """Yield (peer id, packed record, expiry) of a dictionary as another node packed it. Raises ValueError.

    hivemind's own reader would construct anything that a MessagePack of this length can hold.
    """
    outer = msgpack.unpackb(packed)
    if not isinstance(outer, msgpack.ExtType) or outer.code != DICTIONARY:
        raise ValueError("an answer is not a dictionary")
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
                raise ValueError("an answer has an entry that is not a record")
