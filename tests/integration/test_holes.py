"""Hole punching through emulated routers between network namespaces, with real sockets: the main router types."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress

import netlab
import pytest
from harness.holes import Homes
from harness.nat import Router
from harness.patience import PATIENCE_S

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import Unreachable
from noloco_p2p.swarm.punch import TOKEN_BYTES, Hole, Words, answer_through_hole
from noloco_p2p.tcp import Mirror

OPEN, BY_ADDRESS, USUAL, STRICT = (
    Router("endpoint", "endpoint"),
    Router("endpoint", "address"),
    Router("endpoint", "port"),
    Router("port", "port"),
)
FIRST, SECOND = (1, 2, 3, 4, 5), (6, 7, 8, 9, 10)  # nodes, one behind each router: every type twice
MATE = 11  # of the node behind the first strict router
KINDS = [OPEN, BY_ADDRESS, USUAL, STRICT]


@pytest.fixture(scope="module")
def homes() -> Iterator[Homes]:
    carried = Router("endpoint", "port", behind=0)  # a home behind a carrier-grade NAT, the first router
    routers = [*KINDS, carried, *KINDS, Router("endpoint", "port", behind=5)]
    with Homes(routers, [*range(10), 3], round_trip_ms=10) as made:
        yield made


needs_lab = pytest.mark.skipif(bool(netlab.why_not()), reason=netlab.why_not())


@needs_lab
@pytest.mark.parametrize("one", [0, 1, 2, 4], ids=["open", "by address", "by port", "carrier"])
@pytest.mark.parametrize("other", [0, 1, 2, 4], ids=["open", "by address", "by port", "carrier"])
def test_routers_that_keep_one_port_for_all_partners_let_peers_meet(homes: Homes, one: int, other: int) -> None:
    assert homes.meet(FIRST[one], SECOND[other])


@needs_lab
@pytest.mark.parametrize("one", [0, 1])
def test_a_router_with_a_port_for_each_partner_meets_one_that_lets_its_address_in(homes: Homes, one: int) -> None:
    assert homes.meet(FIRST[3], SECOND[one])
    assert homes.meet(FIRST[one], SECOND[3])


@needs_lab
def test_two_such_routers_leave_it_to_the_relay(homes: Homes) -> None:
    assert homes.meet(FIRST[3], SECOND[3]) is None


@needs_lab
def test_two_peers_of_one_household_meet_at_home(homes: Homes) -> None:
    met = homes.meet(FIRST[3], MATE)
    assert met
    assert met.far == homes.lab.nodes[MATE].address


# without routers: what a partner may send


async def mirrored() -> tuple[Mirror, tuple[str, int]]:
    mirror = Mirror()
    return mirror, ("127.0.0.1", await mirror.start("127.0.0.1", 0))


async def test_a_port_is_seen_as_it_is_and_shared_by_what_is_bound_to_it() -> None:
    mirror, observer = await mirrored()
    with Hole(DialGuard()) as hole:
        await hole.look(observer)
        assert hole.seen == hole.local
        assert 0 <= hole.round_trip_s < PATIENCE_S
    await mirror.stop()


@pytest.mark.parametrize("token", [bytes(TOKEN_BYTES), b"", b"\x16\x03\x01 TLS of somebody"])
async def test_who_does_not_know_the_token_is_not_the_partner(token: bytes) -> None:
    mirror, observer = await mirrored()
    hole, loop = Hole(DialGuard()), asyncio.get_running_loop()
    await hole.look(observer)
    opening = asyncio.create_task(hole.open([], b"t" * TOKEN_BYTES, says_first=False))
    with hole, socket.socket() as stranger, socket.socket() as partner:
        for each in (stranger, partner):
            each.setblocking(False)
            await loop.sock_connect(each, hole.local)
        await loop.sock_sendall(stranger, token)
        await loop.sock_sendall(partner, b"t" * TOKEN_BYTES)
        with await opening as found:
            assert found.getpeername() == partner.getsockname()
            assert await loop.sock_recv(partner, 64) == b"t" * TOKEN_BYTES
            with suppress(ConnectionResetError):  # the stranger's words may be unread
                assert await loop.sock_recv(stranger, 64) == b""
    await mirror.stop()


async def test_a_partner_that_names_a_third_machine_is_stopped_by_the_guard() -> None:
    """Dials to a machine count together for all peers that name it."""
    mirror, observer = await mirrored()
    guard = DialGuard()
    for _ in range(20):
        await guard.way("somebody", "127.0.0.9")
    near, far = socket.socketpair()
    relay, liar = await asyncio.open_connection(sock=near), await asyncio.open_connection(sock=far)
    answering = asyncio.create_task(answer_through_hole(guard, relay, observer))
    liar[1].write(Words(("127.0.0.9", 22), token=bytes(TOKEN_BYTES)).line())
    with pytest.raises(Unreachable, match=r"attempts to dial 127\.0\.0\.9 failed"):
        await answering
    for _, writer in (relay, liar):
        writer.close()
        await writer.wait_closed()
    await mirror.stop()
