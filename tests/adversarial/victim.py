"""A peer's server in its own process, so that its memory can be measured.

`python -m adversarial.victim` prints its port.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import uvloop
from harness.identities import identity_of
from harness.patience import PATIENCE_S

from noloco_p2p.errors import PeerError
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Hello, PeerStatus, StateChunk
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session

TESTS = Path(__file__).resolve().parents[1]
BENCHMARKS = TESTS.parent / "benchmarks"  # for the `harness` package
DIGEST = "0" * 64
PROGRESS = 0.25


class Quiet:
    """A Service that answers status calls, accepts no offer, and keeps every newcomer waiting after one chunk."""

    def admit(self, hello: Hello) -> None:
        """Admit every caller."""

    async def on_swap(self, stream: FrameStream) -> None:
        with suppress(PeerError):
            await stream.receive(PATIENCE_S)
            await stream.receive(PATIENCE_S)

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        return PeerStatus(Hello("victim", "r", DIGEST), "training", PROGRESS)

    async def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        yield StateChunk(0, b"")
        await asyncio.sleep(PATIENCE_S)


class Victim:
    """The victim as its callers see it, with the memory and the connections that an attack costs it."""

    def __init__(self, candidate: Candidate, pid: int) -> None:
        self.candidate = candidate
        self.port = int(candidate.address.rpartition(":")[2])
        self._process = psutil.Process(pid)
        self._before_bytes = self._process.memory_info().rss
        self.most_grown_mib = 0.0

    def num_connections(self) -> int:
        """Return the number of connections that its callers hold."""
        there = self._process.net_connections("tcp")
        return sum(each.laddr.port == self.port and each.status == psutil.CONN_ESTABLISHED for each in there)

    async def watch(self) -> None:
        """Record the peak memory until cancelled."""
        while True:
            grown = self._process.memory_info().rss - self._before_bytes
            self.most_grown_mib = max(self.most_grown_mib, grown / 2**20)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def victim() -> AsyncIterator[Victim]:
    process = _started()
    assert process.stdin
    assert process.stdout
    try:
        port, key = (await asyncio.to_thread(process.stdout.readline)).decode().split()
        identity = identity_of("victim")
        yield Victim(Candidate(identity.peer_id, f"127.0.0.1:{port}", session_key=bytes.fromhex(key)), process.pid)
    finally:
        process.stdin.close()  # the process then exits
        await asyncio.to_thread(process.wait, PATIENCE_S)
        process.stdout.close()


def _started() -> subprocess.Popen[bytes]:
    paths = os.pathsep.join((str(TESTS), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")))
    return subprocess.Popen(
        [sys.executable, "-m", "adversarial.victim"],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


async def _serve() -> None:
    session = Session(identity_of("victim"))
    server = GrpcServer(Quiet(), session=session)
    await server.start("127.0.0.1", 0)
    sys.stdout.write(f"{server.port} {session.key.hex()}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0.0)


if __name__ == "__main__":
    uvloop.run(_serve())
