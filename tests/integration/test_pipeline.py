"""Stages in one process, over real gRPC and TLS on loopback, learn what a single machine learns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch
from harness.identities import identity_of
from harness.patience import PATIENCE_S
from harness.swapping import wait_until
from staged_reference import FP32, material_of, spec_of, trained_alone

from noloco_p2p.errors import PeerError
from noloco_p2p.flow.frames import Answer, Credit, Forward, Lost, Mark, MicrobatchId, MicrobatchTicket, Want
from noloco_p2p.gossip.frames import Hello, chunk_digest
from noloco_p2p.gossip.seams import INTERNET, Candidate, Directory, Transport
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.net import flow_wire
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.connection import CallerWire, Connector
from noloco_p2p.net.flow import FLOW_METHOD, MAX_DROPPED
from noloco_p2p.net.flow_wire import FlowHello, Piece, WireFrame
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session
from noloco_p2p.net.tickets import Tickets
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.peer.network_thread import NetworkThread
from noloco_p2p.peer.stage_flow import StageFlow, StagePlan
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.testing.memory import Wrap
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.rms_gate import LEAST_FRAMES
from noloco_p2p.trainer.stage import build_stage
from noloco_p2p.trainer.stage_work import StageLoop

T = TypeVar("T")


class StagePeer:
    """One replica of one stage: its server and streams run on the network thread, and a thread of its own computes."""

    def __init__(self, swarm: StageSwarm, stage: int, number: int, *, rooms: int, folder: Path) -> None:
        spec, cut = swarm.spec, swarm.spec.pipeline.cut
        assert cut != "auto"
        self.spec = spec
        self.stage = stage
        self.strikes: list[str] = []
        self.looked_for: list[str] = []
        self.identity = identity_of(f"stage {stage} replica {number}")
        self.session = Session(self.identity)
        built = build_stage(spec.model, cut, index=stage, sequence_length=spec.data.sequence_length)
        train = spec.train.model_copy(update={"clip_norm": spec.train.clip_norm / spec.pipeline.stages**0.5})
        self.inner = InnerStep(built.model, train)
        self.work = StageLoop(built, spec, self.inner, cast(Any, SimpleNamespace(progress=0.0)))
        self.folder = folder
        self.leaving = threading.Event()
        self.swarm, self._number, self._rooms = swarm, number, rooms
        self.thread = threading.Thread(target=self._train, daemon=True)

    async def start(self) -> None:
        spec, swarm = self.swarm.spec, self.swarm
        hello = Hello(self.peer_id, spec.name, spec.digest())  # without a layout, which differs between stages
        self.service = self._swap_service()
        self.flow = StageFlow(
            StagePlan(spec, self.stage, self.work, self._rooms, 0.0, self._batches() if self.stage == 0 else None),
            self.identity,
            lambda: hello,
            heads=cast(Any, self),
            live=lambda: [peer.candidate for peer in swarm.peers if peer is not self],
            strike=self.strike,
            connector=Connector(self.session),
            find=swarm.find,
        )
        self.server = GrpcServer(self.service, session=self.session, serve_flow=self.flow.links.serve)
        await self.server.start("127.0.0.1", 0)

    def _swap_service(self) -> PeerService:
        """Return the service for swaps with the other replicas of this stage."""
        self.peer = MemoryPeer(cast("MemorySwarm", self), self.peer_id, spec=self.spec, run_folder=self.folder)
        return self.peer.service

    # what a MemoryPeer needs of its swarm

    deadlines = INTERNET

    def _outside(self, peer_id: str, hello: Callable[[], Hello], wrap: Wrap) -> tuple[Transport, Directory]:
        return GrpcTransport(hello, session=self.session), StageMates(self)

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.swarm.call(coroutine)

    def begin(self) -> None:
        """Begin to swap. The network thread must be running, and not be the caller."""
        self.outer = NoLoCo(
            self.work.stage.model,
            self.inner,
            self.peer,
            resume=False,
            save_every_s=0.0,
            follows_caller=self.stage > 0,
        )
        self.work._outer = self.outer

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.peer_id, f"127.0.0.1:{self.server.port}", stage=self.stage, session_key=self.session.key)

    def __contains__(self, head: object) -> bool:
        return head in self.swarm.listed

    async def look_for(self, head: str) -> None:
        """Read the record of a head, which this peer may not have seen yet."""
        self.looked_for.append(head)
        if head in self.swarm.unread:
            self.swarm.listed.add(head)

    def strike(self, peer: str, why: str) -> None:
        self.strikes.append(why)

    async def stop(self) -> None:
        """Stop without a farewell."""
        await self.flow.stop()
        await self.service.stop()
        await self.server.stop(0.0)
        self.peer.executor.shutdown()

    def _batches(self) -> Iterator[object]:
        spec = self.swarm.spec
        name = f"replica-{self._number}"
        return iter(material_of(spec).batches(name, replica=self._number, batch_size=spec.pipeline.microbatch))

    def _train(self) -> None:
        while not self.leaving.is_set() and (self.flow.turn(0.1) or not self.flow.node.is_over):
            pass
        if self.flow.node.is_over:
            self.work.finish()


class StageMates:
    """A directory that lists the other replicas of a peer's stage."""

    def __init__(self, peer: StagePeer) -> None:
        self._peer = peer

    def live(self) -> Sequence[Candidate]:
        swarm, own = self._peer.swarm, self._peer
        return [other.candidate for other in swarm.of_stage(own.stage) if other is not own]

    def num_live(self) -> int:
        return len(self.live()) + 1

    def knows(self, peer_id: str) -> bool:
        return any(candidate.peer_id == peer_id for candidate in self.live())

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        return next((candidate for candidate in self.live() if candidate.peer_id == peer_id), None)


