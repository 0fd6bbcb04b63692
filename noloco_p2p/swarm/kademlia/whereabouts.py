"""Finds the addresses of nodes that other nodes report. This replaces p2pd's own DHT.

A node knows the addresses at which it can be dialled. Its neighbours ask for these addresses, and pass them on to other
nodes. libp2p dials them and authenticates the node by its key. Before that, the addresses are filtered, and the number
of dials is limited, in the same way as for the addresses in records.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from hivemind.dht.routing import RoutingTable
from hivemind.p2p import PeerID

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError, Unreachable
from noloco_p2p.rates import Rates
from noloco_p2p.swarm.addresses import by_reach, guarded, host_in, of_one_host, tcp_target
from noloco_p2p.swarm.kademlia.client import ANSWER_FAULTS, DaemonClient, known_id
from noloco_p2p.swarm.streams import count_down

K = TypeVar("K")
V = TypeVar("V")

LOCATE = "noloco_p2p.locate/1"  # request: a peer id, or nothing; answer: addresses, one per line
MAX_ADDRESSES, MAX_ADDRESS_CHARS = 8, 200
MAX_PEERS = 1024  # remembered peers in each table
GOOD_FOR_S = 300.0
MAX_WAITING = 4  # requests that may wait for the same neighbour, so that a silent one cannot hold up all of them
SILENT_FOR_S = 30.0  # how long requests get an empty answer after a neighbour reported no addresses
DIALS_PER_S, DIALS_AT_ONCE = 2.0, 64.0  # dials to peers that others reported


class Whereabouts:
    """The addresses of other nodes, as reported by their neighbours.

    `table` is the routing table of this node. `own_addresses` returns the addresses at which this node can be dialled,
    without its peer id. `wait_s` is the time limit for one answer.
    """

    def __init__(
        self,
        client: DaemonClient,
        table: RoutingTable,
        *,
        own_addresses: Callable[[], Sequence[str]],
        guard: DialGuard,
        wait_s: float,
    ) -> None:
        self._client = client
        self._table = table
        self._own_addresses = own_addresses
        self._guard = guard
        self._wait_s = wait_s
        self._dials = Rates(per_s=DIALS_PER_S, at_once=DIALS_AT_ONCE)
        self._told_by: OrderedDict[PeerID, PeerID] = OrderedDict()
        # the addresses that neighbours reported for themselves, each with the time of the report
        self._addresses: OrderedDict[PeerID, tuple[float, bytes]] = OrderedDict()
        self._tried_s: OrderedDict[PeerID, float] = OrderedDict()
        self._waiting: Counter[PeerID] = Counter()

    def tell(self, data: bytes, asker: PeerID) -> bytes | Awaitable[bytes]:
        """Return the addresses of the neighbour whose peer id is `data`, or of this node if `data` is empty.

        Raises ValueError if `data` is too long for a peer id. Raises DirectoryError if the peer is not a neighbour, or
        if too many requests are already waiting for its answer.
        """
        if not data:
            return pack(self._own_addresses())
        wanted = known_id(data)
        if wanted not in self._table.peer_id_to_uid:
            raise DirectoryError("this node does not know that peer")
        when_s, addresses = self._addresses.get(wanted, (-math.inf, b""))
        is_known = time.monotonic() - when_s < (GOOD_FOR_S if addresses else SILENT_FOR_S)
        return addresses if is_known else self._ask_itself(wanted)

    def heard(self, peers: Iterable[PeerID], teller: PeerID) -> None:
        """Record that the node `teller` has reported these peers."""
        for peer in peers:
            if peer not in self._table.peer_id_to_uid and peer != self._client.peer_id:
                _put(self._told_by, peer, teller)

    async def make_way_to(self, peer: PeerID) -> None:
        """Connect libp2p to a node that is about to be called, at the addresses that another node reports.

        It does nothing for neighbours and for nodes that nobody has reported, because p2pd may know their addresses. It
        never raises an exception, because the call that follows reports any error.
        """
        teller, now_s = self._told_by.pop(peer, None), time.monotonic()
        is_tried = now_s - self._tried_s.get(peer, -GOOD_FOR_S) < GOOD_FOR_S
        if teller is None or is_tried or peer in self._table.peer_id_to_uid or not self._dials.take("reported peers"):
            return
        _put(self._tried_s, peer, now_s)
        with suppress(*ANSWER_FAULTS, Unreachable):
            await self._dial(str(peer), unpack(await self._ask(teller, peer.to_bytes())))

    async def _dial(self, peer_id: str, told: Sequence[str]) -> None:
        """Dial a reported peer. Raises Unreachable if the guard forbids this, or one of ANSWER_FAULTS if the dial
        fails.
        """
        if await self._client.hosts_of(peer_id):
            return  # the peer is already connected, so the addresses do not matter
        believed = of_one_host(told, is_outside=self._guard.only_public)
        ways = [await guarded(self._guard, peer_id, address) for address in believed]
        if ways:
            await asyncio.wait_for(self._client.connect(peer_id, ways), self._wait_s)
            if (host := host_in(ways[0])) in await self._client.hosts_of(peer_id):
                self._guard.reached(peer_id, host)

    async def _ask_itself(self, peer: PeerID) -> bytes:
        """Ask a neighbour for its own addresses. Raises DirectoryError if too many requests are already waiting for its
        answer.
        """
        if self._waiting[peer] >= MAX_WAITING:
            raise DirectoryError("too many requests are waiting for that peer; try again later")
        self._waiting[peer] += 1
        addresses = b""
        try:
            with suppress(*ANSWER_FAULTS):
                addresses = pack(unpack(await self._ask(peer, b"")))
        finally:
            count_down(self._waiting, peer)
        _put(self._addresses, peer, (time.monotonic(), addresses))
        return addresses

    async def _ask(self, peer: PeerID, question: bytes) -> bytes:
        asking = self._client.ask(peer, LOCATE, question, most_bytes=MAX_ADDRESSES * (MAX_ADDRESS_CHARS + 1))
        return await asyncio.wait_for(asking, self._wait_s)


def pack(addresses: Iterable[str]) -> bytes:
    return "\n".join(by_reach(addresses)[:MAX_ADDRESSES]).encode()


def unpack(told: bytes) -> list[str]:
    """Return the addresses in an answer, without the invalid ones."""
    lines = told.decode(errors="replace").split("\n")[:MAX_ADDRESSES]
    return [line for line in lines if len(line) <= MAX_ADDRESS_CHARS and line.isascii() and tcp_target(line)]


def _put(table: OrderedDict[K, V], key: K, value: V) -> None:
    """Insert an entry as the newest one. If there are more than MAX_PEERS, remove the oldest."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > MAX_PEERS:
        table.popitem(last=False)
