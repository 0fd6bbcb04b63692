"""Provide the peers of a pipeline for flow.py, each in its own process, without a DHT and a real model.

A stage forwards what it receives. Everything else is production code: state machine, driver, streams, codecs, gates,
and rounds of swaps within a stage. A stage swaps the parameters of a small model, but sends payloads of the size of a
large model's.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from memory import resident_bytes
from netlab import NetLab, enter
from pair import PATIENCE_S, Told
from torch import Tensor

from noloco_p2p.flow.actions import Compute, Kind
from noloco_p2p.flow.frames import MicrobatchId
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.limits import num_rooms
from noloco_p2p.flow.replica import Replica
from noloco_p2p.gossip.exchange import ThreadedExchange
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.round_stack import RoundStack, build_round_stack
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import Identity
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.connection import Connector
from noloco_p2p.net.flow import FlowLinks
from noloco_p2p.net.flow_link import PayloadSizes
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session
from noloco_p2p.net.tickets import Tickets
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.peer.flow_driver import FlowDriver
from noloco_p2p.peer.network_thread import NetworkThread
from noloco_p2p.peer.threaded_flow import ThreadedFlow
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.testing.peers import MemoryPeer
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.pipeline import StageLoop
from noloco_p2p.trainer.stage import Stage, build_stage
from noloco_p2p.trainer.stage_work import StageWork
from noloco_p2p.transfer.donor import StateServer

AMPLE_BYTES = 1 << 34  # only the batch bounds the stashes of these peers


class Place(NamedTuple):
    stage: int
    replica: int


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings of all peers. `width` is the hidden size of the payloads."""

    spec: TrainerSpec
    num_replicas: int
    width: int

    @property
    def places(self) -> list[Place]:
        numbers = itertools.product(range(self.spec.pipeline.stages), range(self.num_replicas))
        return [Place(stage, replica) for stage, replica in numbers]

    @property
    def microbatch_tokens(self) -> int:
        """The tokens of a whole microbatch."""
        return self.spec.pipeline.microbatch * self.spec.data.sequence_length

    @property
    def num_rooms(self) -> int:
        payload_bytes = 4 * self.width * self.microbatch_tokens
        return num_rooms(
            memory_bytes=AMPLE_BYTES,
            microbatch_bytes=3 * payload_bytes,
            batch_tokens=self.spec.train.batch_size * self.spec.data.sequence_length,
            microbatch_tokens=self.microbatch_tokens,
        )


@dataclass(slots=True)
class Counts:
    """The counts of one peer since its start. `lateness` counts backward passes by their delay in inner steps."""

    losses: int = 0  # of a head: microbatches that reached a loss
    lost: int = 0
    lateness: Counter[int] = field(default_factory=Counter)
    trips_s: list[float] = field(default_factory=list)  # of a head: from the forward of a microbatch to its backward
    window: int = 0  # of a head: microbatches that may be in flight
    swaps: int = 0
    cpu_s: float = 0.0
    peak_bytes: int = 0  # resident, above the start


class PassingWork(StageWork):
    """Work without computation. A stage returns its input, and a head returns the same activations for each microbatch.

    An inner step changes no weights.
    """

    def __init__(self, stage: Stage, bench: Bench) -> None:
        super().__init__(stage, bench.spec)
        self._shape = (bench.spec.pipeline.microbatch, bench.spec.data.sequence_length, bench.width)
        self._constant = torch.randn(self._shape, generator=torch.Generator().manual_seed(0))
        self.counts = Counts()
        self._num_steps = 0
        self._forwards: dict[MicrobatchId, tuple[int, float]] = {}  # inner step and time

    def compute(self, task: Compute) -> Tensor | None:
        self._note(task)
        if self.stage.index == 0:
            return None if task.kind is Kind.BACKWARD else self._constant
        passed = task.received if task.kind is Kind.BACKWARD else task.data
        assert isinstance(passed, Tensor)
        return passed

    def close(self, inner: InnerStep, num_tokens: int, *, progress: float) -> None:
        self._num_steps += 1

    def _note(self, task: Compute) -> None:
        now_s = time.monotonic()
        if task.kind is Kind.FORWARD:
            self._forwards[task.id] = self._num_steps, now_s
        elif task.kind is Kind.LOSS:
            self.counts.losses += 1
        else:
            step, forward_s = self._forwards.pop(task.id)
            self.counts.lateness[self._num_steps - step] += 1
            self.counts.trips_s.append(now_s - forward_s)