class StageSwarm:
    """Peers that all know each other. `rooms`: microbatches that a peer holds, or that a head has in flight."""

    def __init__(self, spec: TrainerSpec, folder: Path, *, num_replicas: int, rooms: int) -> None:
        self.spec = spec
        self.network = NetworkThread()
        self.listed: set[str] = set()  # heads whose record every peer has seen
        self.unread: set[str] = set()  # heads whose record a peer sees once it looks for it
        self.peers = [
            StagePeer(self, stage, number, rooms=rooms, folder=folder / f"{stage}-{number}")
            for stage in range(spec.pipeline.stages)
            for number in range(num_replicas)
        ]

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        return next((peer.candidate for peer in self.peers if peer.peer_id == peer_id), None)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.network.call(coroutine, PATIENCE_S)

    def of_stage(self, stage: int) -> list[StagePeer]:
        return [peer for peer in self.peers if peer.stage == stage % self.spec.pipeline.stages]

    async def start(self) -> None:
        self.listed.update(head.peer_id for head in self.of_stage(0))
        for peer in self.peers:
            await peer.start()
        for peer in self.peers:
            peer.flow.start()

    async def stop(self) -> None:
        for peer in self.peers:
            await peer.stop()

    def wait(self, peers: list[StagePeer]) -> None:
        for peer in peers:
            peer.thread.join(PATIENCE_S)
            assert not peer.thread.is_alive()


@contextmanager
def swarm_of(
    spec: TrainerSpec,
    folder: Path,
    *,
    num_replicas: int,
    rooms: int,
    before: Callable[[StageSwarm], Coroutine[None, None, None]] | None = None,
) -> Iterator[StageSwarm]:
    """Train, after `before` has run while the streams are open."""
    swarm = StageSwarm(spec, folder, num_replicas=num_replicas, rooms=rooms)
    try:
        swarm.network.call(swarm.start(), PATIENCE_S)
        if before:
            swarm.network.call(before(swarm), PATIENCE_S)
        for peer in swarm.peers:
            peer.begin()
        for peer in swarm.peers:
            peer.thread.start()
        yield swarm
    finally:
        for peer in swarm.peers:
            peer.leaving.set()
        swarm.network.call(swarm.stop(), PATIENCE_S)
        swarm.network.stop()


@pytest.mark.parametrize("inner_optimizer", ["adamw", "muon"])
def test_one_path_with_one_microbatch_in_flight_is_a_single_machine(inner_optimizer: str, tmp_path: Path) -> None:
    changes = {**FP32, "train.inner_optimizer": inner_optimizer, "train.clip_norm": 0.3}
    spec = spec_of(steps=20, **changes)
    alone = trained_alone(spec)
    start = dict(material_of(spec).model().named_parameters())
    with swarm_of(spec, tmp_path, num_replicas=1, rooms=1) as swarm:
        swarm.wait(swarm.peers)
        for peer in swarm.peers:
            assert peer.work.steps == 20
            assert not peer.strikes
            for name, param in peer.work.stage.model.named_parameters():
                assert torch.allclose(param, alone[name], atol=1e-5, rtol=0), name
                assert not torch.allclose(param, start[name], atol=1e-3, rtol=0), "it has trained"


