"""A peer dials back those that ask for it, nobody else, and not too often."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from harness.patience import PATIENCE_S
from rogue_server import rogue

from noloco_p2p.errors import CorruptPayload, Refused
from noloco_p2p.gossip.frames import Hello, RefuseCode
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net import probe
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.tcp import ask_from_where

HELLO = Hello("caller", "r", "0" * 64)


class Admits:
    """The part of a Service that a probe needs."""

    def admit(self, hello: Hello) -> None:
        if hello.run_name != "r":
            raise Refused("another run", code=RefuseCode.OTHER_RUN.name)


@asynccontextmanager
async def peer() -> AsyncIterator[Candidate]:
    service: Any = Admits()
    server = GrpcServer(service)
    await server.start("127.0.0.1", 0)
    try:
        yield Candidate("answering", f"127.0.0.1:{server.port}")
    finally:
        await server.stop(0.1)


def test_open_and_closed_ports_are_told_apart_and_clocks_compared() -> None:
    async def main() -> probe.Probed:
        async with peer() as candidate:
            listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
            free = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
            ports = [server.sockets[0].getsockname()[1] for server in (listening, free)]
            free.close()
            await free.wait_closed()
            try:
                found = await probe.ask(candidate, HELLO, ports, timeout_s=PATIENCE_S)
            finally:
                listening.close()
            assert list(found.reached) == ports
            return found

    found = asyncio.run(main())
    assert found.observed_host == "127.0.0.1"
    assert [bool(why) for why in found.reached.values()] == [False, True]
    assert abs(found.clock_offset_s) <= found.round_trip_s / 2 + 0.1


async def ask_who_says(reply: bytes) -> probe.Probed:
    async def probed(_: bytes, context: Any) -> bytes:
        return reply

    async with rogue("Probe", grpc.unary_unary_rpc_method_handler(probed)) as candidate:
        return await probe.ask(candidate, HELLO, [9], timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    "reply", [b"\xff\xff\xff", pb.ProbeReply(time_s=math.nan).SerializeToString()], ids=["no message", "no time"]
)
def test_an_answer_that_is_none_is_the_fault_of_who_gave_it(reply: bytes) -> None:
    with pytest.raises(CorruptPayload):
        asyncio.run(ask_who_says(reply))


def test_what_is_told_of_ports_and_hosts_cannot_play_with_a_terminal() -> None:
    told = [pb.PortProbe(port=port, sentence="\x1b]0;owned\x07no" + 500 * "x") for port in (9, 10)]
    reply = pb.ProbeReply(observed_host="\x1b[2J192.0.2.7", ports=told, time_s=1.0)
    found = asyncio.run(ask_who_says(reply.SerializeToString()))
    assert found.observed_host == "[2J192.0.2.7"
    assert list(found.reached) == [9], "the port that was asked for"
    assert found.reached[9].startswith("]0;ownedno")
    assert len(found.reached[9]) == 200


def test_strangers_get_nothing() -> None:
    async def main() -> None:
        async with peer() as candidate:
            with pytest.raises(Refused, match="another run"):
                await probe.ask(candidate, Hello("caller", "other", "0" * 64), [9], timeout_s=PATIENCE_S)

    asyncio.run(main())


def test_nobody_is_dialled_again_and_again() -> None:
    async def main() -> None:
        async with peer() as candidate:
            for _ in range(probe.PORTS_A_MINUTE_OF_ONE // 2):
                await probe.ask(candidate, HELLO, [9], timeout_s=PATIENCE_S)
            with pytest.raises(Refused, match="a few times per minute"):
                await probe.ask(candidate, HELLO, [9], timeout_s=PATIENCE_S)
            await probe.ask(candidate, HELLO, [], timeout_s=PATIENCE_S)  # anybody may ask for the time

    asyncio.run(main())


def dials(num_peers: int) -> list[float]:
    """Return the times of dials to one host whose peers ask ten times a second for some minutes."""
    now_s, dialled_s = 1000.0, list[float]()

    async def dial(host: str, port: int) -> str:
        dialled_s.append(now_s)
        return ""

    prober = probe.Prober(tunnelled={}, only_public=False, clock=lambda: now_s, dial=dial)

    async def main() -> None:
        nonlocal now_s
        for step in range(2000):
            now_s += 0.1
            with suppress(Refused):
                await prober.probe(pb.ProbeRequest(ports=[1, 2, 3, 4]), "ipv4:192.0.2.7:5", str(step % num_peers))

    asyncio.run(main())
    return dialled_s


@pytest.mark.parametrize(("num_peers", "most"), [(1, 16), (50, 48)])
def test_in_no_minute_are_more_ports_dialled_than_promised(num_peers: int, most: int) -> None:
    dialled_s = dials(num_peers)
    busiest = max(sum(begin <= each < begin + 60.0 for each in dialled_s) for begin in dialled_s)
    assert most / 2 < busiest <= most


def test_a_probe_that_its_network_may_not_make_costs_the_peer_nothing() -> None:
    now_s = 1000.0

    async def dial(host: str, port: int) -> str:
        return ""

    async def main() -> None:
        nonlocal now_s
        prober = probe.Prober(tunnelled={}, only_public=False, clock=lambda: now_s, dial=dial)
        request = pb.ProbeRequest(ports=[1, 2, 3, 4])
        for name in map(str, range(100)):  # the network uses up its limit
            with suppress(Refused):
                await prober.probe(request, "ipv4:192.0.2.7:5", name)
        for _ in range(100):
            with pytest.raises(Refused):
                await prober.probe(request, "ipv4:192.0.2.7:5", "neighbour")
        assert (await prober.probe(request, "ipv4:203.0.113.9:5", "neighbour")).ports

    asyncio.run(main())


@pytest.mark.parametrize("ports", [[1, 2, 3, 4, 5], [0], [70_000]])
def test_ports_are_bounded(ports: list[int]) -> None:
    async def main() -> None:
        async with peer() as candidate:
            with pytest.raises(Refused, match="at most 4 ports"):
                await probe.ask(candidate, HELLO, ports, timeout_s=PATIENCE_S)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("caller", "host"),
    [("ipv4:192.0.2.7:4711", "192.0.2.7"), ("ipv6:[2001:db8::1]:4711", "2001:db8::1"), ("ipv6:%5B::1%5D:5", "::1")],
)
def test_the_host_of_a_caller(caller: str, host: str) -> None:
    assert probe.caller_host(caller) == host


@pytest.mark.parametrize("caller", ["unix:/tmp/socket", "", "ipv4:", "nonsense"])
def test_what_is_no_network_address_is_not_dialled(caller: str) -> None:
    with pytest.raises(CorruptPayload, match="cannot be dialled"):
        probe.caller_host(caller)


def test_a_connection_that_asks_hears_where_it_comes_from_and_a_call_is_served_beside_it() -> None:
    async def main() -> None:
        async with peer() as candidate:
            host, _, port = candidate.address.rpartition(":")
            with socket.socket() as asking:
                asking.setblocking(False)
                await asyncio.get_running_loop().sock_connect(asking, (host, int(port)))
                assert await ask_from_where(asking) == asking.getsockname()
                assert await asyncio.get_running_loop().sock_recv(asking, 64) == b""
            assert (await probe.ask(candidate, HELLO, [], timeout_s=PATIENCE_S)).observed_host == "127.0.0.1"

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
