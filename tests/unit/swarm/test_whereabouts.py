"""Where nodes are that others tell of: neighbours alone are told of, and what is told has bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, cast

import pytest
from hivemind.dht.routing import RoutingTable
from hivemind.p2p import PeerID

from noloco_p2p.errors import DirectoryError
from noloco_p2p.swarm.neighbourhood import claim, place_of
from noloco_p2p.swarm.whereabouts import DIALS, MAX_ADDRESSES, MAX_PEERS, Whereabouts, pack, unpack
from noloco_p2p.testing.identities import identity_of

ME, NEAR, TELLER = (PeerID.from_base58(identity_of(name).peer_id) for name in ("me", "near", "teller"))
THERE = "/ip4/192.0.2.7/tcp/4001"


class Client:
    """Stands for p2pd: notes what is asked and dialled."""

    peer_id = ME

    def __init__(self, answer: bytes = b"") -> None:
        self.answer = answer
        self.asked: list[tuple[PeerID, bytes]] = []
        self.dialled: list[tuple[str, list[str]]] = []

    async def ask(self, peer: PeerID, protocol: str, question: bytes) -> bytes:
        self.asked.append((peer, question))
        return self.answer

    async def connect(self, peer_id: str, addresses: list[str]) -> None:
        self.dialled.append((peer_id, addresses))


def made(client: Client) -> tuple[Whereabouts, RoutingTable]:
    table = RoutingTable(place_of(str(ME)), bucket_size=20, depth_modulo=5)
    return Whereabouts(cast(Any, client), table, own_addresses=lambda: ["/ip4/192.0.2.1/tcp/1"], wait_s=1.0), table


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
    peers = [PeerID(b"\x00\x24\x08\x01\x12\x20" + number.to_bytes(32, "big")) for number in range(2 * MAX_PEERS)]
    whereabouts.heard(peers, TELLER)
    assert len(whereabouts._told_by) == MAX_PEERS

    async def call_all() -> None:
        for peer in peers:
            await whereabouts.make_way_to(peer)

    asyncio.run(call_all())
    assert DIALS.burst <= len(client.dialled) < 2 * DIALS.burst


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
