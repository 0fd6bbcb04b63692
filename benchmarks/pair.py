"""Two peers in two processes, as in real life but for the DHT and the model: the bench of the swap benchmarks."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvloop

from noloco_p2p.codec import chunk_bounds
from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.fetch import StateServer
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.pace import Pace
from noloco_p2p.gossip.runner import RoundRunner
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.net.client import LANES, GrpcTransport
from noloco_p2p.net.climb import LanePolicy
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.spec import RunSpec


class OneOther:
    """A directory that knows one peer, or none."""

    def __init__(self) -> None:
        self.others: list[Candidate] = []

    def live(self) -> Sequence[Candidate]:
        return self.others


class Side:
    """One peer: network thread, server, exchange, and vectors of random numbers. Both sides know the other."""

    def __init__(
        self,
        name: str,
        pipe: Connection,
        spec: RunSpec,
        num_elements: int,
        *,
        host: str = "127.0.0.1",
        lanes: LanePolicy = LANES,
    ) -> None:
        torch.set_num_threads(1)
        self.name, self.pipe, self.spec, self.num_elements = name, pipe, spec, num_elements
        self.host = host
        self.loop = start_loop()
        self.pace = Pace(spec.outer.inner_steps)
        self.directory = OneOther()
        self.transport = GrpcTransport(self._hello, lanes=lanes)
        self.runner, self.server = self.on_loop(self._build())
        self.exchange = Exchange(spec=spec, loop=self.loop, runner=self.runner, pace=self.pace)
        self.slow_weights = torch.randn(num_elements)
        self.outer_momentum = torch.randn(num_elements).mul_(1e-3)
        pipe.send(self.server.port)
        other, address = pipe.recv()
        self.directory.others = [Candidate(other, address)]

    def open(self, round_index: int) -> None:
        vectors = {"slow_weights": self.slow_weights, "outer_momentum": self.outer_momentum}
        self.exchange.open(round_index, progress=0.0, **vectors)

    def stage(self) -> None:
        """Any vector will do as outer gradient."""
        self.exchange.stage(lambda: (self.outer_momentum[a:b] for a, b in chunk_bounds(self.num_elements)))

    def wait_for_early(self) -> None:
        """Until the early part is committed, as it is by the end of a round of training."""
        while not self.runner._round.early_committed:
            threading.Event().wait(0.002)

    def stop(self) -> None:
        self.on_loop(self.runner.stop())
        self.on_loop(self.server.stop(0.1))

    def on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(600)

    def _hello(self) -> Hello:
        return Hello(self.name, self.spec.name, self.spec.digest())

    async def _build(self) -> tuple[RoundRunner, GrpcServer]:
        runner = RoundRunner(
            hello=self._hello,
            transport=self.transport,
            directory=self.directory,
            pace=self.pace,
            executor=ThreadPoolExecutor(1),
            rng=random.Random(self.name),
        )
        states = StateServer(self.spec)
        service = PeerService(runner=runner, states=states, status=lambda: (self._hello(), "training", 0, 0.0))
        server = GrpcServer(service)
        await server.start(self.host, 0)
        return runner, server


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
    """Run `side(name, pipe, *args, repeats)` in two processes and collect what both send at each repeat.

    A side sends its port, receives (name, address) of the other, and then per repeat receives a go and sends a result.
    `between(port)` gives the port to dial instead, for example that of a link proxy; `hosts` are a's and b's.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for name in "ab":
        pipes[name], theirs = context.Pipe()
        process = context.Process(target=side, args=(name, theirs, *args, repeats), daemon=True)
        process.start()
        processes.append(process)
    ports = {name: between(pipes[name].recv()) for name in "ab"}
    for name, other, host in (("a", "b", hosts[1]), ("b", "a", hosts[0])):
        pipes[name].send((other, f"{host}:{ports[other]}"))
    results = []
    for _ in range(repeats):
        for pipe in pipes.values():
            pipe.send("go")
        results.append((pipes["a"].recv(), pipes["b"].recv()))
    for process in processes:
        process.join(30)
    return results
