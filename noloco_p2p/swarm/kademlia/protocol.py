"""Extends hivemind's DHT node with limits on requests and answers, so that strangers cannot overload it.

requests    A request has at most 16 KiB, and no duplicate keys. The rate of requests is limited, per peer and for all
            peers together.
answers     An answer has at most 128 KiB. If the records of a bucket exceed this, the node sends a random selection.
            Answers of other nodes have limits, too, and each peer id, place and record in them is checked.
places      hivemind accepts every place in the key space that a node claims, so a single identity could surround a
            run's key and receive all requests for it. Here, a node has only one place, and a reported node is accepted
            only at the place that follows from its peer id.
searches    hivemind ends a search at an answer that claims to be valid forever, even if the answer is empty. Here, such
            an answer is rejected.
storing     Only records of peers are stored, up to 8 per request. A record is refused without a check of its signature
            if there is no space for it, or if it is not newer than the stored one.
hand-over   hivemind sends the stored records to every new node, but this node does not. Each peer stores its record
            again every 15 s, and then also finds the new node.
addresses   A node reports the addresses of its neighbours, because p2pd's own DHT serves no requests and keeps nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

from hivemind.dht.crypto import DHTRecord
from hivemind.dht.node import Blacklist, DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import ValueWithExpiration

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError
from noloco_p2p.rates import Rates
from noloco_p2p.swarm.clock import CLOCK, Offset
from noloco_p2p.swarm.kademlia.client import ANSWER_FAULTS, DaemonClient, id_in, known_id
from noloco_p2p.swarm.kademlia.storage import (
    PACKED_RECORD_BYTES,
    RecordStorage,
    RecordValidator,
    pack_records,
    peer_of,
    told_records,
)
from noloco_p2p.swarm.kademlia.whereabouts import LOCATE, Whereabouts
from noloco_p2p.swarm.records import TTL_S

logger = logging.getLogger(__name__)

MAX_CALLS = 1000  # simultaneous calls to other nodes; each search makes a few
WAIT_TIMEOUT_S = 3.0  # hivemind's time limit for a call to another node
MAX_REQUEST_BYTES = 16 * 1024
MAX_ANSWER_BYTES = 128 * 1024  # records in an answer, for all keys together
# The limits for whole answers of other nodes. Besides the records, an answer names up to 20 nodes for each key.
LONGEST_ANSWERS = {"Find": MAX_ANSWER_BYTES + 16 * 1024, "Ping": 1024, "Store": 1024}
MAX_KEYS = 4  # per request
MAX_STORED_AT_ONCE = 8
BUCKET_SIZE, NUM_REPLICAS, DEPTH_MODULO = 20, 5, 5  # hivemind's defaults
NUM_WORKERS = 4
BLACKLIST_S, BACKOFF = 5.0, 2.0

# A unit is about 50 us of this thread's time, or 8 KiB of a request or an answer. A peer in a large swarm sends less
# than one request per second to another one, and reading a bucket of 32 records costs 4 units.
# Units per second, and at once: per peer, of all peers together, and of each of up to MAX_KNOWN nodes for itself when
# the shared rate is used up.
OF_ONE, OF_ALL, OF_KNOWN = (50.0, 500.0), (150.0, 750.0), (2.0, 100.0)
EVERYBODY = ""
UNIT_BYTES, STORE_UNITS = 8 * 1024, 4.0
MAX_PINGS = 8  # simultaneous pings of neighbours that a newcomer may replace
CHECKED_AT_ONCE = 16  # signatures checked before the event loop runs other callbacks
MAX_PEERS = 1024  # peers whose requests are counted
MAX_KNOWN = 64  # nodes with their own allowance
KNOWN_FOR_S = 300.0  # how long after its last answer a node keeps its allowance if others want one


class RefusedRequest(DirectoryError):
    """A request that this node refuses to answer. The message is sent to the caller."""


class Allowance:
    """The rates that limit the requests of other peers: one rate per peer, and one shared rate for all peers.

    Anybody can create peer ids, and a thousand ids together can use up the shared rate. A node that has answered a
    request from this node therefore also has a small allowance of its own, which no other peer can use up. Peers that
    only send requests never get such an allowance. The number of these allowances is limited, so new nodes must wait
    while the owners of all allowances keep answering.

    Call `admits` before the work for a request, and `charge` with its cost.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shared = Rates(*OF_ALL, clock=clock)
        self._peers = Rates(*OF_ONE, max_keys=MAX_PEERS, clock=clock)
        self._own = Rates(*OF_KNOWN, max_keys=MAX_KNOWN, clock=clock)
        self._answered_s: OrderedDict[str, float] = OrderedDict()  # when each node answered last, the oldest first

    def answered(self, peer_id: str) -> None:
        """Record that a node has answered a request from this node."""
        if peer_id not in self._answered_s and len(self._answered_s) >= MAX_KNOWN:
            oldest, at_s = next(iter(self._answered_s.items()))
            if self._clock() - at_s < KNOWN_FOR_S:
                return
            del self._answered_s[oldest]
        self._answered_s[peer_id] = self._clock()
        self._answered_s.move_to_end(peer_id)

    def admits(self, peer_id: str) -> bool:
        rates, key = self._payer(peer_id)
        return rates.left(key) > 0.0 and self._peers.left(peer_id) > 0.0

    def charge(self, peer_id: str, units: float) -> None:
        rates, key = self._payer(peer_id)
        rates.charge(key, units)
        self._peers.charge(peer_id, units)

    def _payer(self, peer_id: str) -> tuple[Rates, str]:
        """Return the allowance to charge, and its key: the shared one, or the node's own if that is used up."""
        is_own = self._shared.left(EVERYBODY) <= 0.0 and peer_id in self._answered_s
        return (self._own, peer_id) if is_own else (self._shared, EVERYBODY)


