"""Streams between neighbours in a pipeline, over real gRPC and TLS on loopback: dialling, endings and limits.

The state machines of the pipeline take no part: the neighbours only record what they receive.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from admitting import Admitting
from harness.identities import identity_of
from harness.patience import PATIENCE_S

from noloco_p2p.errors import CorruptPayload, Unreachable
from noloco_p2p.flow.frames import Answer, Backward, Credit, Forward, Frame, Lost, MicrobatchId, MicrobatchTicket, Want
from noloco_p2p.gossip.frames import Hello, RefuseCode
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net import flow_wire
from noloco_p2p.net.connection import CallerWire, Connector
from noloco_p2p.net.flow import FLOW_METHOD, FlowLinks
from noloco_p2p.net.flow_wire import PIECE_BYTES, FlowHello, Piece, WireFrame
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session
from noloco_p2p.net.tickets import Tickets

FORWARD_BYTES, BACKWARD_BYTES = 3 * PIECE_BYTES + 5, 2 * PIECE_BYTES
NUM_STAGES = 3
NAMES = sorted(("one", "two", "three"), key=lambda name: identity_of(name).peer_id)
LOW, MIDDLE, HIGH = NAMES


def hello_of(name: str, *, run_name: str = "flow") -> Hello:
    return Hello(identity_of(name).peer_id, run_name, "ab" * 32, layout=name)


class Node:
    """A peer with its server and streams, which records what they report. `gate` delays the handling of frames."""

    def __init__(self, town: Town, name: str, stage: int, **limits: Any) -> None:
        self.name, self.stage, self.peer_id = name, stage, identity_of(name).peer_id
        self.events: list[tuple[str, str]] = []  # ("opened" or "closed", peer id)
        self.frames: list[Frame] = []
        self.strikes: list[str] = []
        self.banned: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.session = Session(identity_of(name))
        self.links = FlowLinks(
            lambda: hello_of(name),
            Tickets(identity_of(name), spec_digest="ab" * 32, max_tokens=3),
            stage=stage,
            num_stages=NUM_STAGES,
            forward_bytes=FORWARD_BYTES,
            backward_bytes=BACKWARD_BYTES,
            check=self.check,
            connector=Connector(self.session, why_banned=self.why_banned),
            find=town.find,
            why_banned=self.why_banned,
            strike=lambda peer, why: self.strikes.append(why),
            **limits,
        )
        self.links.node = cast(Any, self)
        self.server = GrpcServer(Admitting(hello_of(name)), session=self.session, serve_flow=self.links.serve)

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.peer_id, f"127.0.0.1:{self.server.port}", session_key=self.session.key)

    def why_banned(self, peer: str) -> str:
        return "banned" if peer in self.banned else ""

    def opened(self, peer: str) -> None:
        self.events.append(("opened", peer))

    def closed(self, peer: str) -> None:
        self.events.append(("closed", peer))

    async def check(self, peer: str, frame: Frame) -> Frame:
        await self.gate.wait()
        if isinstance(frame, Credit):
            raise CorruptPayload("no honest peer sends it here")
        return frame

    def received(self, peer: str, frame: Frame) -> None:
        self.frames.append(frame)

    async def stop(self) -> None:
        await self.links.stop()
        await self.server.stop(0.0)


class Town:
    """The peers that can be found, except those in `undialled`, which nobody can dial."""

    def __init__(self, **limits: Any) -> None:
        self.nodes: dict[str, Node] = {}
        self.undialled: set[str] = set()
        self._limits = limits

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        node = self.nodes.get(peer_id)
        return node.candidate if node and node.name not in self.undialled else None

    async def start(self, name: str, stage: int) -> Node:
        node = Node(self, name, stage, **self._limits)
        await node.server.start("127.0.0.1", 0)
        self.nodes[node.peer_id] = node
        return node


@asynccontextmanager
async def town(*stages: tuple[str, int], **limits: Any) -> AsyncGenerator[tuple[Town, list[Node]]]:
    made = Town(**limits)
    nodes = [await made.start(name, stage) for name, stage in stages]
    try:
        yield made, nodes
    finally:
        for node in list(made.nodes.values()):
            await node.stop()


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; the deadline is that of the test."""
    holds = False
    while not holds:
        await asyncio.sleep(0.005)
        holds = bool(condition())


def id_of(number: int) -> MicrobatchId:
    return MicrobatchId(identity_of("head").peer_id, number)


def forward(number: int, remaining_s: float = 100.0) -> Forward:
    return Forward(id_of(number), remaining_s, memoryview(os.urandom(FORWARD_BYTES)))


