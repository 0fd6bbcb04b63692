"""Answers the offers of other peers, and carries the swap out when one is accepted."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, replace

from noloco_p2p.errors import PeerError, Refused, TimedOut, Unreachable
from noloco_p2p.gossip.deadlines import Deadlines
from noloco_p2p.gossip.frames import PROTOCOL_VERSION, Accept, Frame, Hello, Offer, Refuse, RefuseCode
from noloco_p2p.gossip.live_round import LiveRound
from noloco_p2p.gossip.round import Phase, Round
from noloco_p2p.gossip.running import Running
from noloco_p2p.gossip.seams import FrameStream
from noloco_p2p.gossip.staleness import refuse_stale, too_long
from noloco_p2p.gossip.swapping import Swapping

log = logging.getLogger(__name__)

HOLD_S = 2.0  # that an offer waits for the answer to an own one; shorter than any offer's deadline
NOT_TRAINING_RETRY_S = 60.0


Decision = Refuse | tuple[Round, Running]  # no, or a swap that is bound


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    stream: FrameStream
    offer: Offer
    decision: asyncio.Future[Decision]


class Answering:
    """`state` is what the swarm is told of this peer; offers are accepted in training only."""

    def __init__(self, live: LiveRound, swapping: Swapping, *, deadlines: Deadlines) -> None:
        self.state = "training"
        self._live = live
        self._swapping = swapping
        self._deadlines = deadlines
        self._held: deque[_Held] = deque()  # offers that wait for the answer to an own one
        live.on_change = self._release

    async def on_swap(self, stream: FrameStream) -> None:
        """Answer one offer; returns when its swap has ended."""
        live = self._live
        try:
            offer = await stream.receive(self._deadlines.offer_s)
            if not isinstance(offer, Offer) or len(offer.swap_id) != 16 or not offer.hello.peer_id:
                await self._send(stream, Refuse(RefuseCode.MALFORMED, "a swap begins with an offer"))
                return
            decision = await self._decide_in_time(stream, offer)
            if isinstance(decision, Refuse):
                await self._send(stream, decision)
                return
            round_, running = decision
            try:
                await self._send(stream, Accept(live.hello(), running.mine))
            except PeerError as error:
                self._swapping.ended(round_, running, error)
                return
            await self._swapping.run(round_, running)
        except PeerError as error:
            log.debug("an offer from %s came to nothing: %s", stream.peer, error)
        finally:
            await stream.close()

    async def _decide_in_time(self, stream: FrameStream, offer: Offer) -> Decision:
        """Answer now, or hold the offer while an own one is out: when that comes to nothing, this one is accepted."""
        if not self._live.round.holds(offer):
            return self._decide(stream, offer)
        held = _Held(stream, offer, asyncio.get_running_loop().create_future())
        self._held.append(held)
        try:
            await asyncio.wait({held.decision}, timeout=HOLD_S)
        except asyncio.CancelledError:
            if held.decision.done() and not isinstance(decision := held.decision.result(), Refuse):
                self._swapping.ended(*decision, Unreachable("it was broken off here", peer=offer.hello.peer_id))
            raise
        finally:
            if held in self._held:
                self._held.remove(held)
        return held.decision.result() if held.decision.done() else self._decide(stream, offer)

    def _release(self) -> None:
        """Something changed: answer the offers that were held, in their order, unless an own one is still out."""
        while self._held and self._live.round.phase is not Phase.OFFERING:
            held = self._held.popleft()
            held.decision.set_result(self._decide(held.stream, held.offer))

    def _decide(self, stream: FrameStream, offer: Offer) -> Decision:
        refuse = self._answer(offer)
        if refuse:
            return refuse
        mine = self._live.boundary()
        return self._swapping.bind(stream, offer.swap_id, offer.hello.peer_id, mine, offer.boundary)

    def _answer(self, offer: Offer) -> Refuse | None:
        live = self._live
        try:
            check_hello(live.hello(), offer.hello)
        except Refused as error:
            return Refuse(RefuseCode[error.code], str(error))
        if offer.hello.peer_id == live.hello().peer_id:
            return Refuse(RefuseCode.MALFORMED, "this is my own peer id: a key must not be used on two machines")
        live.pace.hear(offer.hello.peer_id, offer.boundary, now_s=live.clock())  # also of those that are refused
        if self.state != "training":
            return Refuse(RefuseCode.NOT_TRAINING, f"I am {self.state}", NOT_TRAINING_RETRY_S)
        if live.round.wants_partner and live.trails():
            return Refuse(RefuseCode.BUSY, "the late part of my last round is on its way", live.trails_for_s())
        mine = live.boundary()
        refuse = live.round.answer(offer, mine=mine)
        if refuse and refuse.code is RefuseCode.TAKEN:
            live.pairing.turned_away(offer.hello.peer_id, mine=mine, theirs=offer.boundary)
        if refuse and refuse.code is RefuseCode.TAKEN and live.running:
            # At its boundary a peer may have to wait for its partner: its next round begins when that is over.
            left_s = live.running.expected_s(live.clock(), live.goodput) - live.clock()
            refuse = replace(refuse, retry_after_s=max(refuse.retry_after_s, left_s))
        if refuse is None and live.opening is not None:
            if wrong := too_long(offer.boundary, live.opening.longest_round):
                return Refuse(RefuseCode.MALFORMED, wrong)
            refuse = refuse_stale(mine, offer.boundary, total_steps=live.opening.total_steps)
        return refuse

    async def _send(self, stream: FrameStream, frame: Frame) -> None:
        await send_small(stream, frame, timeout_s=self._deadlines.offer_s)


async def send_small(stream: FrameStream, frame: Frame, *, timeout_s: float) -> None:
    """An offer or its answer: one small frame, which only a frozen peer does not take. Raises TimedOut, Unreachable."""
    try:
        await asyncio.wait_for(stream.send(frame), timeout_s)
    except TimeoutError:
        raise TimedOut(f"it took no message for {timeout_s:g} s", peer=stream.peer) from None


def check_hello(ours: Hello, theirs: Hello) -> None:
    """Raises Refused when the other peer is of another protocol version, run, spec or model."""
    for code, mine, other, what in (
        (
            RefuseCode.OTHER_VERSION,
            ours.protocol_version.split(".")[0],
            theirs.protocol_version.split(".")[0],
            f"protocol version {PROTOCOL_VERSION} here, {theirs.protocol_version or 'none'} there",
        ),
        (
            RefuseCode.OTHER_RUN,
            ours.run_name,
            theirs.run_name,
            f"run {ours.run_name} here, {theirs.run_name!r} there",
        ),
        (
            RefuseCode.OTHER_SPEC,
            ours.spec_digest,
            theirs.spec_digest,
            f"spec digest {ours.spec_digest[:16]}.. here, {theirs.spec_digest[:16] or 'none'}.. there",
        ),
        (
            RefuseCode.OTHER_MODEL,
            ours.layout if theirs.layout else "",
            theirs.layout if ours.layout else "",
            f"model layout {ours.layout[:16]}.. here, {theirs.layout[:16]}.. there",
        ),
    ):
        if mine != other:
            raise Refused(what, peer=theirs.peer_id, code=code.name)
