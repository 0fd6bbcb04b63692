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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from noloco_p2p.errors import CorruptPayload, DirectoryError, PeerError, Refused, TimedOut, Unreachable
from noloco_p2p.flow.frames import Frame
from noloco_p2p.gossip.frames import Hello, Refuse, RefuseCode
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import short_id
from noloco_p2p.net import convert, flow_wire
from noloco_p2p.net.connection import CallerWire, Connector, nobody_is_banned
from noloco_p2p.net.flow_link import MAX_QUEUED, STUCK_S, FlowLink, PayloadSizes
from noloco_p2p.net.flow_wire import FlowHello
from noloco_p2p.net.server import ServerWire, refuse_to_wire
from noloco_p2p.owned_tasks import OwnedTasks

log = logging.getLogger(__name__)

FLOW_METHOD = "Flow"
OPEN_S = 10.0  # to find and call a peer and get its answer, and as much again for a call that crossed this one
FIRST_WORDS_S = 5.0  # from a call to its FlowHello
PROVEN_S = 3600.0  # the age at which the caller ends a stream, to authenticate itself again
LATEST_S = 1.1 * PROVEN_S  # the age at which the called peer ends it, because an invitation may have expired
MAX_DIALLED = 32  # streams; beyond that, the least recently used one is closed
MAX_ACCEPTED = 32  # streams; beyond that, the longest idle one is closed, if it has been idle for `stuck_s`


class Neighbourhood(Protocol):
    """The interface through which a driver learns about its neighbours and receives their frames. All methods are
    called on the event loop.
    """

    def opened(self, peer: str) -> None: ...

    def closed(self, peer: str) -> None:
        """Report that the stream has ended or could not be opened. This is called before a new stream opens."""
        ...

    async def checked(self, peer: str, frame: Frame) -> Frame:
        """Check a frame and return it, without its payload if that cannot be used.

        Raises CorruptPayload for a frame that no honest peer sends.
        """
        ...

    def received(self, peer: str, frame: Frame) -> None: ...


class Find(Protocol):
    """A function like `gossip.seams.Directory.find`."""

    async def __call__(self, peer_id: str, *, timeout_s: float) -> Candidate | None: ...


@dataclass(slots=True, eq=False)
class Dial:
    """A stream that is being opened."""

    task: asyncio.Task[None]
    # Frames that wait for the stream, each with the time at which it was ready.
    frames: list[tuple[Frame, float]] = field(default_factory=list)


