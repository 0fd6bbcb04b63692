"""Hostile connections to the port of a peer cost it a line in the log, and cost other peers nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from adversarial.connections import JUNK, dripping, leave, visit
from harness.identities import identity_of
from harness.loopback import LoopbackSwarm
from harness.patience import PATIENCE_S, PATIENT
from harness.specs import FP32
from harness.swapping import Swapping, random_vector, swap_all, wait_until
from peer_stub import PeerStub

from noloco_p2p.errors import PeerError, Refused
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Hello, PeerStatus, Refuse, RefuseCode
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.connection import Connector, grpc_target, split_address
from noloco_p2p.net.server import MAX_CALLS_PER_PEER, GrpcServer
from noloco_p2p.net.session import Session
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.spec import OuterSpec, RunSpec

SPEC = RunSpec(name="entry", codec=FP32, outer=OuterSpec(wait=True))
PROGRESS = 0.5
PING = Refuse(RefuseCode.BUSY, "still here?")
HANDSHAKE_S, IDLE_S = 5.0, 8.0
FEW = 24  # open connections of one network, however many it dials


class Echoing:
    """A Service that echoes frames and reports its status."""

    def admit(self, hello: Hello) -> None:
        """Admit every caller."""

    async def on_swap(self, stream: FrameStream) -> None:
        try:
            while True:
                await stream.send(await stream.receive(PATIENCE_S))
        except PeerError:
            pass

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        return PeerStatus(Hello("answerer", SPEC.name, SPEC.digest()), "training", PROGRESS)

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        raise NotImplementedError


@asynccontextmanager
async def echoing() -> AsyncIterator[Candidate]:
    session = Session(identity_of("answerer"))
    server = GrpcServer(Echoing(), session=session)
    await server.start("127.0.0.1", 0)
    try:
        yield Candidate(session.identity.peer_id, f"127.0.0.1:{server.port}", session_key=session.key)
    finally:
        await server.stop(0.0)


def transport(name: str = "caller") -> GrpcTransport:
    session = Session(identity_of(name))
    return GrpcTransport(lambda: Hello(session.identity.peer_id, SPEC.name, SPEC.digest()), session=session)


def port_of(there: Candidate) -> int:
    return int(there.address.rpartition(":")[2])


def rss_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20


async def is_served(there: Candidate, *, timeout_s: float = PATIENCE_S) -> bool:
    try:
        return (await transport("another").status(there, timeout_s=timeout_s)).progress == PROGRESS
    except PeerError:
        return False


async def until_served(there: Candidate) -> float:
    """Return the seconds until a new peer is answered."""
    began_s = time.monotonic()
    while not await is_served(there, timeout_s=3.0):
        assert time.monotonic() - began_s < PATIENCE_S
        await asyncio.sleep(0.1)
    return time.monotonic() - began_s


def num_open(port: int) -> int:
    """Return the number of connections that the peer at this port holds open."""
    connections = psutil.Process().net_connections(kind="tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in connections)


async def ping(stream: FrameStream) -> None:
    await stream.send(PING)
    assert await stream.receive(PATIENCE_S) == PING


async def test_nonsense_at_the_port_costs_no_memory_and_no_swap(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with echoing() as there:
        stream = await transport().open_swap(there, timeout_s=PATIENCE_S)
        await ping(stream)
        for junk in JUNK.values():  # the first visit of each kind makes lasting allocations
            await leave([await visit(port_of(there), junk)])
        before_mib = rss_mib()
        for _ in range(20):
            await leave([await visit(port_of(there), junk) for junk in JUNK.values()])
            await leave([await visit(port_of(there), junk, tls=True) for junk in list(JUNK.values())[:2]])
            await ping(stream)
        assert rss_mib() - before_mib < 5.0
        assert await is_served(there)
        await stream.close()
    assert not caplog.records


async def test_a_flood_of_silent_connections_passes_and_the_running_swap_goes_on() -> None:
    """Some connections send nothing, some finish the TLS handshake and make no call; none of them closes."""
    async with echoing() as there:
        stream = await transport().open_swap(there, timeout_s=PATIENCE_S)
        await ping(stream)
        before_mib = rss_mib()
        silent = [await visit(port_of(there), b"", tls=True) for _ in range(30)]
        silent += [await visit(port_of(there), b"") for _ in range(400)]
        seconds = await until_served(there)
        assert num_open(port_of(there)) <= FEW, "the others made room at once, and did not wait to be timed out"
        assert rss_mib() - before_mib < 30.0  # this process holds both ends of each connection
        assert seconds < 3 * max(HANDSHAKE_S, IDLE_S), "10 s are promised, and machines are shared"
        await ping(stream)
        await stream.close()
        await leave(silent)


async def test_one_peer_may_have_so_many_calls_open_and_no_more() -> None:
    async with echoing() as there:
        greedy = transport("greedy")
        streams = [await greedy.open_swap(there, timeout_s=PATIENCE_S) for _ in range(MAX_CALLS_PER_PEER)]
        for stream in streams:
            await ping(stream)
        with pytest.raises(Refused, match=f"{MAX_CALLS_PER_PEER} open calls"):
            await greedy.status(there, timeout_s=PATIENCE_S)
        assert await is_served(there), "others are not meant"
        await streams.pop().close()
        assert (await greedy.status(there, timeout_s=PATIENCE_S)).progress == PROGRESS
        for stream in streams:
            await stream.close()


async def test_a_message_that_is_compressed_is_refused() -> None:
    """A compressed message of 1 MiB can hold 1 GiB, and the limit of gRPC applies after decompression."""
    async with echoing() as there:
        host, port = split_address(there)
        channel = Connector(Session(identity_of("bomber")))._channel(there, grpc_target(host, port))
        request = pb.StatusRequest(swap_id=bytes(900_000))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await PeerStub(channel).Status(request, compression=grpc.Compression.Gzip, timeout=PATIENCE_S)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await channel.close()


def test_a_partner_whose_bytes_drip_is_given_up_by_progress() -> None:
    """A trickle of bytes keeps TCP alive but is no progress of a swap, which counts whole chunks."""
    with LoopbackSwarm(SPEC, deadlines=replace(PATIENT, progress_s=1.0)) as swarm:
        peers = [swarm.peer("a"), swarm.peer("b")]
        proxies = [
            dripping(port_of(Candidate("", address)), after_bytes=300_000) for address in swarm.addresses.values()
        ]

        async def enter() -> list[int]:
            return [await proxy.__aenter__() for proxy in proxies]

        async def end() -> None:
            for proxy in proxies:
                await proxy.__aexit__(None, None, None)

        ports = on(swarm, enter())
        for name, port in zip("ab", ports, strict=True):
            swarm.addresses[name] = f"127.0.0.1:{port}"
        dripped = [Swapping(peer, random_vector(seed, 600_000)) for seed, peer in enumerate(peers)]
        with ThreadPoolExecutor(1) as thread:
            swaps = thread.submit(swap_all, dripped)
            wait_until(lambda: any(peer.counts.failures["slow"] for peer in dripped))
            for peer in dripped:
                peer.exchange.hurry()
        assert swaps.result() == []
        on(swarm, end())


def on(swarm: LoopbackSwarm, coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, swarm.loop).result(PATIENCE_S)