class BenchPeer:
    """One replica of one stage. The network thread runs server, streams and rounds; another thread does the work."""

    def __init__(self, place: Place, bench: Bench, host: str) -> None:
        self.place, self.bench = place, bench
        spec = bench.spec
        self._folder = tempfile.TemporaryDirectory()
        self.identity = Identity.load_or_create(Path(self._folder.name) / "key")
        self.session = Session(self.identity)
        assert spec.pipeline.cut != "auto"
        stage = build_stage(spec.model, spec.pipeline.cut, index=place.stage, sequence_length=spec.data.sequence_length)
        self.work = PassingWork(stage, bench)
        self.inner = InnerStep(stage.model, spec.train)
        self.mates = Told()
        self.others: dict[str, Candidate] = {}
        self.executor = ThreadPoolExecutor(2)
        self.network = NetworkThread()
        self.leaving = threading.Event()
        self.network.call(self._build(host), PATIENCE_S)
        self.thread = threading.Thread(target=lambda: self.loop.run(self.leaving), daemon=True)

    def start(self, others: dict[Place, Candidate]) -> None:
        self.others = {candidate.peer_id: candidate for candidate in others.values()}
        self._cpu_s, self._start_bytes = cpu_s(), resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        stages = self.bench.spec.pipeline.stages
        own = self.place.stage
        of_stage = [[other.peer_id for at, other in others.items() if at.stage == stage] for stage in range(stages)]
        self.mates.others = [other for at, other in others.items() if at.stage == own and at != self.place]

        async def meet() -> None:
            self.driver.start()
            self.driver.meet(of_stage[(own + 1) % stages], of_stage[-1] if own == 0 else ())

        self.network.call(meet(), PATIENCE_S)
        self.thread.start()

    def counts(self) -> Counts:
        counts, machine = self.work.counts, self.driver.machine
        counts.lost = machine.num_lost
        counts.window = machine.window.size if isinstance(machine, Head) else 0
        counts.swaps = self.peer.metrics.swaps
        counts.cpu_s = cpu_s() - self._cpu_s
        counts.peak_bytes = resident_bytes("VmHWM") - self._start_bytes
        return counts

    async def look_for(self, head: str) -> None:
        """Every head is listed from the beginning."""

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        return self.others.get(peer_id)

    async def _build(self, host: str) -> None:
        bench, spec = self.bench, self.bench.spec
        loop, hello = asyncio.get_running_loop(), Hello(self.identity.peer_id, spec.name, spec.digest())
        stack = self._round_stack()
        self.links = FlowLinks(
            lambda: hello,
            stage=self.place.stage,
            num_stages=spec.pipeline.stages,
            sizes=PayloadSizes(self.work.forward_bytes, self.work.backward_bytes),
            connector=Connector(self.session),
            find=self.find,
            strike=print,
        )
        self.driver = FlowDriver(
            self._machine(),
            self.links,
            self.work,
            Tickets(self.identity, spec_digest=spec.digest(), max_tokens=bench.microbatch_tokens),
            look_for=self.look_for,
            stage=self.place.stage,
            num_stages=spec.pipeline.stages,
            executor=self.executor,
            strike=print,
            batches=itertools.repeat(torch.zeros(1, dtype=torch.long)),
            microbatch_tokens=bench.microbatch_tokens,
        )
        self.server = GrpcServer(stack.service, session=self.session, serve_flow=self.links.serve)
        await self.server.start(host, 0)
        self.loop = StageLoop(ThreadedFlow(self.driver, loop), self.work, self.inner, self.outer)

    def _machine(self) -> Head | Replica:
        bench, spec = self.bench, self.bench.spec
        batch_tokens = spec.train.batch_size * spec.data.sequence_length
        stages, rng = spec.pipeline.stages, random.Random(f"{self.place}")
        if self.place.stage:
            return Replica(
                stage=self.place.stage,
                num_stages=stages,
                heads=self.others,
                num_rooms=bench.num_rooms,
                batch_tokens=batch_tokens,
                rng=rng,
            )
        return Head(
            peer_id=self.identity.peer_id,
            num_stages=stages,
            max_in_flight=bench.num_rooms,
            batch_tokens=batch_tokens,
            first_number=0,
            rng=rng,
        )

    def _round_stack(self) -> RoundStack:
        spec, made = self.bench.spec, list[MemoryPeer]()

        def hello() -> Hello:
            return Hello(self.identity.peer_id, spec.name, spec.digest(), layout=made[0].layout if made else "")

        states = StateServer(spec)
        stack = build_round_stack(
            spec,
            hello=hello,
            transport=GrpcTransport(hello, session=self.session),
            directory=self.mates,
            executor=self.executor,
            rng=random.Random(f"{self.place}"),
            serve=states.serve,
        )
        self.peer = MemoryPeer(
            self.identity.peer_id,
            spec=spec,
            run_folder=Path(self._folder.name),
            driver=stack.driver,
            exchange=ThreadedExchange(spec, stack.driver, asyncio.get_running_loop()),
            states=states,
            executor=self.executor,
        )
        made.append(self.peer)
        self.outer = NoLoCo(
            self.work.stage.model,
            self.inner,
            self.peer,
            resume=False,
            save_every_rounds=0,
            end_at=1.0,
            follows_caller=self.place.stage > 0,
        )
        return stack


