"""Provide peers without a DHT, each in its own process, for the benchmarks of swaps."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import uvloop
from harness.link_proxy import LinkProxy

from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.seams import Candidate, Directory, Transport
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.identity import Identity
from noloco_p2p.net.client import FAR_CONNECTIONS, GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session
from noloco_p2p.spec import CodecSpec, OuterSpec, RunSpec, Spec
from noloco_p2p.testing.links import LinkProfile
from noloco_p2p.testing.memory import Wrap
from noloco_p2p.testing.peers import MemorySwarm

T = TypeVar("T")
PATIENCE_S = 900.0  # for one step of one method
START_S = 10.0


def whole_swaps(name: str) -> RunSpec:
    """Return the spec of peers that swap all weights at once, as int8."""
    return RunSpec(name=name, outer=OuterSpec(wait=True, inner_steps=1), codec=CodecSpec(weights="int8"))


class Told:
    """A directory with a given list of live peers."""

    def __init__(self) -> None:
        self.others: list[Candidate] = []

    def live(self) -> Sequence[Candidate]:
        return self.others

    def num_live(self) -> int:
        return len(self.others) + 1

    def knows(self, peer_id: str) -> bool:
        return True

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        return next((candidate for candidate in self.others if candidate.peer_id == peer_id), None)


class BarePeer(MemorySwarm):
    """A peer without a DHT: `member`. It has the network thread, the server and the swaps of a real peer.

    Either `NoLoCo` uses `member`, or the methods of this class swap a whole vector at a time. Peers have nearly the
    same vectors, as in a swarm: values are about 1, and those of two peers differ by about 1e-3.
    """

    def __init__(
        self,
        name: str,
        spec: Spec,
        *,
        host: str = "127.0.0.1",
        connections: int = FAR_CONNECTIONS,
        session: Session | None = None,
    ) -> None:
        super().__init__(spec)
        torch.set_num_threads(1)
        self.name, self.session = name, session
        self.directory = Told()
        self.transport: GrpcTransport
        self.server: GrpcServer
        self.exchange: Exchange
        self._host = host
        self._connections = connections
        self.__enter__()
        self.member = self.peer(session.identity.peer_id if session else name)

    def begin(self, num_elements: int) -> None:
        """Begin to swap a vector. The spec must have `outer.wait`."""
        own = torch.Generator().manual_seed(int.from_bytes(self.name.encode(), "little"))
        self.vector = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
        self.vector.add_(torch.randn(num_elements, generator=own), alpha=1e-3)
        self.exchange = self.member.begin_swaps(num_elements)
        self.exchange.read = lambda start, stop: self.vector[start:stop].clone()

    def swap(self) -> int:
        """Swap once, and return the number of payload bytes that have arrived. Raises TimeoutError."""
        traffic = self.member.service.counts.traffic
        before = traffic.bytes_received
        self.exchange.wait_until_settled(PATIENCE_S)
        swaps = self.exchange.collect()
        if not swaps:
            raise TimeoutError(f"no swap in {PATIENCE_S:.0f} s: {self.member.service.counts.last_failure}")
        for swap in swaps:
            half = swap.halves.values
            self.vector[swap.start : swap.start + half.numel()] += half
            self.exchange.applied(swap, seconds=0.0)
        return traffic.bytes_received - before

    def on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.call(coroutine)

    def stop(self) -> None:
        self.__exit__()

    # how it reaches others

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()

    def _outside(self, peer_id: str, hello: Callable[[], Hello], wrap: Wrap) -> tuple[Transport, Directory]:
        self.transport = GrpcTransport(hello, connections=self._connections, session=self.session)
        return self.transport, self.directory

    async def _connect(self, peer_id: str, service: PeerService, wrap: Wrap) -> None:
        self.server = GrpcServer(service, session=self.session)
        await self.server.start(self._host, 0)

    async def _disconnect_all(self) -> None:
        await self.server.stop(0.1)


class Side(BarePeer):
    """One of two peers that know each other, each in its own process. They use TLS, as real peers do."""

    def __init__(self, name: str, pipe: Connection, spec: Spec, **options: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            session = Session(Identity.load_or_create(Path(folder) / "key"))
        super().__init__(name, spec, session=session, **options)
        self.pipe = pipe
        pipe.send((self.server.port, session.identity.peer_id, session.key))
        _, address, peer_id, key = pipe.recv()
        self.directory.others = [Candidate(peer_id, address, session_key=key)]


def start_loop() -> asyncio.AbstractEventLoop:
    loop = uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def through(link: LinkProfile) -> Callable[[int], int]:
    """Return a function that puts a link proxy in front of a port. The proxies run until this process ends."""
    loop = start_loop()

    def between(port: int) -> int:
        proxy = LinkProxy(f"127.0.0.1:{port}", link)
        asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(START_S)
        return int(proxy.address.rpartition(":")[2])

    return between


def run_pair(
    side: Callable[..., None],
    *args: Any,
    repeats: int,
    between: Callable[[int], int] = lambda port: port,
    hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
) -> list[tuple[Any, Any]]:
    """Run `side(name, pipe, *args, repeats)` in two processes, and return the results of both for each repeat.

    A side sends its port, or a tuple that begins with its port. It then receives (name, address, rest of the tuple) of
    the other side. For each repeat, it receives "go" and sends a result. `between(port)` returns the port to dial
    instead, for example that of a link proxy. `hosts` are the hosts of a and b.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}
    processes = []
    for name in "ab":
        pipes[name], theirs = context.Pipe()
        process = context.Process(target=side, args=(name, theirs, *args, repeats), daemon=True)
        process.start()
        processes.append(process)
    told = {name: pipes[name].recv() for name in "ab"}
    for name, other, host in (("a", "b", hosts[1]), ("b", "a", hosts[0])):
        port, *rest = told[other] if isinstance(told[other], tuple) else (told[other],)
        pipes[name].send((other, f"{host}:{between(port)}", *rest))
    results = []
    for _ in range(repeats):
        for pipe in pipes.values():
            pipe.send("go")
        results.append((pipes["a"].recv(), pipes["b"].recv()))
    for process in processes:
        process.join(30)
    return results
