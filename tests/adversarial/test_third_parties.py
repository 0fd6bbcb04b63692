"""Records that name hosts of third parties do not make a peer attack those hosts."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness.identities import identity_of
from harness.patience import PATIENCE_S, until
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from noloco_p2p.dial_guard import FAILURES_A_MINUTE, DialGuard
from noloco_p2p.errors import DirectoryError, PeerError, Unreachable
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import Identity
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.session import Session
from noloco_p2p.swarm.buckets import ROOT, run_key
from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.daemon import ListenOn, probe_port
from noloco_p2p.swarm.directory import SwarmDirectory, Timing
from noloco_p2p.swarm.kademlia.whereabouts import MAX_ADDRESSES
from noloco_p2p.swarm.node import SwarmNode
from noloco_p2p.swarm.records import TTL_S, PeerRecord, encode_record
from noloco_p2p.swarm.relay import RESERVE
from noloco_p2p.ticket import MAX_ADDRESSES as MAX_ENTRANCES

DIGEST = "ab" * 32
NUM_LIARS = 60
QUICK = Timing(heartbeat_s=2.0, view_s=0.2, quick_view_s=0.2, dial_s=0.5, freshen_s=1.0)


class Bystander:
    """A host that is in no swarm and counts the connections to it."""

    def __init__(self) -> None:
        self.num_dials = 0
        self._began_s = time.monotonic()

    def most(self) -> float:
        """Return the number of dials that a peer may have made so far: 20 at once and 20 a minute."""
        return FAILURES_A_MINUTE * (1 + (time.monotonic() - self._began_s) / 60)

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_dials += 1
        writer.close()


@asynccontextmanager
async def bystander() -> AsyncIterator[tuple[Bystander, int]]:
    there = Bystander()
    server = await asyncio.start_server(there.take, "127.0.0.9", 0)
    try:
        yield there, server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def directory(
    folder: Path, name: str, *bootstraps: str, spec_digest: str | None = DIGEST, own: Sequence[str] = ()
) -> AsyncIterator[SwarmDirectory]:
    path = folder / f"{name}.key"
    found = await SwarmDirectory(
        identity_path=path,
        identity=Identity.load_or_create(path),
        listen_host="127.0.0.1",
        listen_port=0,
        bootstraps=bootstraps,
        spec_digest=spec_digest,
        timing=QUICK,
        own_addresses=lambda: own,
    ).start()
    try:
        yield found
    finally:
        await found.stop()


def transport(guard: DialGuard | None = None) -> GrpcTransport:
    session = Session(identity_of("caller"))
    return GrpcTransport(lambda: Hello(session.identity.peer_id, "r", DIGEST), session=session, guard=guard)


async def call(caller: GrpcTransport, liar: str, address: str) -> None:
    """Call a peer as a round calls the peers of the directory."""
    key = Session(identity_of("liar")).key
    with suppress(PeerError):
        await caller.status(Candidate(liar, address, session_key=key), timeout_s=PATIENCE_S)


async def test_calls_of_a_host_where_no_peer_is_are_few() -> None:
    caller = transport()
    async with bystander() as (there, port):
        for number in range(NUM_LIARS):
            await call(caller, f"liar {number}", f"127.0.0.9:{port}")
        assert 0 < there.num_dials <= there.most()


async def test_what_grpc_takes_for_an_address_and_is_none_is_not_called(tmp_path: Path) -> None:
    """gRPC would open a Unix socket, or query a name server of the liar's choice."""
    there, path = Bystander(), str(tmp_path / "s")
    server = await asyncio.start_unix_server(there.take, path)
    async with bystander() as (other, port):
        for address in (f"unix:{path}", f"unix://{path}", f"dns:///127.0.0.9:{port}", f"ipv4:127.0.0.9:{port}"):
            await call(transport(), "liar", address)
    server.close()
    assert (there.num_dials, other.num_dials) == (0, 0)


