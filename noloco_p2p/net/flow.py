"""Manage the streams of a peer to its neighbours in a pipeline. Each pair of neighbours shares one stream, which either
of them can open.

If both dial at once, the call by the peer with the higher id is used, and the other call is refused with CROSSED. A
later call by the same peer replaces its stream, because the caller was the first to notice that the old stream was
lost. All of this runs on the network thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from noloco_p2p.errors import CorruptPayload, DirectoryError, PeerError, Refused, TimedOut, Unreachable
from noloco_p2p.flow.frames import Backward, Forward, Frame, Mark, Want
from noloco_p2p.flow.node import Node
from noloco_p2p.gossip.frames import Hello, Refuse, RefuseCode
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import short_id
from noloco_p2p.net import convert, flow_wire
from noloco_p2p.net.connection import CallerWire, Connector, nobody_is_banned
from noloco_p2p.net.flow_wire import PIECE_BYTES, FlowHello, Piece, WireFrame
from noloco_p2p.net.server import ServerWire, refuse_to_wire
from noloco_p2p.net.swap_stream import Wire
from noloco_p2p.net.tickets import Tickets
from noloco_p2p.owned_tasks import OwnedTasks

log = logging.getLogger(__name__)

FLOW_METHOD = "Flow"
OPEN_S = 10.0  # to find and call a peer and get its answer, and as much again for a call that crossed this one
FIRST_WORDS_S = 5.0  # from a call to its FlowHello
PROVEN_S = 3600.0  # the age at which the caller ends a stream, to authenticate itself again
LATEST_S = 1.1 * PROVEN_S  # the age at which the called peer ends it, because an invitation may have expired
MAX_DIALLED = 32  # streams; beyond that, the least recently used one is closed
MAX_ACCEPTED = 32  # streams; beyond that, the longest idle one is closed, if it has been idle for `stuck_s`
MAX_DROPPED = 16  # consecutive forwards from one neighbour; an honest neighbour sends only after a Credit
STUCK_S = 30.0  # longest wait to send a message, or for the next piece of a payload; enough for 1 MiB at 0.3 Mbit/s
MAX_QUEUED = 1024  # frames without a payload; a neighbour that lets the queue fill up is stuck
PAUSE_QUEUED = 256  # with a longer queue, nothing is read, because each frame that is read is answered

CONTROL, BACKWARD, FORWARD = range(3)  # in the order in which waiting frames are sent

Waiting = tuple[Frame, float]  # a frame, and the time on the event loop's clock at which it was ready


@dataclass(slots=True)
class Arriving:
    """A payload that is arriving. `frame` is the frame that announced it."""

    frame: Forward | Backward
    since_s: float
    data: bytearray = field(default_factory=bytearray)


class FlowLink:
    """A stream to one neighbour. `run` is the only user of the connection.

    Frames without a payload are sent first, then backward frames, then forward frames. A more urgent frame can be sent
    between two pieces of a less urgent one. On the receiving end, at most one payload per direction is held, and its
    size is known from the spec. Nothing more is read while a payload is checked or while answers wait to be sent, so a
    peer that floods this one only slows itself down.
    """

    def __init__(
        self,
        links: FlowLinks,
        peer: str,
        stage: int,
        wire: Wire,
        *,
        first_words: bytes = b"",
        is_dialled: bool = False,
    ) -> None:
        self.peer, self.stage, self.is_dialled = peer, stage, is_dialled
        self._clock = asyncio.get_running_loop().time
        self.opened_s = self.used_s = self._clock()
        # The time of the last payload in either direction, or of the opening if there was none.
        self.worked_s = self.opened_s
        self._links, self._wire, self._first_words = links, wire, first_words
        # (urgency, number, frame, time at which it was ready); the memory limits of both peers bound the payloads
        self._waiting: asyncio.PriorityQueue[tuple[int, int, WireFrame, float]] = asyncio.PriorityQueue()
        self._num_sent = self._num_control = 0
        self._arriving: dict[bool, Arriving] = {}
        self._num_dropped = 0
        self._few_queued = asyncio.Event()
        self._few_queued.set()
        self._stopped: asyncio.Future[PeerError] = asyncio.get_running_loop().create_future()

    def send(self, frame: Frame, since_s: float) -> None:
        """Queue a frame for sending. Its remaining time is counted from `since_s`, on the clock of the event loop.

        This never waits and never raises an error.
        """
        self.used_s = self._clock()
        if isinstance(frame, Forward | Backward):
            self.worked_s = self._clock()
            payload, is_backward = frame.payload, isinstance(frame, Backward)
            assert isinstance(payload, memoryview)
            urgency = BACKWARD if is_backward else FORWARD
            self._queue(urgency, replace(frame, payload=payload.nbytes), since_s)
            for begin in range(0, payload.nbytes, PIECE_BYTES):
                self._queue(urgency, Piece(is_backward, payload[begin : begin + PIECE_BYTES]), since_s)
        elif self._num_control < MAX_QUEUED:
            self._num_control += 1
            self._queue(CONTROL, frame, since_s)
        else:
            self.stop(TimedOut(f"the neighbour is too slow: {MAX_QUEUED} frames are waiting", peer=self.peer))
        if self._num_control >= PAUSE_QUEUED:
            self._few_queued.clear()

    def _queue(self, urgency: int, frame: WireFrame, since_s: float) -> None:
        self._num_sent += 1
        self._waiting.put_nowait((urgency, self._num_sent, frame, since_s))

    def stop(self, fault: PeerError) -> None:
        """Stop receiving, and end `run`."""
        if not self._stopped.done():
            self._stopped.set_result(fault)

    async def run(self) -> PeerError:
        """Carry frames in both directions until the stream ends, then close it and return the error that ended it."""
        tasks = [asyncio.create_task(self._until_fault(way)) for way in (self._read_all, self._write_all)]
        try:
            return await self._stopped
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._wire.close()

    async def _until_fault(self, way: Callable[[], Coroutine[Any, Any, None]]) -> None:
        fault: PeerError = Unreachable("the neighbour closed the stream", peer=self.peer)
        try:
            await way()
        except PeerError as error:
            fault = error
        except TimeoutError:
            silence = f"the neighbour has not sent or accepted any data for {self._links.stuck_s:g} s"
            fault = TimedOut(silence, peer=self.peer)
        self.stop(fault)

    async def _write_all(self) -> None:
        data = self._first_words
        while True:
            if data:
                async with asyncio.timeout(self._links.stuck_s):
                    await self._wire.write(data)
            urgency, _, frame, since_s = await self._waiting.get()
            if urgency == CONTROL:
                self._num_control -= 1
                if self._num_control < PAUSE_QUEUED:
                    self._few_queued.set()
            data = flow_wire.encode(self._aged(frame, since_s))

    async def _read_all(self) -> None:
        links = self._links
        while True:
            async with asyncio.timeout(links.stuck_s if self._arriving else None):
                data = await self._wire.read()
            if data is None:
                return
            self.used_s = self._clock()
            frame = self._taken(flow_wire.decode(data))
            if frame is not None:
                if isinstance(frame, Want | Mark):
                    links.tickets.check(frame.ticket)
                frame = await links.check(self.peer, frame)
                if self._stopped.done():
                    return
                is_expected = links.node.received(self.peer, frame)
                if isinstance(frame, Forward | Backward):
                    self.worked_s = self._clock()
                if isinstance(frame, Forward):
                    self._num_dropped = 0 if is_expected else self._num_dropped + 1
                    if self._num_dropped > MAX_DROPPED:
                        raise CorruptPayload(f"it sent {MAX_DROPPED} forward frames without a reservation")
            await self._few_queued.wait()

    def _taken(self, frame: WireFrame) -> Frame | None:
        """Return a complete frame, or None while its payload is incomplete.

        Raises CorruptPayload for what no honest peer sends.
        """
        match frame:
            case Forward() | Backward():
                is_backward, expected = isinstance(frame, Backward), self._links.payload_bytes(frame)
                if frame.payload != expected:
                    raise CorruptPayload(f"a payload of {frame.payload} bytes was announced instead of {expected}")
                if is_backward in self._arriving:
                    raise CorruptPayload("a payload was announced before the previous one was complete")
                self._arriving[is_backward] = Arriving(frame, self._clock())
                return None
            case Piece(is_backward, piece):
                if not (arriving := self._arriving.get(is_backward)):
                    raise CorruptPayload("received a piece of a payload that was not announced")
                whole = self._links.payload_bytes(arriving.frame)
                expected = min(PIECE_BYTES, whole - len(arriving.data))
                if len(piece) != expected:
                    raise CorruptPayload(f"a piece has {len(piece)} bytes instead of {expected}")
                arriving.data += piece
                if len(arriving.data) < whole:
                    return None
                del self._arriving[is_backward]
                return replace(self._aged(arriving.frame, arriving.since_s), payload=memoryview(arriving.data))
            case FlowHello() | Refuse():
                raise CorruptPayload("received a FlowHello or Refuse after the start of the stream")
            case _:
                return frame

    def _aged(self, frame: Any, since_s: float) -> Any:
        """Return the frame with the remaining time that is left after this peer has held it."""
        if not isinstance(frame, Want | Forward):
            return frame
        return replace(frame, remaining_s=max(0.0, frame.remaining_s - (self._clock() - since_s)))


class FlowLinks:
    """The streams of a peer to its neighbours, and the `flow.node.Links` of its node.

    `node` must be set before the first stream opens. `hello` returns the Hello of this peer, which is sent without its
    layout. `check` checks a frame and returns it, without its payload if that cannot be used, or raises CorruptPayload.
    It is awaited before the next frame of the same stream is read. `strike` is called with a peer that misbehaved and a
    description of what it did.
    """

    node: Node[Any]

    def __init__(
        self,
        hello: Callable[[], Hello],
        tickets: Tickets,
        *,
        stage: int,
        num_stages: int,
        forward_bytes: int,
        backward_bytes: int,
        connector: Connector,
        find: Callable[..., Awaitable[Candidate | None]],
        check: Callable[[str, Frame], Awaitable[Frame]],
        strike: Callable[[str, str], None],
        why_banned: Callable[[str], str] = nobody_is_banned,
        stuck_s: float = STUCK_S,
        max_accepted: int = MAX_ACCEPTED,
    ) -> None:
        self.tickets, self.check, self.stuck_s = tickets, check, stuck_s
        self._hello = hello
        self._stage, self._num_stages = stage, num_stages
        self._forward_bytes, self._backward_bytes = forward_bytes, backward_bytes
        self._connector, self._find = connector, find
        self._why_banned, self._strike = why_banned, strike
        self._max_accepted = max_accepted
        self._links: dict[str, FlowLink] = {}
        # With the frames that wait for the stream.
        self._dials: dict[str, tuple[asyncio.Task[None], list[Waiting]]] = {}
        self._tasks = OwnedTasks("a pipeline stream")
        self._is_leaving = False

    @property
    def stages(self) -> dict[str, int]:
        """Return the stage of each peer with an open stream."""
        return {peer: link.stage for peer, link in self._links.items()}

    def payload_bytes(self, frame: Forward | Backward) -> int:
        return self._backward_bytes if isinstance(frame, Backward) else self._forward_bytes

    def send(self, to: str, frame: Frame) -> None:
        """Send a frame over the stream to a peer, and open the stream if necessary. This never waits and never raises
        an error.

        The tickets of this peer are signed here. The frame's remaining time is counted from now.
        """
        if isinstance(frame, Want | Mark):
            frame = replace(frame, ticket=self.tickets.signed(frame.ticket))
        since_s = asyncio.get_running_loop().time()
        if link := self._links.get(to):
            link.send(frame, since_s)
            return
        self.open(to)
        _, waiting = self._dials.get(to, (None, None))
        if waiting is not None and len(waiting) < MAX_QUEUED:
            waiting.append((frame, since_s))

    def broadcast(self, frame: Frame, *, but: str = "") -> None:
        """Send a frame over all open streams except the stream to `but`."""
        for peer in [peer for peer in self._links if peer != but]:
            self.send(peer, frame)

    def open(self, peer: str) -> None:
        """Open a stream to a peer if there is none, and report the result to the node."""
        if peer not in self._links and peer not in self._dials and not self._is_leaving:
            self._dials[peer] = self._tasks.start(self._dial(peer)), []

    def look(self) -> None:
        """End the streams of banned peers, and the oldest stream if it is too old. Call this about once per second.

        If a stream is too old, its caller opens another one and authenticates itself again.
        """
        now_s = asyncio.get_running_loop().time()
        for link in list(self._links.values()):
            if why := self._why_banned(link.peer):
                self._drop(link, Refused(f"it is {why}", peer=link.peer, code=RefuseCode.BANNED.name))
        oldest = min(self._links.values(), key=lambda link: link.opened_s, default=None)
        if oldest and now_s - oldest.opened_s > (PROVEN_S if oldest.is_dialled else LATEST_S):
            self._drop(oldest, Unreachable("its authentication proof is too old", peer=oldest.peer))

    async def stop(self) -> None:
        """End all streams immediately. No stream is opened or accepted from now on."""
        self._is_leaving = True
        for link in self._links.values():
            link.stop(Unreachable("this peer is leaving", peer=link.peer))
        self._links.clear()
        for dial, _ in self._dials.values():
            dial.cancel()
        await self._tasks.stop(grace_s=1.0)

    # calls by this peer

    async def _dial(self, peer: str) -> None:
        """Open a stream to a peer. This is cancelled if that peer calls this one in the meantime."""
        try:
            try:
                async with asyncio.timeout(OPEN_S):
                    wire, stage = await self._call(peer)
            except Refused as error:
                if error.code != RefuseCode.CROSSED.name:
                    raise
                await asyncio.sleep(OPEN_S)  # for the call in favour of which it refused this one
                raise
        except (PeerError, DirectoryError, TimeoutError) as error:
            log.debug("could not open a stream to ..%s: %s", short_id(peer), error or "it took too long")
            del self._dials[peer]
            self.node.closed(peer)
            return
        dialled = [link for link in self._links.values() if link.is_dialled]
        if len(dialled) >= MAX_DIALLED:
            unused = min(dialled, key=lambda link: link.used_s)
            self._drop(unused, Unreachable("it was replaced by another stream", peer=unused.peer))
        self._add(FlowLink(self, peer, stage, wire, is_dialled=True))

    async def _call(self, peer: str) -> tuple[CallerWire, int]:
        candidate = await self._find(peer, timeout_s=OPEN_S)
        if candidate is None or not candidate.can_be_called:
            raise Unreachable("its address is unknown or cannot be dialled", peer=peer)
        wire = await self._connector.call(candidate, FLOW_METHOD, timeout_s=OPEN_S)
        try:
            await wire.write(self._own_hello())
            answer = flow_wire.decode(await wire.read() or b"")
            if isinstance(answer, Refuse):
                raise Refused(answer.sentence, peer=peer, code=answer.code.name, retry_after_s=answer.retry_after_s)
            return wire, self._neighbour(answer).stage
        except BaseException:
            await wire.close()
            raise

    # calls by other peers

    async def serve(self, wire: ServerWire, caller: str, admit: Callable[[Hello], None]) -> None:
        """Serve a stream until it has ended.

        `caller` is the authenticated peer id, or "". `admit` is called once there is space for the stream. It raises
        PeerError if the caller is not admitted.
        """
        try:
            async with asyncio.timeout(FIRST_WORDS_S):
                first = self._neighbour(flow_wire.decode(await wire.read() or b""))
            peer = caller or first.hello.peer_id
            idle = self._place_for(peer)
            admit(replace(first.hello, layout=""))
        except (PeerError, TimeoutError) as error:
            fault = error if isinstance(error, PeerError) else TimedOut("no FlowHello was received")
            refuse = convert.from_wire(Refuse, refuse_to_wire(fault))
            with contextlib.suppress(PeerError, TimeoutError):  # the caller did not wait for the answer
                async with asyncio.timeout(FIRST_WORDS_S):
                    await wire.write(flow_wire.encode(refuse))
            return
        if idle:
            self._drop(idle, Unreachable("it was replaced by another stream", peer=idle.peer))
        link = FlowLink(self, peer, first.stage, wire, first_words=self._own_hello())
        self._add(link)
        try:
            await wire.closed()
        finally:
            if not wire.is_closed:  # gRPC cancels the handler when the caller is gone
                self._drop(link, Unreachable("the connection was lost", peer=peer))

    def _place_for(self, peer: str) -> FlowLink | None:
        """Return the stream to close to make room for a new one, or None if there is room.

        Raises Refused if this peer's own call is used instead, if all streams are busy, or if this peer is leaving.
        """
        if self._is_leaving:
            raise Refused("this peer is leaving", peer=peer, code=RefuseCode.NOT_TRAINING.name)
        is_ours_first = self._hello().peer_id > peer
        now_s, link = asyncio.get_running_loop().time(), self._links.get(peer)
        has_just_called = link is not None and link.is_dialled and now_s - link.opened_s < OPEN_S
        if is_ours_first and (peer in self._dials or has_just_called):
            raise Refused("my own call to you takes precedence", peer=peer, code=RefuseCode.CROSSED.name)
        others = [other for other in self._links.values() if other is not link and not other.is_dialled]
        if len(others) < self._max_accepted:
            return None
        idle = min(others, key=lambda other: other.worked_s)
        if now_s - idle.worked_s < self.stuck_s:
            sentence = f"I have already accepted {self._max_accepted} streams from neighbours, which is the maximum"
            raise Refused(sentence, peer=peer, code=RefuseCode.BUSY.name, retry_after_s=self.stuck_s)
        return idle

    # all streams

    def _own_hello(self) -> bytes:
        return flow_wire.encode(FlowHello(replace(self._hello(), layout=""), self._stage))

    def _neighbour(self, frame: WireFrame) -> FlowHello:
        """Return the first frame of a stream. Raises PeerError if it is not the FlowHello of a neighbour."""
        if not isinstance(frame, FlowHello):
            raise CorruptPayload("a pipeline stream must begin with a FlowHello")
        if frame.stage >= self._num_stages or abs(frame.stage - self._stage) not in (1, self._num_stages - 1):
            sentence = f"your stage {frame.stage} is not adjacent to my stage {self._stage}"
            raise Refused(sentence, peer=frame.hello.peer_id, code=RefuseCode.OTHER_MODEL.name)
        return frame

    def _add(self, link: FlowLink) -> None:
        if before := self._links.get(link.peer):
            link.worked_s = before.worked_s  # otherwise, a peer that calls repeatedly would never be idle
            self._drop(before, Unreachable("it was replaced by a new stream to the same peer", peer=link.peer))
        dial, waiting = self._dials.pop(link.peer, (None, []))
        self._links[link.peer] = link
        self._tasks.start(self._carry(link))
        for frame, since_s in waiting:
            link.send(frame, since_s)
        if dial and not link.is_dialled:
            dial.cancel()
        self.node.opened(link.peer)

    async def _carry(self, link: FlowLink) -> None:
        fault = await link.run()
        if isinstance(fault, CorruptPayload):
            self._strike(link.peer, str(fault))
        self._drop(link, fault)

    def _drop(self, link: FlowLink, fault: PeerError) -> None:
        link.stop(fault)
        if self._links.get(link.peer) is link:
            log.debug("the stream to ..%s has ended: %s", short_id(link.peer), fault)
            del self._links[link.peer]
            self.node.closed(link.peer)
