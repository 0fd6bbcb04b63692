"""Two peers without a DHT and a model, each in its own process. They swap whole vectors on request."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import uvloop

from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.identity import Identity
from noloco_p2p.net.client import FAR_CONNECTIONS, GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session
from noloco_p2p.spec import CodecSpec, OuterSpec, RunSpec

PATIENCE_S = 900.0  # for one swap


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


class BarePeer:
    """A peer with the network thread, the server and the swaps of a real peer, and a random vector."""

    def __init__(
        self,
        name: str,
        spec: RunSpec,
        num_elements: int,
        *,
        host: str = "127.0.0.1",
        connections: int = FAR_CONNECTIONS,
        session: Session | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self.session = session
        self.name, self.spec, self.num_elements = name, spec, num_elements
        self.loop = start_loop()
        self.directory = Told()
        self.transport = GrpcTransport(self._hello, connections=connections, session=session)
        self.vector = torch.randn(num_elements, generator=torch.Generator().manual_seed(len(name)))
        self.exchange: Exchange
        self.service, self.server = self.on_loop(self._build(host))

    def swap(self) -> int:
        """Swap the whole vector once, and return the number of payload bytes that have been received."""
        before = self.service.counts.traffic.bytes_received
        self.exchange.wait_until_settled(PATIENCE_S)
        swaps = self.exchange.collect()
        assert swaps, f"there was no swap: {self.service.counts.last_failure}"
        for swap in swaps:
            self.exchange.applied(swap, seconds=0.0)
        return self.service.counts.traffic.bytes_received - before

    def stop(self) -> None:
        self.on_loop(self.service.stop())
        self.on_loop(self.server.stop(0.1))

    def on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def _hello(self) -> Hello:
        peer_id = self.session.identity.peer_id if self.session else self.name
        return Hello(peer_id, self.spec.name, self.spec.digest())

    async def _build(self, host: str) -> tuple[PeerService, GrpcServer]:
        service = PeerService(
            self.spec,
            hello=self._hello,
            transport=self.transport,
            directory=self.directory,
            executor=ThreadPoolExecutor(1),
            rng=random.Random(self.name),
        )
        self.exchange = await service.begin(self.num_elements)
        self.exchange.read = lambda start, stop: self.vector[start:stop].clone()
        server = GrpcServer(service, session=self.session)
        await server.start(host, 0)
        return service, server


class Side(BarePeer):
    """One of two peers that know each other, each in its own process. They use TLS, as real peers do."""

    def __init__(self, name: str, pipe: Connection, spec: RunSpec, num_elements: int, **options: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            session = Session(Identity.load_or_create(Path(folder) / "key"))
        super().__init__(name, spec, num_elements, session=session, **options)
        self.pipe = pipe
        pipe.send((self.server.port, session.identity.peer_id, session.key))
        _, address, peer_id, key = pipe.recv()
        self.directory.others = [Candidate(peer_id, address, session_key=key)]


def start_loop() -> asyncio.AbstractEventLoop:
    loop = uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


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
