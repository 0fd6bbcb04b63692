"""Stages in one process, over real gRPC and TLS on loopback, learn what a single machine learns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from admitting import Admitting
from harness.identities import identity_of
from harness.patience import PATIENCE_S
from staged_reference import FP32, assert_trained_as, material_of, spec_of, trained_alone

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import PeerError
from noloco_p2p.flow.frames import Answer, Credit, Forward, Lost, Mark, MicrobatchId, MicrobatchTicket, Want
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net import flow_wire
from noloco_p2p.net.connection import CallerWire, Connector
from noloco_p2p.net.flow import FLOW_METHOD, MAX_DROPPED
from noloco_p2p.net.flow_wire import FlowHello, Piece, WireFrame
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session
from noloco_p2p.net.throttle import UNLIMITED
from noloco_p2p.net.tickets import Tickets
from noloco_p2p.peer.network_thread import NetworkThread
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.stage import build_stage, train_of_stage
from noloco_p2p.trainer.stage_flow import StageFlow
from noloco_p2p.trainer.stage_work import LEAST_FRAMES, StageLoop


class Schedule:
    """The outer optimizer of a peer that has no partners."""

    def __init__(self, spec: TrainerSpec) -> None:
        self.progress = 0.0
        self._step = 1 / spec.train.total_steps

    def step(self) -> None:
        self.progress = min(1.0, round(self.progress + self._step, 9))

    def hold_progress(self) -> None: ...


class StagePeer:
    """The only peer of one stage: its server and streams run on the network thread, and a thread of its own computes.

    It is also its own `Network`, with the `LivePeers`, the heads and the `BanList` in it.
    """

    limits = UNLIMITED
    directory = SimpleNamespace(node=SimpleNamespace(guard=DialGuard()))
    reachability = SimpleNamespace(is_closed=lambda: False)

    def __init__(self, swarm: StageSwarm, stage: int, *, rooms: int) -> None:
        spec, cut = swarm.spec, swarm.spec.pipeline.cut
        assert cut != "auto"
        self.swarm, self.spec, self.stage, self._rooms = swarm, spec, stage, rooms
        self.strikes: list[str] = []
        self.looked_for: list[str] = []
        self.identity = identity_of(f"stage {stage}")
        self.session = Session(self.identity)
        self.live_peers = self.bans = self.heads = self
        built = build_stage(spec.model, cut, index=stage, sequence_length=spec.data.sequence_length)
        self.outer = Schedule(spec)
        self.work = StageLoop(built, spec, InnerStep(built.model, train_of_stage(spec)), cast(Any, self.outer))
        self.leaving = threading.Event()
        self.thread = threading.Thread(target=self._train, daemon=True)

    async def start(self) -> None:
        spec, batches = self.spec, None
        if self.stage == 0:
            batches = iter(material_of(spec).batches("replica-0", batch_size=spec.pipeline.microbatch))
        self.flow = StageFlow(
            cast(Any, self),
            self.work,
            num_rooms=self._rooms,
            progress=0.0,
            batches=batches,
            first_number=int(1000 * time.time()),
        )
        self.server = GrpcServer(Admitting(self.hello()), session=self.session, serve_flow=self.flow.links.serve)
        await self.server.start("127.0.0.1", 0)

    async def stop(self) -> None:
        """Stop without a farewell."""
        await self.flow.stop()
        await self.server.stop(0.0)

    def hello(self) -> Hello:
        return Hello(self.peer_id, self.spec.name, self.spec.digest())  # layouts differ between stages

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.peer_id, f"127.0.0.1:{self.server.port}", stage=self.stage, session_key=self.session.key)

    def reached(self) -> Sequence[Candidate]:
        return [peer.candidate for peer in self.swarm.peers if peer is not self]

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        return next((peer.candidate for peer in self.swarm.peers if peer.peer_id == peer_id), None)

    def __contains__(self, head: object) -> bool:
        return head in self.swarm.listed

    async def look_for(self, head: str) -> None:
        """Read the record of a head, which this peer may not have seen yet."""
        self.looked_for.append(head)
        if head in self.swarm.unread:
            self.swarm.listed.add(head)

    def strike(self, peer: str, why: str) -> None:
        self.strikes.append(why)

    def why(self, peer: str) -> str:
        return ""

    def _train(self) -> None:
        while not self.leaving.is_set() and (self.flow.turn(0.1) or not self.flow.node.is_over):
            pass
        if self.flow.node.is_over:
            self.work.finish()


class StageSwarm:
    """A peer of each of `stages`. `rooms`: microbatches that a peer holds, or that a head has in flight."""

    def __init__(self, spec: TrainerSpec, *, rooms: int, stages: Sequence[int] = (0, 1, 2)) -> None:
        self.spec = spec
        self.network = NetworkThread()
        self.listed: set[str] = set()  # heads whose record every peer has seen
        self.unread: set[str] = set()  # heads whose record a peer sees once it looks for it
        self.peers = [StagePeer(self, stage, rooms=rooms) for stage in stages]

    async def start(self) -> None:
        self.listed.update(peer.peer_id for peer in self.peers if peer.stage == 0)
        for peer in self.peers:
            await peer.start()
        for peer in self.peers:
            peer.flow.start()

    async def stop(self) -> None:
        for peer in self.peers:
            await peer.stop()


Action = Callable[[StageSwarm], Coroutine[None, None, None]]


@contextmanager
def open_streams(swarm: StageSwarm, before: Action | None) -> Iterator[None]:
    """Open the streams, and let `before` act."""
    try:
        swarm.network.call(swarm.start(), PATIENCE_S)
        if before:
            swarm.network.call(before(swarm), PATIENCE_S)
        yield
    finally:
        for peer in swarm.peers:
            peer.leaving.set()
        swarm.network.call(swarm.stop(), PATIENCE_S)
        swarm.network.stop()


def train(spec: TrainerSpec, *, before: Action | None = None) -> list[StagePeer]:
    """Train to the end with one microbatch in flight, after `before` has run while the streams are open."""
    swarm = StageSwarm(spec, rooms=1)
    with open_streams(swarm, before):
        for peer in swarm.peers:
            peer.thread.start()
        for peer in swarm.peers:
            peer.thread.join(PATIENCE_S)
            assert not peer.thread.is_alive()
    assert not [peer.strikes for peer in swarm.peers if peer.strikes]
    return swarm.peers


def test_one_path_with_one_microbatch_in_flight_is_a_single_machine() -> None:
    spec = spec_of(steps=20, **{**FP32, "train.clip_norm": 0.3})
    alone = trained_alone(spec)
    start = dict(material_of(spec).model().named_parameters())
    for peer in train(spec):
        assert peer.work.steps == 20
        assert_trained_as(alone, start, peer.work.stage.model)


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
    await wire.write(flow_wire.encode(Piece(False, payload)))


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
    peer = swarm.peers[1]
    wire = await stranger(peer)
    for head in ("invented 1", "invented 2", "invented 3"):
        final = ticket_of(peer, 1, head=head, mark=1.0, num_tokens=0)
        await wire.write(flow_wire.encode(Mark(final)))
    await wire.write(flow_wire.encode(Want(ticket_of(peer, 1, mark=1.0), 60.0)))
    assert await heard(wire) == Answer(ticket_of(peer, 1).id, is_taken=False)
    await wire.close()


def test_invented_heads_do_not_end_the_training_of_a_stage() -> None:
    """One stream and four keys; the stages follow the head to the end, and no Mark of these keys is passed on."""
    peers = train(spec_of(steps=6, **FP32), before=invent_heads)
    assert [(peer.work.steps, peer.outer.progress) for peer in peers] == [(6, 1.0)] * 3
    invented = {identity_of(name).peer_id for name in ("invented 1", "invented 2", "invented 3", "stranger")}
    assert [bool(invented & set(peer.looked_for)) for peer in peers] == [False, True, False]


def test_a_replica_looks_for_the_record_of_a_head_that_it_has_not_seen() -> None:
    async def forget(swarm: StageSwarm) -> None:
        swarm.unread.update(swarm.listed)
        swarm.listed.clear()

    peers = train(spec_of(steps=4, **FP32), before=forget)
    assert [(peer.work.steps, peer.outer.progress) for peer in peers] == [(4, 1.0)] * 3


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
def test_a_dishonest_head_changes_nothing(attack: Callable[[StagePeer], Coroutine[None, None, None]]) -> None:
    swarm = StageSwarm(spec_of(steps=4, **FP32), rooms=2, stages=[1])
    swarm.listed.add(identity_of("stranger").peer_id)
    with open_streams(swarm, lambda swarm: attack(swarm.peers[0])):
        pass