@pytest.mark.parametrize("stage", [1, 2])
def test_two_replicas_of_each_stage_learn_swap_and_survive_one_that_dies(stage: int, tmp_path: Path) -> None:
    spec = spec_of(steps=10, **{"train.batch_size": 8})
    with swarm_of(spec, tmp_path, num_replicas=2, rooms=2) as swarm:
        heads, victim = swarm.of_stage(0), swarm.of_stage(stage)[0]
        wait_until(lambda: all(head.work.steps >= 3 for head in heads))
        before = [head.work.loss_sum / head.work.loss_tokens for head in heads]
        swarm.network.call(victim.stop(), PATIENCE_S)
        victim.leaving.set()
        swarm.wait([peer for peer in swarm.peers if peer is not victim])
        after = [head.work.loss_sum / head.work.loss_tokens for head in heads]
        # Heads at different places of the schedule meet half-way when they swap.
        assert all(8 <= head.work.steps <= 12 for head in heads), [head.work.steps for head in heads]
        assert all(late < early for early, late in zip(before, after, strict=True)), (before, after)
        assert not [peer.strikes for peer in swarm.peers if peer.strikes]
        for peer in swarm.peers:
            assert peer is victim or peer.outer.progress >= 1
            assert peer.stage == stage or peer.service.counts.swaps >= 1, peer.service.counts


# dishonest heads as neighbours


async def stranger(peer: StagePeer) -> CallerWire:
    """Return a stream of a proven caller that claims to be a head and writes what it likes."""
    spec, head = peer.spec, identity_of("stranger")
    connector = Connector(Session(head))
    wire = await connector.call(peer.candidate, FLOW_METHOD, timeout_s=PATIENCE_S)
    await wire.write(flow_wire.encode(FlowHello(Hello(head.peer_id, spec.name, spec.digest()), 0)))
    assert isinstance(await heard(wire), FlowHello)
    return wire


async def heard(wire: CallerWire) -> WireFrame:
    async with asyncio.timeout(PATIENCE_S):
        return flow_wire.decode(await wire.read() or b"")


async def ended(wire: CallerWire) -> None:
    """Read until the other side has ended the stream."""
    with suppress(PeerError):
        while True:
            await heard(wire)


def ticket_of(
    peer: StagePeer, number: int, *, head: str = "stranger", mark: float = 0.0, num_tokens: int = 15
) -> MicrobatchTicket:
    identity = identity_of(head)
    tickets = Tickets(identity, spec_digest=peer.spec.digest(), max_tokens=15)
    return tickets.signed(MicrobatchTicket(MicrobatchId(identity.peer_id, number), mark, num_tokens))