def backward(number: int) -> Backward:
    return Backward(id_of(number), memoryview(os.urandom(BACKWARD_BYTES)))


async def stranger(node: Node, name: str, hello: WireFrame, *frames: WireFrame) -> CallerWire:
    """Return a stream of a proven caller, which writes its frames after the hello is answered: before, limits are
    tight."""
    connector = Connector(Session(identity_of(name)))
    wire = await connector.call(node.candidate, FLOW_METHOD, timeout_s=PATIENCE_S)
    await wire.write(flow_wire.encode(hello))
    if frames:
        await wire.read()
    for frame in frames:
        await wire.write(flow_wire.encode(frame))
    return wire


async def answer_to(node: Node, name: str, hello: WireFrame, kept: dict[str, CallerWire] | None = None) -> WireFrame:
    """Return the answer to a hello. The stream is stored in `kept` under the name, or closed if `kept` is None."""
    wire = await stranger(node, name, hello)
    answer = flow_wire.decode(await wire.read() or b"")
    if kept is None:
        await wire.close()
    else:
        kept[name] = wire
    return answer


@pytest.mark.parametrize("caller_stage", [0, 1])
async def test_either_side_dials_and_payloads_go_both_ways(caller_stage: int) -> None:
    async with town((LOW, 0), (HIGH, 1)) as (made, nodes):
        caller, other = nodes[caller_stage], nodes[1 - caller_stage]
        made.undialled = {caller.name}  # as behind a router
        sent, back = forward(1), backward(1)
        caller.links.send(other.peer_id, sent)
        await until(lambda: other.frames)
        [arrived] = other.frames
        assert isinstance(arrived, Forward)
        assert arrived.payload == sent.payload
        assert 0 < arrived.remaining_s < sent.remaining_s
        other.links.send(caller.peer_id, back)  # over the same stream
        await until(lambda: caller.frames)
        assert caller.frames == [back]
        caller.links._links[other.peer_id].stop(Unreachable("enough"))
        await until(lambda: other.events[-1] == ("closed", caller.peer_id))
        for node in nodes:
            assert [event for event, _ in node.events] == ["opened", "closed"]
            assert not node.strikes


async def test_when_both_dial_at_once_one_stream_stands_and_no_frame_is_lost() -> None:
    async with town((LOW, 1), (HIGH, 2)) as (_, nodes):
        for _ in range(5):
            for node, other in (nodes, nodes[::-1]):
                node.links.send(other.peer_id, Lost(id_of(node.stage)))
            await until(lambda: all(node.frames for node in nodes))
            await asyncio.sleep(0.05)  # meanwhile the redundant call ends
            assert [node.frames for node in nodes] == [[Lost(id_of(2))], [Lost(id_of(1))]]
            assert [[event for event, _ in node.events] for node in nodes] == [["opened"], ["opened"]]
            nodes[0].links._links[nodes[1].peer_id].stop(Unreachable("enough"))
            await until(lambda: len(nodes[1].events) == 2)
            for node in nodes:
                node.events.clear()
                node.frames.clear()


async def test_urgent_frames_overtake_a_forward_and_time_in_the_queue_counts() -> None:
    async with town((LOW, 0), (HIGH, 1)) as (_, [node, other]):
        node.links.open(other.peer_id)
        await until(lambda: node.events)
        began_s = asyncio.get_running_loop().time() - 7.0
        first, second = forward(1), forward(2)
        ticket = MicrobatchTicket(MicrobatchId(node.peer_id, 4), 0.5, 3)
        for frame in (first, second, backward(3), Want(node.links.tickets.signed(ticket), 50.0)):
            node.links._links[other.peer_id].send(frame, began_s)
        await until(lambda: len(other.frames) == 4)
        want, *payloads = other.frames
        assert isinstance(want, Want)
        assert want.remaining_s <= 43
        assert [frame.id.number for frame in payloads if isinstance(frame, Forward | Backward)] == [3, 1, 2]
        assert all(frame.remaining_s <= 93 for frame in payloads if isinstance(frame, Forward))


async def test_a_call_of_the_same_peer_takes_the_place_of_its_stream() -> None:
    """The peer has restarted, and this side has not noticed yet."""
    async with town((LOW, 1)) as (_, [node]):
        hello = FlowHello(hello_of(HIGH), 0)
        wires = [await stranger(node, HIGH, hello, Lost(id_of(1)))]
        await until(lambda: node.frames)
        wires.append(await stranger(node, HIGH, hello, Lost(id_of(2))))
        await until(lambda: len(node.frames) == 2)
        assert [event for event, _ in node.events] == ["opened", "closed", "opened"]
        assert len(node.links.stages) == 1
        for wire in wires:
            await wire.close()


