"""Measure what callers without a key can make a peer keep by means of compressed headers (HPACK).

    python benchmarks/header_flood.py [--quick] [--json FILE]

Each connection sends a header whose name has 3 KB, and then repeats it with one byte each, up to 14, 16 or 60 KB. "At
once" means that a caller does not acknowledge the HTTP/2 settings of the server first. Floods come from one network
with 16 connections at a time, or from eight networks with 60. Meanwhile, eight newcomers call. A server in its own
process serves all of this; the last rows flood a peer that trains and swaps with another one. Memory is the peak minus
the memory before the flood.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import uvloop
from claims import Claim, run
from harness.header_bombs import Bombers, bomb, port_of
from harness.identities import identity_of
from harness.patience import AT_ONCE_S
from harness.processes import PeerProcess, small_spec, write_spec

from noloco_p2p.errors import PeerError
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Hello, PeerStatus
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session

DIGEST = "0" * 64
ONE_NETWORK, MANY_NETWORKS = ["127.0.1.1"], [f"127.0.{index}.1" for index in range(1, 9)]
NUM_NEWCOMERS = 8
MOST_MIB = 16.0


class Answering:
    """A Service that answers status calls."""

    def admit(self, hello: Hello) -> None: ...

    async def on_swap(self, stream: FrameStream) -> None: ...

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        return PeerStatus(Hello("server", "r", DIGEST), "training", 0.0)

    async def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        return
        yield


def serve(pipe: Connection) -> None:
    async def main() -> None:
        session = Session(identity_of("server"))
        server = GrpcServer(Answering(), session=session)
        await server.start("127.0.0.1", 0)
        pipe.send((server.port, session.key))
        await asyncio.to_thread(pipe.recv)
        await server.stop(0.0)

    uvloop.run(main())


class Meter:
    """Records the peak memory of a process, in MiB above what it had at first."""

    def __init__(self, process: psutil.Process) -> None:
        self.most_grown_mib = 0.0
        self._process, self._before_bytes = process, process.memory_info().rss

    async def run(self) -> None:
        while True:
            grown_bytes = self._process.memory_info().rss - self._before_bytes
            self.most_grown_mib = max(self.most_grown_mib, grown_bytes / 2**20)
            await asyncio.sleep(0.01)


async def flood(port: int, process: psutil.Process, data: bytes, hosts: list[str], seconds: float) -> tuple[float, int]:
    """Return the growth in MiB, and the number of bombs."""
    meter = Meter(process)
    watching = asyncio.create_task(meter.run())
    bombers = Bombers(port, data, num=16 if hosts is ONE_NETWORK else 60, hosts=hosts)
    await asyncio.sleep(seconds)
    await bombers.end()
    watching.cancel()
    return meter.most_grown_mib, bombers.num_bombs


async def is_served(there: Candidate, name: str) -> bool:
    session = Session(identity_of(name))
    transport = GrpcTransport(lambda: Hello(session.identity.peer_id, "r", DIGEST), session=session)
    with suppress(PeerError):
        await transport.status(there, timeout_s=AT_ONCE_S)
        return True
    return False


async def flood_server(num_bytes: int, hosts: list[str], seconds: float, *, acknowledges: bool) -> list[Claim]:
    pipe, far = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(far,))
    server.start()
    port, key = await asyncio.to_thread(pipe.recv)
    there = Candidate(identity_of("server").peer_id, f"127.0.0.1:{port}", session_key=key)
    assert await is_served(there, "the first")
    data = bomb(num_bytes, acknowledges=acknowledges)
    flooding = asyncio.create_task(flood(port, psutil.Process(server.pid), data, hosts, seconds))
    await asyncio.sleep(seconds / 2)
    served = [await is_served(there, f"newcomer {index}") for index in range(NUM_NEWCOMERS)]
    grown_mib, num_bombs = await flooding
    pipe.send("end")
    await asyncio.to_thread(server.join)
    what = f"{num_bytes // 1000} KB {'after the settings' if acknowledges else 'at once'}, {len(hosts)} network(s)"
    return [
        Claim(f"{what}: connections", num_bombs / seconds, "a second"),
        Claim(f"{what}: the server grows by", grown_mib, "MiB", f"< {MOST_MIB:g}", grown_mib < MOST_MIB),
        Claim(f"{what}: newcomers served", sum(served), "of 8", "8", all(served)),
    ]


def flood_peer(seconds: float) -> list[Claim]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        spec = write_spec(small_spec("bombed"), Path(folder))
        peer = stack.enter_context(PeerProcess(spec, Path(folder) / "a"))
        partner = stack.enter_context(PeerProcess(peer.ticket, Path(folder) / "b"))
        peer.swap_with(partner)
        swaps = []
        grown_mib = 0.0
        for is_flooded in (False, True):
            before = peer.report_where(lambda event: True)["swaps"]
            if is_flooded:
                process = psutil.Process(peer.process.pid)
                data = bomb(14_000, acknowledges=False)
                grown_mib, _ = uvloop.run(flood(port_of(process), process, data, ONE_NETWORK, seconds))
            else:
                time.sleep(seconds)
            swaps.append(peer.report_where(lambda event: True)["swaps"] - before)
    return [
        Claim("a peer that swaps: grows by", grown_mib, "MiB", "< 64", grown_mib < 64.0),
        Claim("a peer that swaps: swaps without a flood", swaps[0] / seconds, "a second"),
        Claim("a peer that swaps: swaps while flooded", swaps[1] / seconds, "a second"),
    ]


def measure(quick: bool) -> list[Claim]:
    seconds = 4.0 if quick else 10.0
    claims = []
    for num_bytes in (14_000, 16_300, 60_000):
        for acknowledges in (False, True):
            for hosts in (ONE_NETWORK, MANY_NETWORKS):
                claims += uvloop.run(flood_server(num_bytes, hosts, seconds, acknowledges=acknowledges))
    return claims + flood_peer(2 * seconds)


if __name__ == "__main__":
    run(measure, doc=__doc__)