async def send_forward(wire: CallerWire, peer: StagePeer, number: int, value: float) -> None:
    payload = torch.full((peer.work.forward_bytes // 4,), value).numpy().tobytes()
    id = ticket_of(peer, number).id
    await wire.write(flow_wire.encode(Forward(id, 60.0, len(payload))))
    await wire.write(flow_wire.encode(Piece(False, payload, chunk_digest(payload))))


async def ask_for_room(wire: CallerWire, peer: StagePeer, number: int) -> None:
    await wire.write(flow_wire.encode(Want(ticket_of(peer, number), 60.0)))
    assert await heard(wire) == Credit(ticket_of(peer, number).id, has_room=True)


async def send_what_is_not_finite(peer: StagePeer) -> None:
    wire = await stranger(peer)
    await ask_for_room(wire, peer, 1)
    await send_forward(wire, peer, 1, float("nan"))
    assert await heard(wire) == Answer(ticket_of(peer, 1).id, is_taken=False)
    assert len(peer.strikes) == 1
    await ask_for_room(wire, peer, 2)  # the third such strike would be a ban
    await wire.close()


async def repeat_a_forward(peer: StagePeer) -> None:
    wire = await stranger(peer)
    await ask_for_room(wire, peer, 1)
    for _ in range(2):
        await send_forward(wire, peer, 1, 0.5)
        assert await heard(wire) == Answer(ticket_of(peer, 1).id, is_taken=True)
    peer.flow._computing._queue.get(timeout=PATIENCE_S)
    assert peer.flow._computing._queue.empty(), "the forward is computed once"
    assert not peer.strikes
    await wire.close()


async def flood_with_forwards(peer: StagePeer) -> None:
    wire = await stranger(peer)
    for number in range(MAX_DROPPED + 1):
        await send_forward(wire, peer, number, 0.5)
    await ended(wire)
    assert len(peer.strikes) == 1
    await wire.close()


async def send_what_is_a_thousand_times_too_large(peer: StagePeer) -> None:
    shape = (1, peer.spec.data.sequence_length, peer.spec.model.hidden_size)
    for _ in range(LEAST_FRAMES):
        peer.work.activation_gate.admit(torch.ones(shape))
    wire = await stranger(peer)
    await ask_for_room(wire, peer, 1)
    await send_forward(wire, peer, 1, 1000.0)
    assert await heard(wire) == Answer(ticket_of(peer, 1).id, is_taken=True)
    assert await heard(wire) == Lost(ticket_of(peer, 1).id)
    assert peer.flow._computing._queue.empty(), "nothing of it is computed"
    await wire.close()


async def forge_a_ticket(peer: StagePeer) -> None:
    wire = await stranger(peer)
    forged = replace(ticket_of(peer, 1), mark=0.9)
    await wire.write(flow_wire.encode(Want(forged, 60.0)))
    await ended(wire)
    assert len(peer.strikes) == 1
    await wire.close()


async def invent_heads(swarm: StageSwarm) -> None:
    (peer,) = swarm.of_stage(1)
    wire = await stranger(peer)
    for head in ("invented 1", "invented 2", "invented 3"):
        final = ticket_of(peer, 1, head=head, mark=1.0, num_tokens=0)
        await wire.write(flow_wire.encode(Mark(final)))
    await wire.write(flow_wire.encode(Want(ticket_of(peer, 1, mark=1.0), 60.0)))
    assert await heard(wire) == Answer(ticket_of(peer, 1).id, is_taken=False)
    await wire.close()


def test_invented_heads_do_not_end_the_training_of_a_stage(tmp_path: Path) -> None:
    """One stream and four keys; the stages follow the head to the end, and no Mark of these keys is passed on."""
    with swarm_of(spec_of(steps=6, **FP32), tmp_path, num_replicas=1, rooms=1, before=invent_heads) as swarm:
        swarm.wait(swarm.peers)
        assert [(peer.work.steps, peer.outer.progress) for peer in swarm.peers] == [(6, 1.0)] * 3
        assert not [peer.strikes for peer in swarm.peers if peer.strikes]
        invented = {identity_of(name).peer_id for name in ("invented 1", "invented 2", "invented 3", "stranger")}
        heard_of = [bool(invented & set(peer.looked_for)) for peer in swarm.peers]
        assert heard_of == [False, True, False]


def test_a_replica_looks_for_the_record_of_a_head_that_it_has_not_seen(tmp_path: Path) -> None:
    async def forget(swarm: StageSwarm) -> None:
        swarm.unread.update(swarm.listed)
        swarm.listed.clear()

    with swarm_of(spec_of(steps=4, **FP32), tmp_path, num_replicas=1, rooms=1, before=forget) as swarm:
        swarm.wait(swarm.peers)
        assert [(peer.work.steps, peer.outer.progress) for peer in swarm.peers] == [(4, 1.0)] * 3


@pytest.mark.parametrize(
    "attack",
    [
        send_what_is_not_finite,
        send_what_is_a_thousand_times_too_large,
        repeat_a_forward,
        flood_with_forwards,
        forge_a_ticket,
    ],
    ids=lambda attack: attack.__name__,
)
def test_a_dishonest_head_changes_nothing(
    attack: Callable[[StagePeer], Coroutine[None, None, None]], tmp_path: Path
) -> None:
    swarm = StageSwarm(spec_of(steps=4, **FP32), tmp_path, num_replicas=1, rooms=2)
    swarm.peers = [peer] = swarm.of_stage(1)
    swarm.listed.add(identity_of("stranger").peer_id)
    try:
        swarm.network.call(swarm.start(), PATIENCE_S)
        swarm.network.call(attack(peer), PATIENCE_S)
    finally:
        swarm.network.call(swarm.stop(), PATIENCE_S)
        swarm.network.stop()
