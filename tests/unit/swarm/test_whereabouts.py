"""The addresses of nodes that others report: a node reports only its neighbours, and each report is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, cast

import pytest
from harness.identities import identity_of
from harness.patience import PATIENCE_S
from hivemind.dht.routing import RoutingTable
from hivemind.p2p import PeerID

from noloco_p2p.dial_guard import FAILURES_A_MINUTE, DialGuard
from noloco_p2p.errors import DirectoryError
from noloco_p2p.swarm.addresses import host_in
from noloco_p2p.swarm.kademlia.protocol import claim, place_of
from noloco_p2p.swarm.kademlia.whereabouts import (
    DIALS_AT_ONCE,
    MAX_ADDRESSES,
    MAX_PEERS,
    MAX_WAITING,
    Whereabouts,
    pack,
    unpack,
)

ME, NEAR, TELLER = (PeerID.from_base58(identity_of(name).peer_id) for name in ("me", "near", "teller"))
THERE = "/ip4/192.0.2.7/tcp/4001"


class Client:
    """Stands in for p2pd: records questions and dials."""

    peer_id = ME

    def __init__(self, answer: bytes = b"", fault: Exception | None = None) -> None:
        self.answer = answer
        self.fault = fault  # raised by dials
        self.asked: list[tuple[PeerID, bytes]] = []
        self.dialled: list[tuple[str, list[str]]] = []
        self.hosts: dict[str, set[str]] = {}  # hosts of existing connections

    async def ask(self, peer: PeerID, protocol: str, question: bytes, *, most_bytes: int) -> bytes:
        self.asked.append((peer, question))
        if not self.answer:
            raise TimeoutError
        return self.answer

    async def connect(self, peer_id: str, addresses: list[str]) -> None:
        self.dialled.append((peer_id, addresses))
        if self.fault:
            raise self.fault
        self.hosts[peer_id] = {host_in(addresses[0])}

    async def hosts_of(self, peer_id: str) -> set[str]:
        return self.hosts.get(peer_id, set())


class SilentClient(Client):
    """A client whose questions are never answered."""

    num_asked = 0

    async def ask(self, peer: PeerID, protocol: str, question: bytes, *, most_bytes: int) -> bytes:
        self.num_asked += 1
        await asyncio.sleep(PATIENCE_S)
        return b""


def made(client: Client, guard: DialGuard | None = None) -> tuple[Whereabouts, RoutingTable]:
    table = RoutingTable(place_of(str(ME)), bucket_size=20, depth_modulo=5)
    own, guard = ["/ip4/192.0.2.1/tcp/1"], guard or DialGuard()
    return Whereabouts(cast(Any, client), table, own_addresses=lambda: own, guard=guard, wait_s=1.0), table


def invented(number: int) -> list[PeerID]:
    return [PeerID(b"\x00\x24\x08\x01\x12\x20" + each.to_bytes(32, "big")) for each in range(number)]


async def call(whereabouts: Whereabouts, peers: list[PeerID]) -> None:
    whereabouts.heard(peers, TELLER)
    for peer in peers:
        await whereabouts.make_way_to(peer)


async def told(answer: bytes | Awaitable[bytes]) -> bytes:
    return answer if isinstance(answer, bytes) else await answer


def test_a_node_tells_where_it_is_and_where_its_neighbours_say_that_they_are() -> None:
    client = Client(f"{THERE}\nnonsense\n".encode())
    whereabouts, table = made(client)
    assert whereabouts.tell(b"", TELLER) == b"/ip4/192.0.2.1/tcp/1"
    with pytest.raises(DirectoryError, match="does not know that peer"):
        whereabouts.tell(NEAR.to_bytes(), TELLER)
    claim(table, place_of(str(NEAR)), NEAR)
    for _ in range(3):
        assert asyncio.run(told(whereabouts.tell(NEAR.to_bytes(), TELLER))) == THERE.encode()
    assert client.asked == [(NEAR, b"")], "a neighbour is asked once"


def test_a_neighbour_that_is_silent_is_not_asked_for_everybody_who_asks() -> None:
    client = Client()
    whereabouts, table = made(client)
    claim(table, place_of(str(NEAR)), NEAR)
    assert asyncio.run(told(whereabouts.tell(NEAR.to_bytes(), TELLER))) == b""
    for _ in range(3):
        assert whereabouts.tell(NEAR.to_bytes(), TELLER) == b"", "nobody has to wait for that"
    assert client.asked == [(NEAR, b"")]


def test_few_wait_for_one_neighbour_that_is_silent() -> None:
    """Otherwise 16 identities with four questions each would take all 64 places for waiting answers."""

    async def main() -> None:
        client = SilentClient()
        whereabouts, table = made(client)
        claim(table, place_of(str(NEAR)), NEAR)
        questions = [told(whereabouts.tell(NEAR.to_bytes(), TELLER)) for _ in range(64)]
        answers = await asyncio.gather(*questions, return_exceptions=True)
        assert answers.count(b"") == client.num_asked == MAX_WAITING
        assert all(isinstance(answer, DirectoryError) for answer in answers if answer != b"")
        assert not whereabouts._waiting

    asyncio.run(main())


def test_a_node_that_was_told_of_is_dialled_once_and_a_neighbour_never() -> None:
    client = Client(THERE.encode())
    whereabouts, table = made(client)
    asyncio.run(whereabouts.make_way_to(NEAR))
    assert not client.asked, "nobody has told of it"
    for _ in range(3):
        whereabouts.heard([NEAR, ME], TELLER)
        asyncio.run(whereabouts.make_way_to(NEAR))
        asyncio.run(whereabouts.make_way_to(ME))
    assert client.asked == [(TELLER, NEAR.to_bytes())]
    assert client.dialled == [(str(NEAR), [THERE])]
    claim(table, place_of(str(TELLER)), TELLER)
    whereabouts.heard([TELLER], NEAR)
    asyncio.run(whereabouts.make_way_to(TELLER))
    assert len(client.dialled) == 1


def test_inventions_are_dialled_at_a_rate_and_forgotten() -> None:
    client = Client(THERE.encode())
    whereabouts, _ = made(client)
    peers = invented(2 * MAX_PEERS)
    whereabouts.heard(peers, TELLER)
    assert len(whereabouts._told_by) == MAX_PEERS
    asyncio.run(call(whereabouts, peers))
    assert DIALS_AT_ONCE <= len(client.dialled) < 2 * DIALS_AT_ONCE


def test_a_node_is_dialled_at_one_host_which_is_public_where_this_one_is() -> None:
    there = ["/ip4/10.0.0.1/tcp/80", "/ip4/127.0.0.1/tcp/80", "/ip4/198.41.0.4/tcp/1", "/ip4/198.41.0.5/tcp/2"]
    for only_public, dialled in ((True, there[2]), (False, there[0])):
        client = Client("\n".join(there).encode())
        whereabouts, _ = made(client, DialGuard(only_public=only_public))
        asyncio.run(call(whereabouts, [NEAR]))
        assert client.dialled == [(str(NEAR), [dialled])]


def test_a_node_that_is_connected_is_not_taken_to_be_where_a_liar_says() -> None:
    """libp2p would report success without a dial, and later dials to that host would not be counted."""
    client, guard = Client(THERE.encode()), DialGuard()
    client.hosts[str(NEAR)] = {"192.0.2.9"}
    whereabouts, _ = made(client, guard)
    asyncio.run(call(whereabouts, [NEAR]))
    assert not client.dialled
    assert not guard._reached


def test_nodes_that_were_reached_use_up_no_dials_of_their_host() -> None:
    client = Client(THERE.encode())
    whereabouts, _ = made(client)
    asyncio.run(call(whereabouts, invented(2 * FAILURES_A_MINUTE)))
    assert len(client.dialled) == 2 * FAILURES_A_MINUTE


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe",
        b"/ip4/192.0.2.7/udp/4001/quic-v1",
        b"/unix/tmp/socket",
        b"/ip4/192.0.2.7/tcp/4001/p2p/12D3KooW/p2p-circuit",
        b"/dns4/" + b"x" * 300 + b"/tcp/1",
        "/dns4/ä.example/tcp/1".encode(),
    ],
)
def test_what_is_no_address_to_dial_is_left_out(data: bytes) -> None:
    assert unpack(data) == []


def test_only_so_many_addresses_are_told_and_believed() -> None:
    many = [f"/ip4/192.0.2.7/tcp/{port}" for port in range(1, 100)]
    assert len(unpack("\n".join(many).encode())) == MAX_ADDRESSES
    assert unpack(pack(many)) == many[:MAX_ADDRESSES]