class FlowLinks:
    """The streams of a peer to its neighbours.

    `hello` returns the Hello of this peer, which is sent without its layout. `neighbourhood` must be set before the
    first stream opens. `strike` is called with a peer that misbehaved and a description of what it did.
    """

    neighbourhood: Neighbourhood

    def __init__(
        self,
        hello: Callable[[], Hello],
        *,
        stage: int,
        num_stages: int,
        sizes: PayloadSizes,
        connector: Connector,
        find: Find,
        why_banned: Callable[[str], str] = nobody_is_banned,
        strike: Callable[[str, str], None],
        stuck_s: float = STUCK_S,
        max_accepted: int = MAX_ACCEPTED,
    ) -> None:
        self._hello = hello
        self._stage, self._num_stages = stage, num_stages
        self._sizes = sizes
        self._connector = connector
        self._find = find
        self._why_banned = why_banned
        self._strike = strike
        self._stuck_s = stuck_s
        self._max_accepted = max_accepted
        self._links: dict[str, FlowLink] = {}
        self._dials: dict[str, Dial] = {}
        self._tasks = OwnedTasks("a pipeline stream")
        self._is_leaving = False

    @property
    def stages(self) -> dict[str, int]:
        """Return the stage of each peer with an open stream."""
        return {peer: link.stage for peer, link in self._links.items()}

    def send(self, to: str, frame: Frame) -> None:
        """Send a frame over the stream to a peer, and open the stream if necessary. This never waits and never raises
        an error.

        The frame's remaining time is counted from now.
        """
        since_s = asyncio.get_running_loop().time()
        if link := self._links.get(to):
            link.send(frame, since_s)
            return
        self.open(to)
        dial = self._dials.get(to)
        if dial and len(dial.frames) < MAX_QUEUED:
            dial.frames.append((frame, since_s))

    def broadcast(self, frame: Frame, *, but: str = "") -> None:
        """Send a frame over all open streams except the stream to `but`."""
        for peer in [peer for peer in self._links if peer != but]:
            self.send(peer, frame)

    def open(self, peer: str) -> None:
        """Open a stream to a peer if there is none, and report the result to the driver."""
        if peer not in self._links and peer not in self._dials and not self._is_leaving:
            self._dials[peer] = Dial(self._tasks.start(self._dial(peer)))

    def drop(self, peer: str, fault: PeerError) -> None:
        """End the stream to a peer, if there is one."""
        if link := self._links.get(peer):
            self._drop(link, fault)

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
        for dial in self._dials.values():
            dial.task.cancel()
        await self._tasks.stop(grace_s=1.0)

    # calls by this peer

    async def _dial(self, peer: str) -> None:
        try:
            wire, stage = await self._called(peer)
        except (PeerError, DirectoryError) as error:
            log.debug("could not open a stream to ..%s: %s", short_id(peer), error)
            del self._dials[peer]
            self.neighbourhood.closed(peer)
            return
        self._make_place()
        self._add(self._link(peer, stage, wire, is_dialled=True))

    async def _called(self, peer: str) -> tuple[CallerWire, int]:
        """Call a peer. The task is cancelled if that peer calls this one in the meantime. Raises PeerError or
        DirectoryError.
        """
        try:
            async with asyncio.timeout(OPEN_S):
                return await self._call(peer)
        except TimeoutError:
            raise TimedOut(f"the stream could not be opened within {OPEN_S:g} s", peer=peer) from None
        except Refused as error:
            if error.code != RefuseCode.CROSSED.name:
                raise
        await asyncio.sleep(OPEN_S)
        raise Unreachable("it refused this call in favour of its own call, which never arrived", peer=peer)

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
            return wire, self._stage_in(answer)
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
                first = flow_wire.decode(await wire.read() or b"")
            stage = self._stage_in(first)
            assert isinstance(first, FlowHello)
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
        link = self._link(peer, stage, wire, first_words=self._own_hello())
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
        if now_s - idle.worked_s < self._stuck_s:
            sentence = f"I have already accepted {self._max_accepted} streams from neighbours, which is the maximum"
            raise Refused(sentence, peer=peer, code=RefuseCode.BUSY.name, retry_after_s=self._stuck_s)
        return idle

    # all streams

    def _own_hello(self) -> bytes:
        return flow_wire.encode(FlowHello(replace(self._hello(), layout=""), self._stage))

    def _stage_in(self, frame: object) -> int:
        """Return the stage in a FlowHello. Raises PeerError if the frame is not the FlowHello of a neighbour."""
        if not isinstance(frame, FlowHello):
            raise CorruptPayload("a pipeline stream must begin with a FlowHello")
        distance = abs(frame.stage - self._stage)
        if frame.stage >= self._num_stages or distance not in (1, self._num_stages - 1):
            sentence = f"your stage {frame.stage} is not adjacent to my stage {self._stage}"
            raise Refused(sentence, peer=frame.hello.peer_id, code=RefuseCode.OTHER_MODEL.name)
        return frame.stage

    def _link(
        self,
        peer: str,
        stage: int,
        wire: CallerWire | ServerWire,
        *,
        first_words: bytes = b"",
        is_dialled: bool = False,
    ) -> FlowLink:
        return FlowLink(
            peer,
            stage,
            wire,
            sizes=self._sizes,
            checked=self.neighbourhood.checked,
            received=self.neighbourhood.received,
            first_words=first_words,
            is_dialled=is_dialled,
            stuck_s=self._stuck_s,
        )

    def _make_place(self) -> None:
        dialled = [link for link in self._links.values() if link.is_dialled]
        if len(dialled) >= MAX_DIALLED:
            unused = min(dialled, key=lambda link: link.used_s)
            self._drop(unused, Unreachable("it was replaced by another stream", peer=unused.peer))

    def _add(self, link: FlowLink) -> None:
        if before := self._links.get(link.peer):
            link.worked_s = before.worked_s  # otherwise, a peer that calls repeatedly would never be idle
            self._drop(before, Unreachable("it was replaced by a new stream to the same peer", peer=link.peer))
        dial = self._dials.pop(link.peer, None)
        self._links[link.peer] = link
        self._tasks.start(self._carry(link))
        if dial:
            for frame, since_s in dial.frames:
                link.send(frame, since_s)
            if not link.is_dialled:
                dial.task.cancel()
        self.neighbourhood.opened(link.peer)

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
            self.neighbourhood.closed(link.peer)
