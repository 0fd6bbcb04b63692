"""Seeks the partner of a round: draws a live peer, makes it an offer, and again until one accepts."""

from __future__ import annotations

import logging
import random

from noloco_p2p.errors import CorruptPayload, PeerError, Refused
from noloco_p2p.gossip.answering import check_hello, send_small
from noloco_p2p.gossip.deadlines import Deadlines
from noloco_p2p.gossip.fetch import find_difference
from noloco_p2p.gossip.frames import Accept, Offer, Part, Refuse, RefuseCode
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.live_round import POLL_S, LiveRound, OwnedTasks
from noloco_p2p.gossip.outcome import LonelyCause
from noloco_p2p.gossip.round import Phase, Round
from noloco_p2p.gossip.seams import Candidate, Transport
from noloco_p2p.gossip.sections import part_bytes
from noloco_p2p.gossip.staleness import too_long
from noloco_p2p.gossip.swapping import Swapping
from noloco_p2p.telemetry.console import named

OTHERS = (RefuseCode.OTHER_VERSION, RefuseCode.OTHER_SPEC, RefuseCode.OTHER_RUN, RefuseCode.OTHER_MODEL)


class Seeking:
    """`rng` draws the ids of swaps: they must not be guessed."""

    def __init__(
        self,
        live: LiveRound,
        swapping: Swapping,
        tasks: OwnedTasks,
        *,
        transport: Transport,
        rng: random.Random,
        deadlines: Deadlines,
    ) -> None:
        self._live = live
        self._swapping = swapping
        self._tasks = tasks
        self._transport = transport
        self._rng = rng
        self._deadlines = deadlines

    async def run(self, round_: Round) -> None:
        """Until the round is closed, as a swap may break and another partner be needed."""
        live = self._live
        while round_.phase is not Phase.CLOSED:
            if not round_.wants_partner or live.trails():
                await live.wait_for_change(POLL_S)
                continue
            now_s = live.clock()
            candidate = live.pairing.choose(live.directory.live(), now_s, latest_s=self._latest_offer_s(now_s))
            if candidate is None:
                # To ask at the next poll, instead of when the drawn peer may be asked, would let peers that refuse each
                # other, as each has an offer out, ask again at one moment, and refuse each other again.
                await live.wait_for_change(min(POLL_S, live.pairing.wait_s(now_s)))
                continue
            await self._try(round_, candidate)

    async def _try(self, round_: Round, candidate: Candidate) -> None:
        live, peer_id = self._live, candidate.peer_id
        round_.offer_to(peer_id)
        try:
            await self._offer(round_, candidate)
        except Refused as error:
            self._refused(candidate, error)
        except PeerError as error:
            told = peer_id in self._swapping.unreachable  # it stays in the directory until its record expires
            level = logging.DEBUG if told else logging.WARNING
            live.faults.tell(f"offer to {named(peer_id)} failed: {error}", error, level=level)
            self._swapping.unreachable &= {peer.peer_id for peer in live.directory.live()}
            self._swapping.unreachable.add(peer_id)
            live.pairing.failed(peer_id, now_s=live.clock())
        finally:
            if round_.is_offering_to(peer_id):
                round_.offer_failed()
            live.notify()

    async def _offer(self, round_: Round, candidate: Candidate) -> None:
        """Raises Refused or another PeerError; on success the swap runs in a task of its own."""
        stream = await self._transport.open_swap(candidate, timeout_s=self._deadlines.dial_s)
        bound = False
        try:
            swap_id, mine = self._rng.randbytes(16), self._live.boundary()
            await send_small(stream, Offer(self._live.hello(), swap_id, mine), timeout_s=self._deadlines.offer_s)
            reply = await stream.receive(self._deadlines.offer_s)
            if isinstance(reply, Refuse):
                raise Refused(
                    reply.sentence, peer=candidate.peer_id, code=reply.code.name, retry_after_s=reply.retry_after_s
                )
            if not isinstance(reply, Accept) or reply.hello.peer_id != candidate.peer_id:
                raise CorruptPayload("the answer to an offer was neither yes nor no", peer=candidate.peer_id)
            check_hello(self._live.hello(), reply.hello)
            self._live.pace.hear(candidate.peer_id, reply.boundary, now_s=self._live.clock())
            if not round_.is_offering_to(candidate.peer_id):
                return  # overtaken while the answer was on its way
            assert self._live.opening is not None
            if wrong := too_long(reply.boundary, self._live.opening.longest_round):
                raise CorruptPayload(f"it accepted with {wrong}", peer=candidate.peer_id)
            _, running = self._swapping.bind(stream, swap_id, candidate.peer_id, mine, reply.boundary)
            bound = True
            self._tasks.start(self._swapping.run(round_, running))
        finally:
            if not bound:
                await stream.close()

    def _refused(self, candidate: Candidate, error: Refused) -> None:
        live, peer_id, code = self._live, candidate.peer_id, RefuseCode[error.code]
        live.pairing.refused(peer_id, code=code, retry_after_s=error.retry_after_s, now_s=live.clock())
        live.reason, live.cause = f"{named(peer_id)} refused: {error}", LonelyCause.REFUSED
        live.told_stale |= code is RefuseCode.STALE
        if code in OTHERS:
            live.faults.tell(f"{named(peer_id)} is not of this run: {error}", error)
        if code is RefuseCode.OTHER_MODEL and live.layout:
            self._tasks.start(self._tell_difference(candidate, live.layout, error))

    async def _tell_difference(self, candidate: Candidate, layout: ModelLayout, error: Refused) -> None:
        difference = await find_difference(self._transport, candidate, layout)
        if difference:
            text = f"{named(candidate.peer_id)} has another model than this peer: {difference}"
            self._live.faults.tell(text, error)

    def _latest_offer_s(self, now_s: float) -> float:
        """Until when an offer may wait, if the early part is to arrive within the round."""
        live = self._live
        early_s = live.goodput.seconds_for(part_bytes(live.plans, Part.EARLY)) or 0.0
        if live.patient_until_s > now_s:
            return live.patient_until_s - early_s
        left_s = None if live.boundary_s is not None else live.pace.seconds_to_boundary(now_s)
        return now_s if left_s is None else now_s + left_s - early_s