async def test_a_peer_that_dies_in_the_middle_of_a_payload_leaves_nothing() -> None:
    async with town((LOW, 1)) as (_, [node]):
        announced = Forward(id_of(1), 10.0, FORWARD_BYTES)
        wire = await stranger(node, HIGH, FlowHello(hello_of(HIGH), 0), announced, piece_of(bytes(PIECE_BYTES)))
        await until(lambda: node.events)
        await wire.close()
        await until(lambda: len(node.events) == 2)
        assert [event for event, _ in node.events] == ["opened", "closed"]
        assert not node.frames
        assert not node.strikes


async def test_a_payload_that_stops_coming_ends_the_stream() -> None:
    async with town((LOW, 1), stuck_s=0.2) as (_, [node]):
        wire = await stranger(node, HIGH, FlowHello(hello_of(HIGH), 0), Lost(id_of(1)))
        await until(lambda: node.frames)
        await asyncio.sleep(0.5)
        assert [event for event, _ in node.events] == ["opened"]  # a neighbour may be silent between payloads
        await wire.write(flow_wire.encode(Forward(id_of(1), 10.0, FORWARD_BYTES)))
        await until(lambda: len(node.events) == 2)
        assert not node.strikes
        await wire.close()


def piece_of(payload: bytes, *, is_backward: bool = False) -> Piece:
    return Piece(is_backward, payload)


ANNOUNCED = Forward(id_of(1), 10.0, FORWARD_BYTES)
LOST = Lost(id_of(1))


@pytest.mark.parametrize(
    "frames",
    [
        [Forward(id_of(1), 10.0, FORWARD_BYTES + 1)],
        [Forward(id_of(1), 10.0, 2**63)],
        [Backward(id_of(1), FORWARD_BYTES)],
        [ANNOUNCED, ANNOUNCED],
        [ANNOUNCED, piece_of(bytes(PIECE_BYTES - 1))],
        [ANNOUNCED, piece_of(bytes(PIECE_BYTES + 1))],
        [ANNOUNCED, piece_of(b"")],
        [ANNOUNCED, piece_of(bytes(PIECE_BYTES), is_backward=True)],
        [FlowHello(hello_of(HIGH), 0)],
        [Credit(id_of(1), has_room=True)],  # refused by the driver
    ],
    ids=["large", "huge", "of the other codec", "twice", "short", "long", "empty", "unannounced", "hello", "checked"],
)
async def test_what_no_honest_peer_sends_is_a_strike_and_ends_the_stream(frames: Iterable[WireFrame]) -> None:
    async with town((LOW, 1)) as (_, [node]):
        wire = await stranger(node, HIGH, FlowHello(hello_of(HIGH), 0), *frames)
        await until(lambda: node.strikes)
        await until(lambda: len(node.events) == 2)
        assert [event for event, _ in node.events] == ["opened", "closed"]
        assert len(node.strikes) == 1
        assert not node.frames
        await wire.close()


async def test_nothing_more_is_read_while_a_payload_is_checked() -> None:
    """A flood of forwards therefore waits at its sender."""
    async with town((LOW, 0), (HIGH, 1)) as (_, [node, other]):
        other.gate.clear()
        num_sent = 0
        wire = await stranger(other, MIDDLE, FlowHello(hello_of(MIDDLE), 0))
        await wire.read()
        payload = [bytes(PIECE_BYTES)] * 3 + [bytes(5)]
        try:
            async with asyncio.timeout(1.0):
                for number in range(1000):
                    announced = Forward(id_of(number), 10.0, FORWARD_BYTES)
                    for frame in (announced, *map(piece_of, payload)):
                        await wire.write(flow_wire.encode(frame))
                    num_sent += 1
        except TimeoutError:
            pass
        assert num_sent < 200, "what gRPC reads ahead"
        node.links.send(other.peer_id, Lost(id_of(1)))  # other streams continue
        await until(lambda: ("opened", node.peer_id) in other.events)
        other.gate.set()
        await until(lambda: Lost(id_of(1)) in other.frames)
        await wire.close()


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (FlowHello(hello_of(HIGH, run_name="another"), 0), RefuseCode.OTHER_RUN),
        (FlowHello(hello_of(HIGH), 1), RefuseCode.OTHER_MODEL),
        (FlowHello(hello_of(HIGH), 3), RefuseCode.OTHER_MODEL),
        (FlowHello(hello_of(MIDDLE), 0), RefuseCode.MALFORMED),
        (Answer(id_of(1), is_taken=True), RefuseCode.MALFORMED),
    ],
    ids=["run", "own stage", "no stage", "name of another", "no hello"],
)
async def test_who_is_no_neighbour_is_refused_in_words(hello: WireFrame, code: RefuseCode) -> None:
    async with town((LOW, 1)) as (_, [node]):
        answer = await answer_to(node, HIGH, hello)
        assert getattr(answer, "code", None) is code
        assert not node.events