async def test_a_peer_that_is_connected_is_not_taken_to_be_where_it_says(tmp_path: Path) -> None:
    """libp2p does not dial a peer that is connected, and reports success for any address."""
    async with (
        bystander() as (there, port),
        directory(tmp_path, "liar", spec_digest=None) as evil,
        directory(tmp_path, "victim", *evil.multiaddrs()) as victim,
    ):
        lie, guard = f"/ip4/127.0.0.9/tcp/{port}", victim.node.guard
        await until(lambda: (evil.peer_id, "127.0.0.1") in guard._reached)
        _, stream = await victim.node.open_stream(evil.peer_id, RESERVE, at=lie)
        stream.close()
        protocol: Any = victim.node._dht.bounded  # pyright: ignore[reportOptionalMemberAccess]
        await protocol.whereabouts._dial(evil.peer_id, [lie])
        await victim.dialer._dial_one(evil.peer_id, [f"{lie}/p2p/{evil.peer_id}"])
        assert there.num_dials <= 1, "a plain socket"
        assert len(guard._reached) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, nothing keeps p2pd from dialling QUIC addresses")
async def test_quic_is_neither_listened_on_nor_dialled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libp2p remembers the addresses that a node claims when it connects, and dials them when the node is gone."""
    async with bystander() as (there, port), directory(tmp_path, "victim", spec_digest=None) as victim:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packets:
            packets.bind(("127.0.0.9", 0))
            packets.setblocking(False)
            quic = f"/ip4/127.0.0.9/udp/{packets.getsockname()[1]}/quic-v1"
            lies = f"-announceAddrs={quic},/ip4/127.0.0.9/tcp/{port}"
            with monkeypatch.context() as patch:
                plain = ListenOn.arguments
                patch.setattr(ListenOn, "arguments", lambda self: [*plain(self), lies])
                free = ListenOn("127.0.0.1", probe_port("127.0.0.1", 0))
                path = tmp_path / "liar.key"
                liar = await SwarmNode(path, Identity.load_or_create(path).peer_id, free).start()
            address, _, peer_id = victim.multiaddrs()[0].partition("/p2p/")
            await liar.dial(peer_id, [address])
            await until(lambda: liar.peer_id in victim.node.neighbours())
            await liar.stop()
            protocol: Any = victim.node._dht.bounded  # pyright: ignore[reportOptionalMemberAccess]
            while not there.num_dials:  # until p2pd has noticed that the liar is gone, and dials its addresses
                assert await protocol.call_ping(PeerID.from_base58(liar.peer_id)) is None
            with pytest.raises(DirectoryError, match="not all of these are TCP addresses"):
                await protocol.p2p.connect(liar.peer_id, [quic])
            with pytest.raises(BlockingIOError):
                packets.recv(1)
            assert not psutil.Process(victim.node.daemon_pid).net_connections("udp")


async def test_the_entrances_of_a_ticket_are_tcp_addresses(tmp_path: Path) -> None:
    entrance = f"/ip4/127.0.0.9/udp/4001/quic-v1/p2p/{identity_of('entrance').peer_id}"
    async with directory(tmp_path, "victim", entrance) as victim:
        await until(victim.dialer.failures)
        assert "is not the TCP address of a peer" in victim.dialer.failures()[identity_of("entrance").peer_id]


def lies(port: int) -> list[tuple[str, bytes, float]]:
    """Return signed, well-formed records, each of which names many ports of a third party."""
    expires_at_s, told = CLOCK.now() + TTL_S, []
    for number in range(NUM_LIARS):
        liar = identity_of(f"liar {number}")
        record = PeerRecord(
            liar.peer_id,
            "r",
            DIGEST,
            addresses=(f"127.0.0.9:{port}",),
            multiaddrs=tuple(f"/ip4/127.0.0.9/tcp/{port}/p2p/{liar.peer_id}" for _ in range(2)),
            sequence=1,
            expires_at_s=expires_at_s,
        )
        told.append((liar.peer_id, encode_record(record, liar), expires_at_s))
    return told


async def test_the_addresses_in_records_of_liars_are_dialled_a_few_times(tmp_path: Path) -> None:
    async with (
        bystander() as (there, port),
        directory(tmp_path, "liar", spec_digest=None) as evil,
        directory(tmp_path, "victim", *evil.multiaddrs()) as victim,
    ):
        await until(lambda: bool(victim.node.neighbours()))
        for liar, record, expires_at_s in lies(port):
            await evil.node.store(ROOT.key(run_key(DIGEST)), liar, record, expires_at_s=expires_at_s)
        await until(lambda: len(victim.live()) >= NUM_LIARS)
        await until(lambda: len(victim.dialer._attempts) >= NUM_LIARS)
        assert 0 < there.num_dials <= there.most()


async def test_a_private_address_is_dialled_only_for_a_peer_behind_the_same_router(tmp_path: Path) -> None:
    own = ("45.77.0.9:31337", "192.168.7.2:31337")
    told = {"stranger": ("45.77.0.10:31337", "192.168.7.3:31337"), "mate": ("45.77.0.9:31347", "192.168.7.4:31337")}

    class Asked(DialGuard):
        async def way(self, peer_id: str, host: str, *, num_dials: int = 1, is_given: bool = False) -> str:
            dialled.setdefault(peer_id, []).append(host)
            raise Unreachable("nothing leaves this test", peer=peer_id)

    dialled: dict[str, list[str]] = {}
    async with (
        directory(tmp_path, "liar", spec_digest=None) as evil,
        directory(tmp_path, "victim", *evil.multiaddrs(), own=own) as victim,
    ):
        await until(lambda: bool(victim.node.neighbours()))
        expires_at_s = CLOCK.now() + TTL_S
        for name, addresses in told.items():
            who = identity_of(name)
            record = PeerRecord(who.peer_id, "r", DIGEST, addresses, sequence=1, expires_at_s=expires_at_s)
            value = encode_record(record, who)
            await evil.node.store(ROOT.key(run_key(DIGEST)), who.peer_id, value, expires_at_s=expires_at_s)
        await until(lambda: len(victim.live()) == len(told))
        for candidate in victim.live():
            with suppress(PeerError):
                await transport(Asked(only_public=True)).status(candidate, timeout_s=PATIENCE_S)
    stranger, mate = (dialled[identity_of(name).peer_id] for name in told)
    assert stranger == ["45.77.0.10"]
    assert mate == ["192.168.7.4", "45.77.0.9"]


@pytest.mark.parametrize("host", ["127.0.0.9", "localhost.example.org"], ids=["address", "name"])
async def test_the_entrances_that_a_ticket_invents_are_dialled_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """A public ticket can make everybody who joins dial the same host."""

    async def look_up(name: str) -> list[str]:
        return ["127.0.0.9"]

    monkeypatch.setattr("noloco_p2p.dial_guard.look_up", look_up)
    async with bystander() as (there, port):
        kind = "ip4" if host[0].isdigit() else "dns4"
        ids = [identity_of(f"entrance {number}").peer_id for number in range(MAX_ENTRANCES)]
        entrances = [f"/{kind}/{host}/tcp/{port}/p2p/{peer_id}" for peer_id in ids]
        async with directory(tmp_path, "victim", *entrances) as victim:

            def num_tried(times: int) -> int:
                return sum(each.failures >= times for each in victim.dialer._attempts.values())

            await until(lambda: num_tried(2) == MAX_ENTRANCES)
            assert 0 < there.num_dials <= there.most()


async def test_the_addresses_of_nodes_that_a_liar_invents_are_dialled_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer of the liar names another new node, always at the same host."""
    async with (
        bystander() as (there, port),
        directory(tmp_path, "liar", spec_digest=None) as evil,
        directory(tmp_path, "victim", *evil.multiaddrs()) as victim,
    ):
        await until(lambda: bool(victim.node.neighbours()))
        lie, named = "\n".join([f"/ip4/127.0.0.9/tcp/{port}"] * MAX_ADDRESSES).encode(), list[str]()
        protocol: Any = victim.node._dht.bounded  # pyright: ignore[reportOptionalMemberAccess]

        async def told(teller: object, question: bytes) -> bytes:
            named.append(question.hex())
            return lie

        monkeypatch.setattr(protocol.whereabouts, "_ask", told)
        for number in range(NUM_LIARS):
            invented = PeerID.from_base58(identity_of(f"invented {number}").peer_id)
            protocol.whereabouts.heard([invented], PeerID.from_base58(evil.peer_id))
            await protocol.call_find(invented, [DHTID.generate(str(number))])
        assert len(named) == NUM_LIARS
        assert 0 < there.num_dials <= there.most()
