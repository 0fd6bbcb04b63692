"""Over real gRPC and TLS on loopback, a call reaches the peer that the record names, or fails."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from harness.identities import identity_of
from harness.patience import AT_ONCE_S, PATIENCE_S

from noloco_p2p.errors import CorruptPayload, PeerError, Refused, Unreachable
from noloco_p2p.gossip.frames import (
    Accept,
    FetchItem,
    FetchWant,
    Frame,
    Hello,
    Offer,
    PeerStatus,
    Slice,
    SpecJson,
    Standing,
    StateChunk,
    WantChunks,
    WantSpec,
)
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.connection import Connector
from noloco_p2p.net.proxy import UNPROVEN_OF_ONE
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session
from noloco_p2p.spec import RunSpec
from noloco_p2p.swarm.relay import splice

SPEC = RunSpec(name="entry")
STANDING = Standing(0.5, 1.0, 0.0)
CALLER = Session(identity_of("caller"))


class Answering:
    """A Service that accepts every call and records the callers."""

    def __init__(self) -> None:
        self.admitted: list[str] = []
        self.frames: list[Frame | PeerError] = []
        self.pause_s = 0.01  # between two items of a fetch

    def admit(self, hello: Hello) -> None:
        self.admitted.append(hello.peer_id)

    async def on_swap(self, stream: FrameStream) -> None:
        try:
            offer = await stream.receive(PATIENCE_S)
            self.frames.append(offer)
            await stream.send(Accept(hello_of("answerer"), STANDING, Slice(0, 1)))
            while True:
                self.frames.append(await stream.receive(PATIENCE_S))
        except PeerError as error:
            self.frames.append(error)

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        return PeerStatus(hello_of("answerer"), "training", STANDING.progress)

    async def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        while isinstance(want, WantChunks):
            yield StateChunk(0, b"")
            await asyncio.sleep(self.pause_s)
        yield SpecJson(SPEC.canonical_json())


def hello_of(name: str) -> Hello:
    return Hello(identity_of(name).peer_id, SPEC.name, SPEC.digest())


@asynccontextmanager
async def answering() -> AsyncGenerator[tuple[Answering, Candidate]]:
    service, session = Answering(), Session(identity_of("answerer"))
    server = GrpcServer(service, session=session)
    await server.start("127.0.0.1", 0)
    try:
        yield service, Candidate(session.identity.peer_id, f"127.0.0.1:{server.port}", session_key=session.key)
    finally:
        await server.stop(0.0)


def transport(session: Session | None = CALLER, *, name: str = "caller") -> GrpcTransport:
    return GrpcTransport(lambda: hello_of(name), session=session)


async def first_item(transport: GrpcTransport, there: Candidate) -> FetchItem:
    return await anext(transport.fetch(there, WantSpec(), timeout_s=PATIENCE_S))


async def rest(items: AsyncGenerator[FetchItem]) -> list[FetchItem]:
    return [item async for item in items]


async def test_every_call_goes_over_tls_and_names_its_caller() -> None:
    async with answering() as (service, there):
        assert (await transport().status(there, timeout_s=PATIENCE_S)).progress == STANDING.progress
        assert await first_item(transport(), there) == SpecJson(SPEC.canonical_json())
        stream = await transport().open_swap(there, timeout_s=PATIENCE_S)
        await stream.send(Offer(hello_of("caller"), bytes(16), STANDING, b"\x01", 1))
        assert isinstance(await stream.receive(PATIENCE_S), Accept)
        await stream.close()
        assert set(service.admitted) == {CALLER.identity.peer_id}


async def test_connections_that_a_relay_brings_are_served_and_count_for_that_relay() -> None:
    session = Session(identity_of("answerer"))
    server = GrpcServer(Answering(), session=session)
    await server.start("127.0.0.1", 0)

    def bring(relay: str) -> socket.socket:
        near, far = socket.socketpair()
        near.setblocking(False)
        server.take(far, relay)
        return near

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await splice((reader, writer), await asyncio.open_unix_connection(sock=bring("good")))

    bad = [bring("bad") for _ in range(3 * UNPROVEN_OF_ONE)]
    good = [bring("good") for _ in range(UNPROVEN_OF_ONE - 1)]
    async with await asyncio.start_server(forward, "127.0.0.1", 0) as relay:
        address = f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
        there = Candidate(session.identity.peer_id, address, session_key=session.key)
        assert (await transport().status(there, timeout_s=PATIENCE_S)).progress == STANDING.progress
    assert [is_open(each) for each in bad].count(True) == UNPROVEN_OF_ONE
    assert all(map(is_open, good))
    await server.stop(0.0)
    for each in bad + good:
        each.close()


def is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


async def test_a_way_that_opens_slowly_does_not_count_as_a_long_round_trip() -> None:
    """A hole opens only after the relay has helped, and the round trip decides how long a swap tries connections."""
    slow_s = 1.0

    async def open_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(slow_s)
        await splice((reader, writer), await asyncio.open_connection(*there.address.split(":")))

    async with answering() as (_, there), await asyncio.start_server(open_slowly, "127.0.0.1", 0) as slow:
        port = slow.sockets[0].getsockname()[1]
        by_way = replace(there, address=f"127.0.0.1:{port}")
        wire = await Connector(CALLER).call(by_way, "Status", timeout_s=PATIENCE_S)
        assert 0 < wire.round_trip_s < slow_s / 2
        await wire.close()


async def test_a_peer_that_is_not_on_the_local_network_is_called_at_its_public_address() -> None:
    async with answering() as (service, there), answering() as (other, elsewhere):
        nearby = replace(there, address=elsewhere.address, nearby=there.address)
        for candidate in (nearby, replace(there, nearby="127.0.0.1:1"), replace(there, nearby=elsewhere.address)):
            await transport().status(candidate, timeout_s=PATIENCE_S)
        assert not other.admitted
        assert service.admitted


async def test_another_session_key_is_not_talked_to() -> None:
    """The peer has restarted, or another process listens at its address."""
    async with answering() as (service, there):
        began_s = time.monotonic()
        for key in (Session(identity_of("answerer")).key, b"", bytes(33), b"\x02" + bytes(32)):
            with pytest.raises(Unreachable, match="session key"):
                await transport().status(replace(there, session_key=key), timeout_s=PATIENCE_S)
        assert time.monotonic() - began_s < AT_ONCE_S
        assert not service.admitted


async def test_a_record_that_claims_the_session_of_another_leads_nowhere() -> None:
    async with answering() as (service, there):
        thief = replace(there, peer_id=identity_of("thief").peer_id)
        with pytest.raises(Unreachable, match="session key does not match its record"):
            await transport().status(thief, timeout_s=PATIENCE_S)
        assert not service.admitted


@pytest.mark.parametrize("session", [None, CALLER])
async def test_plain_and_tls_do_not_mix(session: Session | None) -> None:
    server = GrpcServer(Answering(), session=None if session else Session(identity_of("answerer")))
    await server.start("127.0.0.1", 0)
    there = Candidate("x", f"127.0.0.1:{server.port}", session_key=CALLER.key)
    with pytest.raises(PeerError):
        await transport(session).status(there, timeout_s=2.0)
    await server.stop(0.0)


async def test_a_hello_in_the_name_of_another_is_refused() -> None:
    async with answering() as (service, there):
        liar = transport(name="somebody else")
        with pytest.raises(Refused, match="claims to be another peer"):
            await liar.status(there, timeout_s=PATIENCE_S)
        with pytest.raises(Refused, match="claims to be another peer"):
            await first_item(liar, there)
        stream = await liar.open_swap(there, timeout_s=PATIENCE_S)
        await stream.send(Offer(hello_of("somebody else"), bytes(16), STANDING, b"\x01", 1))
        with pytest.raises(PeerError):
            await stream.receive(PATIENCE_S)
        await stream.close()
        [fault] = service.frames
        assert isinstance(fault, CorruptPayload)
        assert not service.admitted


async def test_the_newest_fetch_of_a_peer_is_the_one_that_counts() -> None:
    """Otherwise one peer could hold a slot with each of its calls."""
    want = WantChunks(bytes(32), (0,))
    async with answering() as (_, there):
        older, newer = (transport().fetch(there, want, timeout_s=PATIENCE_S) for _ in range(2))
        friend = transport(Session(identity_of("friend")), name="friend").fetch(there, want, timeout_s=PATIENCE_S)
        for items in (older, friend, newer):
            assert isinstance(await anext(items), StateChunk)
        assert isinstance(await first_item(transport(), there), SpecJson), "which ends none of them"
        with pytest.raises(Refused, match="another fetch in progress"):
            await rest(older)
        for items in (newer, friend):
            for _ in range(5):
                assert isinstance(await anext(items), StateChunk)
            await items.aclose()


async def test_a_third_fetch_of_a_peer_is_refused() -> None:
    """An older fetch ends only with its next item, which may be seconds later."""
    want = WantChunks(bytes(32), (0,))
    async with answering() as (service, there):
        service.pause_s = PATIENCE_S
        fetches = [transport().fetch(there, want, timeout_s=PATIENCE_S) for _ in range(12)]
        for items in fetches[:2]:
            assert isinstance(await anext(items), StateChunk)
        for items in fetches[2:]:
            with pytest.raises(Refused, match="another fetch in progress"):
                await anext(items)
        for items in fetches:
            await items.aclose()