def num_accepted(node: Node) -> int:
    """Return the number of connections that are exempt from the limits on unaccepted callers."""
    return sum(inbound.is_accepted for inbound in node.server._proxy._inbound.values())


async def test_streams_that_carry_nothing_make_room_for_a_neighbour() -> None:
    """Strangers hold all places. Control frames and repeated calls of one peer do not keep a place."""
    busy, dripping, *idle = (f"holder {number}" for number in range(4))
    async with town((LOW, 1), stuck_s=0.3, max_accepted=4) as (_, [node]):
        wires = {name: await stranger(node, name, FlowHello(hello_of(name), 0), LOST) for name in (busy, dripping)}
        for name in (*idle, idle[0]):
            wires[name] = await stranger(node, name, FlowHello(hello_of(name), 0), LOST)
        await until(lambda: len(node.frames) == 5)
        await asyncio.sleep(0.5)
        payload = [bytes(PIECE_BYTES)] * 3 + [bytes(5)]
        for name, frames in {dripping: [LOST], busy: [ANNOUNCED, *map(piece_of, payload)]}.items():
            for frame in frames:
                await wires[name].write(flow_wire.encode(frame))
        await until(lambda: len(node.frames) == 7)
        newcomers = [f"newcomer {number}" for number in range(3)]
        for name in newcomers:
            assert isinstance(await answer_to(node, name, FlowHello(hello_of(name), 0), wires), FlowHello)
        assert set(node.links.stages) == {identity_of(name).peer_id for name in (busy, *newcomers)}
        for wire in wires.values():
            await wire.close()


async def test_where_all_streams_are_in_use_a_newcomer_is_refused_and_brings_nothing() -> None:
    async with town((LOW, 1), max_accepted=2) as (_, [node]):
        wires = {name: await stranger(node, name, FlowHello(hello_of(name), 0), LOST) for name in ("first", "second")}
        await until(lambda: len(node.frames) == 2)
        answer = await answer_to(node, "third", FlowHello(hello_of("third"), 0), wires)
        assert getattr(answer, "code", None) is RefuseCode.BUSY
        assert num_accepted(node) == 2
        for wire in wires.values():
            await wire.close()


async def test_a_peer_without_a_stage_refuses_in_words() -> None:
    session = Session(identity_of(LOW))
    server = GrpcServer(Admitting(hello_of(LOW)), session=session)
    await server.start("127.0.0.1", 0)
    async with town((HIGH, 1)) as (_, [node]):
        there = Candidate(session.identity.peer_id, f"127.0.0.1:{server.port}", session_key=session.key)
        wire = await Connector(node.session).call(there, FLOW_METHOD, timeout_s=PATIENCE_S)
        await wire.write(flow_wire.encode(FlowHello(hello_of(HIGH), 1)))
        answer = flow_wire.decode(await wire.read() or b"")
        assert getattr(answer, "code", None) is RefuseCode.OTHER_MODEL
        await wire.close()
    await server.stop(0.0)


async def test_a_peer_that_is_banned_later_loses_its_stream() -> None:
    async with town((LOW, 0), (HIGH, 1)) as (_, [node, other]):
        node.links.open(other.peer_id)
        await until(lambda: node.events and other.events)
        node.links.look()
        assert node.links.stages == {other.peer_id: 1}
        node.banned.add(other.peer_id)
        node.links.look()
        assert node.links.stages == {}
        await until(lambda: len(other.events) == 2)
        node.links.open(other.peer_id)
        await until(lambda: len(node.events) == 3)
        assert node.events[-1] == ("closed", other.peer_id)


async def test_a_peer_that_has_stopped_opens_and_takes_no_stream() -> None:
    """If it accepted a stream, its neighbours would wait for the deadlines of the work that it accepted."""
    async with town((LOW, 0), (HIGH, 1)) as (_, [node, other]):
        node.links.open(other.peer_id)
        await until(lambda: node.events and other.events)
        await other.links.stop()
        await until(lambda: len(node.events) == 2)
        node.links.open(other.peer_id)
        await until(lambda: len(node.events) == 3)
        other.links.send(node.peer_id, Lost(id_of(1)))
        await asyncio.sleep(0.05)
        assert [event for event, _ in node.events] == ["opened", "closed", "closed"]
        assert not node.frames