class BoundedStub:
    """The calls to one node. An answer is parsed only if it is not too long, and must not claim an impossible place."""

    def __init__(self, client: DaemonClient, peer: PeerID) -> None:
        self._client = client
        self._peer = peer

    async def rpc_ping(self, request: Any, *, timeout: float) -> Any:
        return await self._call("Ping", request, timeout)

    async def rpc_find(self, request: Any, *, timeout: float) -> Any:
        return await self._call("Find", request, timeout)

    async def rpc_store(self, request: Any, *, timeout: float) -> Any:
        return await self._call("Store", request, timeout)

    async def _call(self, what: str, request: Any, timeout_s: float) -> Any:
        asking = self._client.ask(
            self._peer, _protocol(what), request.SerializeToString(), most_bytes=LONGEST_ANSWERS[what]
        )
        answer = _message(f"{what}Response")
        answer.ParseFromString(await asyncio.wait_for(asking, timeout_s))
        if answer.peer.node_id:
            _key(answer.peer.node_id)
        return answer


class BoundedProtocol(DHTProtocol):
    """A version of hivemind's DHT protocol that limits the requests of other nodes and checks their answers."""

    def __init__(
        self,
        client: DaemonClient,
        node_id: DHTID,
        *,
        is_client: bool,
        own_addresses: Callable[[], Sequence[str]],
        guard: DialGuard,
    ) -> None:
        super().__init__(_initialized_with_create=True)
        self.p2p, self.node_id, self.client_mode = client, node_id, is_client
        self.bucket_size, self.num_replicas, self.wait_timeout = BUCKET_SIZE, NUM_REPLICAS, WAIT_TIMEOUT_S
        self.records, self.cache = RecordStorage(), RecordStorage(max_records=0)
        self.storage = self.records
        self.routing_table = RoutingTable(node_id, BUCKET_SIZE, DEPTH_MODULO)
        self.rpc_semaphore = asyncio.Semaphore(MAX_CALLS)
        self._validator, self.authorizer = RecordValidator(), None
        self.record_validator = self._validator
        self.node_info = _message("NodeInfo", **({} if is_client else {"node_id": node_id.to_bytes()}))
        self.whereabouts = Whereabouts(
            client, self.routing_table, own_addresses=own_addresses, guard=guard, wait_s=WAIT_TIMEOUT_S
        )
        self._client = client
        self._allowance = Allowance()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self) -> None:
        """Start answering requests from other nodes. A client does not call this, because it only reads."""
        for name, work in (("Ping", self._pong), ("Find", self._find), ("Store", self._store)):
            answer = partial(self._answer, partial(self._parsed, work, f"{name}Request"))
            await self._client.handle_requests(_protocol(name), answer)
        await self._client.handle_requests(LOCATE, partial(self._answer, self.whereabouts.tell))

    def get_stub(self, peer: PeerID) -> BoundedStub:  # pyright: ignore[reportIncompatibleMethodOverride]
        return BoundedStub(self._client, peer)

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    # Requests from other nodes. Most are answered when these methods return; a few must await another node.

    def _answer(
        self, work: Callable[[bytes, PeerID], bytes | Awaitable[bytes]], data: bytes, peer: PeerID
    ) -> bytes | Awaitable[bytes]:
        """Answer a request, and charge its sender for the work.

        Raises RefusedRequest before parsing if the request is too long or exceeds the allowance.
        """
        peer_id = str(peer)
        if len(data) > MAX_REQUEST_BYTES:
            raise RefusedRequest(f"the request has {len(data)} bytes, but the limit is {MAX_REQUEST_BYTES}")
        if not self._allowance.admits(peer_id):
            raise RefusedRequest("too many requests; try again later")
        self._allowance.charge(peer_id, 1.0 + len(data) / UNIT_BYTES)
        answer = work(data, peer)
        if isinstance(answer, bytes):
            self._allowance.charge(peer_id, len(answer) / UNIT_BYTES)
        return answer

    def _parsed(
        self, work: Callable[[Any, PeerID], Any], request_type: str, data: bytes, peer: PeerID
    ) -> bytes | Awaitable[bytes]:
        request = _message(request_type)
        request.ParseFromString(data)
        if request.peer.node_id:
            self._met(_key(request.peer.node_id), peer)
        answer = work(request, peer)
        return answer if isinstance(answer, Coroutine) else answer.SerializeToString()

    def _pong(self, request: Any, peer: PeerID) -> Any:
        pong = _message("PingResponse", peer=self.node_info, dht_time=CLOCK.now(), available=False)
        return self._pong_after_ping(pong, request, peer) if request.validate else pong

    async def _pong_after_ping(self, pong: Any, request: Any, peer: PeerID) -> bytes:
        """Ping the caller before answering, because plain hivemind nodes want to know whether others can call them."""
        place = await self.call_ping(peer)
        pong.available = place is not None and place.to_bytes() == request.peer.node_id
        return pong.SerializeToString()

    def _find(self, request: Any, peer: PeerID) -> Any:
        keys = [_key(raw) for raw in request.keys[: MAX_KEYS + 1]]
        if len(keys) > MAX_KEYS or len(set(keys)) < len(keys):
            raise RefusedRequest(f"a request may contain at most {MAX_KEYS} keys and no duplicates")
        asker = _key(request.peer.node_id) if request.peer.node_id else None
        results = [self._found(key, asker, most_bytes=MAX_ANSWER_BYTES // len(keys)) for key in keys]
        return _message("FindResponse", results=results, peer=self.node_info)

    def _found(self, key: DHTID, asker: DHTID | None, *, most_bytes: int) -> Any:
        near = self.routing_table.get_nearest_neighbors(key, k=self.bucket_size, exclude=asker)
        result = _message(
            "FindResult",
            type=dht_pb2.NOT_FOUND,  # pyright: ignore[reportAttributeAccessIssue]
            nearest_node_ids=[place.to_bytes() for place, _ in near],
            nearest_peer_ids=[peer.to_bytes() for _, peer in near],
        )
        if kept := self.records.some(key, most_bytes=most_bytes):
            result.type = dht_pb2.FOUND_DICTIONARY  # pyright: ignore[reportAttributeAccessIssue]
            result.value, result.expiration_time = pack_records(kept)
        return result

    def _store(self, request: Any, peer: PeerID) -> Any:
        columns = (request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache)
        if len({len(column) for column in columns}) > 1 or len(request.keys) > MAX_STORED_AT_ONCE:
            raise RefusedRequest(
                f"a request may store at most {MAX_STORED_AT_ONCE} records, and all its lists must have the same length"
            )
        kept = [
            not in_cache and self._keep(peer, DHTRecord(*record)) for *record, in_cache in zip(*columns, strict=True)
        ]
        return _message("StoreResponse", store_ok=kept, peer=self.node_info)

    def _keep(self, peer: PeerID, record: DHTRecord) -> bool:
        """Store a record if it is valid. The signature is checked last, because the other checks are cheaper."""
        key, owner = _key(record.key), peer_of(record.subkey)
        if owner is None or len(record.value) > PACKED_RECORD_BYTES:
            return False
        if why := self.records.refusal(key, owner, record.expiration_time):
            logger.debug("did not store a record of ..%s: %s", owner[-6:], why)
            return False
        self._allowance.charge(str(peer), STORE_UNITS)
        if not self._validator.validate(record):
            return False
        return self.records.store_subkey(key, owner, record.value, record.expiration_time)

    # Requests to other nodes.

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        await self.whereabouts.make_way_to(peer)
        return await super().call_ping(peer, validate, strict)

    async def call_store(self, peer: PeerID, *args: Any, **kwargs: Any) -> list[bool] | None:
        await self.whereabouts.make_way_to(peer)
        return await super().call_store(peer, *args, **kwargs)

    async def call_find(self, peer: PeerID, keys: Iterable[DHTID]) -> Any:
        """Ask another node for the records of keys. Returns key -> (its records, the nodes near the key).

        Returns None if the node does not answer properly.
        """
        keys = list(keys)
        request = _message("FindRequest", keys=[key.to_bytes() for key in keys], peer=self.node_info)
        try:
            await self.whereabouts.make_way_to(peer)
            answer: Any = await self.get_stub(peer).rpc_find(request, timeout=self.wait_timeout)
            if len(answer.results) != len(keys):
                raise ValueError("the number of results in the answer differs from the number of keys requested")
            found = {key: await self._believe(key, result) for key, result in zip(keys, answer.results, strict=True)}
            place = _key(answer.peer.node_id) if answer.peer.node_id else None
        except ANSWER_FAULTS as error:
            logger.debug("no valid answer from ..%s: %s", str(peer)[-6:], error)
            place = self.routing_table.peer_id_to_uid.get(peer)
            await self.update_routing_table(place, peer, responded=False)
            return None
        self._allowance.answered(str(peer))
        for _, near in found.values():
            self.whereabouts.heard(near.values(), peer)
        if place is not None:
            self._met(place, peer)
        return found

    async def _believe(self, key: DHTID, result: Any) -> tuple[Any, dict[DHTID, PeerID]]:
        """Return the valid records in a result, and the nodes in it that are at their proper places."""
        pairs = zip(result.nearest_node_ids[:BUCKET_SIZE], result.nearest_peer_ids[:BUCKET_SIZE], strict=False)
        near = placed({_key(place): known_id(peer) for place, peer in pairs})
        is_dictionary = result.type == dht_pb2.FOUND_DICTIONARY  # pyright: ignore[reportAttributeAccessIssue]
        if not is_dictionary or not is_of_now(result.expiration_time) or len(result.value) > MAX_ANSWER_BYTES:
            return None, near
        valid = DictionaryDHTValue()
        for number, (peer_id, value, expires_at_s) in enumerate(told_records(result.value), start=1):
            record = DHTRecord(key.to_bytes(), self.serializer.dumps(peer_id), value, expires_at_s)
            if self._validator.validate(record):
                valid.store(peer_id, value, expires_at_s)
            if number % CHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return (ValueWithExpiration(valid, valid.latest_expiration_time) if valid.data else None), near

    # The routing table.

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """Add a node that responded, or remove one that did not. A new node is not sent any records."""
        if node_id is None:
            return
        if responded:
            self._met(node_id, peer_id)
        elif node_id in self.routing_table:
            del self.routing_table[node_id]

    def _met(self, place: DHTID, peer: PeerID) -> None:
        to_ping = claim(self.routing_table, place, peer)
        if to_ping is not None and len(self._tasks) < MAX_PINGS:  # the node is removed if it does not answer
            task = asyncio.create_task(self.call_ping(to_ping), name="ping of a neighbour")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


class BoundedNode(DHTNode):
    """A version of hivemind's DHT node that uses a `BoundedProtocol`.

    Its place follows from the peer id, so other nodes need not learn it again after a restart. All caches are off. The
    view must always be read afresh, strangers could fill a cache that serves others, and hivemind's sharing of requests
    keeps an entry for every key that was ever requested.
    """

    def __init__(
        self, client: DaemonClient, *, is_client: bool, own_addresses: Callable[[], Sequence[str]], guard: DialGuard
    ) -> None:
        super().__init__(_initialized_with_create=True)
        self.peer_id = known_id(client.own_id)
        self.node_id = place_of(str(self.peer_id))
        self.p2p, self.is_alive = client, True
        self.num_replicas, self.num_workers, self.chunk_size = NUM_REPLICAS, NUM_WORKERS, MAX_KEYS
        self.blacklist = Blacklist(BLACKLIST_S, BACKOFF)
        self.cache_locally = self.cache_on_store = self.reuse_get_requests = False
        self.cache_nearest = self.cache_refresh_before_expiry = 0
        self.bounded = BoundedProtocol(
            client, self.node_id, is_client=is_client, own_addresses=own_addresses, guard=guard
        )
        self.protocol = self.bounded

    def end(self) -> None:
        """Cancel the tasks of the node. Its handlers end with the daemon, which the caller stops next."""
        self.is_alive = False
        self.bounded.end()

    def neighbours(self) -> set[str]:
        """Return the peer ids of the nodes in the routing table, all of which answered recently."""
        return {str(peer_id) for peer_id in list(self.protocol.routing_table.peer_id_to_uid)}

    async def greet(self, peer_id: str) -> Offset | None:
        """Exchange routing table entries with a node, and learn its neighbours.

        Returns the offset of its clock, or None if it is not a DHT node.
        """
        peer = id_in(peer_id)
        if await self.protocol.call_ping(peer) is None:
            return None
        offset = await self._offset(peer)
        await self.find_nearest_nodes([self.node_id])
        return offset

    async def _offset(self, peer: PeerID) -> Offset:
        asked_s, wall_s = time.monotonic(), CLOCK.now()
        answer: Any = await self.protocol.get_stub(peer).rpc_ping(_message("PingRequest"), timeout=WAIT_TIMEOUT_S)
        unsure_s = (time.monotonic() - asked_s) / 2
        return Offset(answer.dht_time - (wall_s + unsure_s), unsure_s)


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


def _protocol(what: str) -> str:
    """Return the name under which nodes call each other for a kind of request: the method of hivemind's class."""
    return f"{DHTProtocol.__name__}.rpc_{what.lower()}"


def _message(name: str, **fields: Any) -> Any:
    return vars(dht_pb2)[name](**fields)


def _key(raw: bytes) -> DHTID:
    if len(raw) != DHTID.HASH_NBYTES:
        raise RefusedRequest(f"a key must be {DHTID.HASH_NBYTES} bytes long")
    return DHTID.from_bytes(raw)
