"""Provide peers without a DHT and a model, each in its own process, for the benchmarks of swaps."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import uvloop

from noloco_p2p.codec import chunk_bounds
from noloco_p2p.gossip.exchange import ThreadedExchange
from noloco_p2p.gossip.frames import Hello, SectionName
from noloco_p2p.gossip.outcome import Correction
from noloco_p2p.gossip.round_driver import RoundDriver
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.gossip.round_stack import build_round_stack
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import Identity
from noloco_p2p.net.client import FAR_CONNECTIONS, GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session
from noloco_p2p.spec import RunSpec

T = TypeVar("T")
PATIENCE_S = 900.0  # for one step of one method
FOREVER = 1 << 62  # an index that no round reaches


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
    """A peer without a DHT and a model. It has the network thread, the server and the exchange of a real peer.

    Its methods replace the outer step. Peers have nearly the same vectors, as in a swarm: values are about 1, and the
    values of two peers differ by about 1e-3.
    """

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
        self.driver, self.server = self.on_loop(self._build(host))
        self.step_rate = self.driver.step_rate
        self.exchange = ThreadedExchange(spec, self.driver, self.loop)
        own = torch.Generator().manual_seed(int.from_bytes(name.encode(), "little"))
        self.slow_weights = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
        self.slow_weights.add_(torch.randn(num_elements, generator=own), alpha=1e-3)
        self.outer_gradient = torch.randn(num_elements, generator=own).mul_(1e-3)
        self.state = {SectionName.SLOW_WEIGHTS: self.slow_weights}
        if spec.outer.keeps_momentum:  # any vector will do
            self.state[SectionName.OUTER_MOMENTUM] = self.outer_gradient

    def open(self, round_index: int) -> None:
        self.exchange.open(round_index, progress=0.0, state=self.state)

    def stage(self) -> None:
        self.exchange.stage(lambda: (self.outer_gradient[a:b] for a, b in chunk_bounds(self.num_elements)))

    def wait_for_early(self) -> None:
        """Wait until the early part is committed, which is normally the case at the end of a round of training."""
        self.until(lambda: self.driver.phase in (RoundPhase.EARLY, RoundPhase.DONE, RoundPhase.HALF))

    def wait_for_correction(self) -> Correction:
        return self.until(lambda: self.exchange.late(FOREVER))

    def until(self, given: Callable[[], T | None]) -> T:
        """Poll every 2 ms until `given` returns a value, which the network thread produces. Raises TimeoutError."""
        until_s = time.monotonic() + PATIENCE_S
        while not (found := given()):
            if time.monotonic() > until_s:
                raise TimeoutError(f"what was waited for did not come: {self.driver.last_fault}")
            time.sleep(0.002)
        return found

    def stop(self) -> None:
        self.on_loop(self.driver.stop())
        self.on_loop(self.server.stop(0.1))

    def on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def _hello(self) -> Hello:
        peer_id = self.session.identity.peer_id if self.session else self.name
        return Hello(peer_id, self.spec.name, self.spec.digest())

    async def _build(self, host: str) -> tuple[RoundDriver, GrpcServer]:
        stack = build_round_stack(
            self.spec,
            hello=self._hello,
            transport=self.transport,
            directory=self.directory,
            executor=ThreadPoolExecutor(1),
            rng=random.Random(self.name),
        )
        server = GrpcServer(stack.service, session=self.session)
        await server.start(host, 0)
        return stack.driver, server


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