def cpu_s() -> float:
    """Return the processor time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def serve(place: Place, pipe: Connection, bench: Bench, namespace: str) -> None:
    """Run a peer. It sends its address, receives the addresses of the other peers, and sends its counts on request."""
    if namespace:
        enter(namespace)
    torch.set_num_threads(1)
    peer = BenchPeer(place, bench, "0.0.0.0" if namespace else "127.0.0.1")
    pipe.send((peer.identity.peer_id, peer.server.port, peer.session.key))
    peer.start(pipe.recv())
    while pipe.recv():
        pipe.send(peer.counts())


class Pipeline:
    """All peers of a bench, each in its own namespace if there is a lab. They train from `__enter__` to `__exit__`."""

    def __init__(self, bench: Bench, lab: NetLab | None = None) -> None:
        self._bench, self._lab = bench, lab
        self._pipes: dict[Place, Any] = {}
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> Pipeline:
        context = multiprocessing.get_context("spawn")
        for index, place in enumerate(self._bench.places):
            self._pipes[place], theirs = context.Pipe()
            namespace = self._lab.nodes[index].namespace if self._lab else ""
            process = context.Process(target=serve, args=(place, theirs, self._bench, namespace), daemon=True)
            process.start()
            self._processes.append(process)
        told = {place: pipe.recv() for place, pipe in self._pipes.items()}
        hosts = [node.address for node in self._lab.nodes] if self._lab else ["127.0.0.1"] * len(told)
        everybody = {
            place: Candidate(peer_id, f"{host}:{port}", session_key=key)
            for (place, (peer_id, port, key)), host in zip(told.items(), hosts, strict=True)
        }
        for pipe in self._pipes.values():
            pipe.send(everybody)
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def counts(self) -> dict[Place, Counts]:
        for pipe in self._pipes.values():
            pipe.send(True)
        return {place: pipe.recv() for place, pipe in self._pipes.items()}


def heads(counts: dict[Place, Counts]) -> Sequence[Counts]:
    return [each for place, each in counts.items() if place.stage == 0]
