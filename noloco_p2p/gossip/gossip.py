"""Swap slices with random live peers, one swap after another, on the network thread.

While one swap uses the link, the next one finds its partner, and gets its snapshot towards the end, so that the link is
never idle. Only one swap of a peer moves at a time, in both directions: if a peer sent to one partner while another one
sent to it, some peers would receive twice and others not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from statistics import median_low

from noloco_p2p.errors import CorruptPayload, PeerError, Refused, TimedOut, Unreachable
from noloco_p2p.gossip.coder import Coder, Coding
from noloco_p2p.gossip.exchange import Committed, Exchange
from noloco_p2p.gossip.frames import FINAL, Accept, Frame, Offer, Refuse, RefuseCode, Standing, other_kind
from noloco_p2p.gossip.pairing import Pairing
from noloco_p2p.gossip.seams import Candidate, FrameStream, Outside
from noloco_p2p.gossip.swap import Counts, Diverged, Ended, Shared, Swap, send_within
from noloco_p2p.gossip.units import Slice
from noloco_p2p.owned_tasks import OwnedTasks
from noloco_p2p.peer_name import named
from noloco_p2p.rates import Rates
from noloco_p2p.telemetry.console import counted

log = logging.getLogger(__name__)

LEAST_UNITS = 8  # of a vector that has two swaps at a time; with fewer, they would need the same units
HOLD_S = 2.0  # for which an offer waits for the answer to an offer of this peer; shorter than an offer's deadline
BUSY_RETRY_S = 0.02, 0.1  # at least and at most; in between, a quarter of the time of a swap
STALE_RETRY_S = 30.0  # long enough for a peer with a small model to catch up
SHARE_RETRY_S = 1.0
IDLE_S = 2.0  # after which a free peer swaps with anybody
PAUSED_S = 0.5  # how often a paused peer looks whether it may continue
# Inner steps in which a slice should travel. Shorter ones ended no lower (benchmarks/results/slices.txt).
SLICE_STEPS = 0.8
ROUND_TRIPS = 10  # in which it travels at least
# Partners whose current swaps end further apart than this share of a slice's time would leave a link idle
# (benchmarks/link_use.py).
MOST_APART = 0.25
# Times the distance behind the swarm at which a peer fetches a newer state. Swaps draw a faster peer back, so it must
# not be cut off before the others may catch up.
STALE_FURTHEST = 2
MOST_FURTHEST = 4  # at which no honest peer would have accepted; both train on while an offer travels
# Times the usual duration of a swap: a longer one costs its partner as many credits. Half of it would also charge
# honest partners with slower links.
HELD_UP = 8
LEAST_HELD_S = 5.0  # on a busy machine, a swap of a tiny model sometimes takes seconds instead of a tenth of one
LONGEST_S, LONGEST_STEPS = 600.0, 10  # time plus inner steps after which a swap ends; it should take about a step
PARTNERS = 8  # whose last swaps say what is usual
SWAP_ID_BYTES = 16
REMEMBERED_ANSWERS = 256
COST_SHARE = 0.02  # of the time that adding, and on a CPU coding, may take with `min_inner_steps = "auto"`
SMOOTHING = 0.25
MINUTE_S = 60.0
LOOKS_AT_ONCE = 4  # simultaneous lookups of unknown callers
LOOKS_PER_S = 0.5
EVERYBODY = ""  # the only key, because all callers share one limit
LOOK_S = 2.0  # the time limit for one lookup; shorter than the deadline of any offer
KINDS = ((CorruptPayload, "corrupt"), (TimedOut, "slow"), (Ended, "abandoned"), (PeerError, "unreachable"))


@dataclass(slots=True)
class Link:
    """What this peer's swaps have measured: running means, or 0 before the first one."""

    elements_per_s: float = 0.0
    round_trip_s: float = 0.0  # the shortest of the last ones
    cost_s: float = 0.0  # CPU time for coding a slice
    swaps_s: OrderedDict[str, float] = field(default_factory=OrderedDict)  # the last one with each partner, in total
    moved_s: float = 0.0  # of all swaps
    swaps: deque[tuple[float, float]] = field(default_factory=deque)  # when each of the last ones moved, from and to
    answers_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_ANSWERS))

    def answered(self, seconds: float) -> None:
        """Record the time from an offer to its answer. Most answers wait behind the data of a swap."""
        self.answers_s.append(seconds)
        self.round_trip_s = min(self.answers_s)

    def usual_s(self, partner: str) -> float:
        """Return how long swaps with other partners usually take, from the agreement to the commit, or 0."""
        return median_low([seconds for peer, seconds in tuple(self.swaps_s.items()) if peer != partner] or [0.0])

    def committed(self, num_elements: int, swap: Swap, began_s: float, now_s: float) -> None:
        share = SMOOTHING if self.elements_per_s else 1.0
        self.elements_per_s += share * (num_elements / max(swap.sent_s, 1e-6) - self.elements_per_s)
        self.cost_s += share * (swap.cost_s - self.cost_s)
        self.swaps_s.pop(swap.partner, None)
        self.swaps_s[swap.partner] = now_s - began_s
        if len(self.swaps_s) > PARTNERS:
            self.swaps_s.popitem(last=False)
        self.moved_s += now_s - swap.moving_s
        self.swaps.append((swap.moving_s, now_s))
        while self.swaps[0][1] < now_s - MINUTE_S:
            self.swaps.popleft()

    def last_minute(self, now_s: float) -> tuple[int, float]:
        """Return how many swaps have been committed in the last minute, and the share of this time that they moved.

        The call is thread-safe.
        """
        recent = [(start, stop) for start, stop in tuple(self.swaps) if stop >= now_s - MINUTE_S]
        moved_s = sum(stop - max(start, now_s - MINUTE_S) for start, stop in recent)
        return len(recent), min(1.0, moved_s / MINUTE_S)


class Gossip:
    """The swaps of one peer.

    A peer swaps only in the state "training".
    """

    def __init__(self, exchange: Exchange, coder: Coder, outside: Outside, counts: Counts) -> None:
        self.state = "training"
        self.counts = counts
        self.link = Link()
        self._shared = Shared(exchange, coder, outside, counts)
        self._exchange = exchange
        self._units = exchange.units
        self._outside = outside
        self._outer = outside.spec.outer
        self._directory = directory = outside.directory
        self._deadlines = outside.deadlines
        self._loop = asyncio.get_running_loop()
        self._looks = Rates(per_s=LOOKS_PER_S, at_once=LOOKS_AT_ONCE, clock=self._loop.time)
        self._pairing = Pairing(outside.rng)
        self._ages = exchange.ages
        exchange.num_live = directory.num_live
        exchange.has_partners = lambda: self._pairing.may_come(directory.live())
        exchange.on_open = self._opened
        self._ask_task: asyncio.Task[Swap | None] | None = None
        self._running: list[Swap] = []
        self._tasks = OwnedTasks("a swap")
        self._changed = self._shared.changed
        self._asking = ""  # the peer that has an offer of this one
        self._agreed_step = -(1 << 60)  # the inner step at which the last swap was agreed
        self._free_since_s = self._loop.time()

    async def run(self) -> None:
        """Ask one peer after another, and swap with those that accept, until this task is cancelled."""
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(self._may_agree)
                if (missing := self._missing_steps()) > 0:
                    await asyncio.sleep(max(self._busy_retry_s(), missing * self._exchange.step_s))
                    continue
                self._ask_task = asyncio.create_task(self._ask_somebody())
                try:
                    await asyncio.wait({self._ask_task})
                finally:
                    self._ask_task.cancel()
                await self._shared.tell_change()
                if not self._begins_swap():
                    await self._wait_for_somebody()
        finally:
            await self._tasks.stop(grace_s=0.0)

    async def finish(self, *, timeout_s: float) -> None:
        """Begin no further swap, and wait until those that have begun have ended, for at most `timeout_s` seconds."""
        self.state = "paused" if self.state == "training" else self.state
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: not self._running)

    def _may_agree(self) -> bool:
        """Return whether this peer may agree on another swap: if there is none, or the only one is moving in time.

        A swap that waits for the link therefore waits only for swaps that are moving, and no circle of peers can wait.
        With `outer.wait`, a peer swaps everything at once while training waits.
        """
        if self._outer.wait:
            return self._exchange.is_open and not self._running
        if not self._running:
            return True
        swap = self._running[0]
        is_in_time = swap.is_moving and not self._held_up(swap)
        return len(self._running) == 1 and is_in_time and self._units.num_units >= LEAST_UNITS

    def _held_up(self, swap: Swap) -> float:
        """Return for how many usual swaps a swap has held this peer up, or 0 if it has not."""
        held_s, usual_s = self._loop.time() - swap.first_s, self.link.usual_s(swap.partner)
        return held_s / usual_s if held_s > max(LEAST_HELD_S, HELD_UP * usual_s) and usual_s else 0.0

    def _opened(self) -> None:
        self._free_since_s = self._loop.time()
        self._tasks.start(self._shared.tell_change())

    def _is_idle(self) -> bool:
        """Return whether this peer has found no partner for a while, so that nobody loses a swap to the next one.

        Shares only grow with swaps. Without this rule, the last two peers of a run could refuse each other for ever.
        """
        return not self._running and self._loop.time() - self._free_since_s > IDLE_S

    def _missing_steps(self) -> int:
        """Return how many inner steps are missing until this peer may agree on another swap."""
        exchange, least = self._exchange, self._outer.min_inner_steps
        if exchange.is_at_rest:
            return 0
        if least == "auto":
            cost_s = exchange.added_s + (0.0 if exchange.codes_beside else self.link.cost_s)
            least = (
                math.ceil(cost_s / (COST_SHARE * exchange.step_s)) if exchange.step_s and not self._outer.wait else 0
            )
        return self._agreed_step + least - exchange.step

    # offers of this peer

    async def _ask_somebody(self) -> Swap | None:
        if self.state != "training" or self._exchange.only_answers:
            return None
        candidate = self._pairing.next(self._directory.live(), self._loop.time())
        if not candidate:
            return None
        reserved = self._ages.reserve(self._exchange.step, at_most=self._at_most(), all_free=self._outer.wait)
        if not reserved:
            return None
        told, window = reserved
        self._asking, swap = candidate.peer_id, None
        try:
            swap = await self._ask(candidate, told)
            return swap
        except PeerError as error:
            self._pairing.failed(candidate.peer_id, self._loop.time())
            self._note(candidate.peer_id, "cannot be asked", error)
            return None
        finally:  # without a wait, at which this task may be cancelled
            self._asking = ""
            self._ages.end(window, mixed_at=None)
            if swap:
                self._ages.begin(swap.part)

    def _begins_swap(self) -> bool:
        """Begin the swap on which the peer that was asked has agreed, if it has."""
        asked, self._ask_task = self._ask_task, None  # which would keep the slices of the swap in memory
        if not asked or asked.cancelled() or not (swap := asked.result()):
            return False
        self._tasks.start(self._swap_of_ours(swap))
        return True

    async def _wait_for_somebody(self) -> None:
        """Wait until a peer may be asked, and let the offers of others have the slot meanwhile."""
        if self.state == "training":
            wait_s = self._pairing.wait_s(self._directory.live(), self._loop.time())
            await asyncio.sleep(max(wait_s, self._busy_retry_s()))  # all units may be busy
        else:
            await asyncio.sleep(PAUSED_S)

    async def _ask(self, candidate: Candidate, told: bytes) -> Swap | None:
        stream = await self._outside.transport.open_swap(candidate, timeout_s=self._deadlines.dial_s)
        swap = None
        try:
            swap_id, began_s = self._outside.rng.randbytes(SWAP_ID_BYTES), self._loop.time()
            offer = Offer(self._outside.hello(), swap_id, self._standing(), told, self._at_most())
            await send_within(self._deadlines.offer_s, stream, offer, peer=candidate.peer_id)
            answer = await stream.receive(self._deadlines.offer_s)
            self.link.answered(self._loop.time() - began_s)
            swap = self._answered(candidate, stream, swap_id, told, answer)
            return swap
        finally:
            if not swap:
                await stream.close()

    def _answered(
        self, candidate: Candidate, stream: FrameStream, swap_id: bytes, told: bytes, answer: Frame
    ) -> Swap | None:
        partner = candidate.peer_id
        match answer:
            case Accept(hello, standing, part):
                if hello.peer_id != partner or other_kind(self._outside.hello(), hello):
                    raise CorruptPayload("its answer names another peer or run", peer=partner)
                apart = abs(standing.progress - self._exchange.progress)
                if not _is_possible(standing) or apart > MOST_FURTHEST * self._outside.spec.furthest:
                    raise CorruptPayload("its position in the run is impossible", peer=partner)
                if (
                    not 0 <= part.first < part.first + part.count <= len(told)
                    or 0 in told[part.first : part.first + part.count]
                ):
                    raise CorruptPayload("it chose units that were not offered", peer=partner)
                return self._agree(stream, swap_id, partner, standing, part, told_step=self._exchange.step)
            case Refuse():
                self.counts.refused_as_stale |= answer.code is RefuseCode.STALE
                now_s = self._loop.time()
                self._pairing.refused(partner, answer.code, retry_after_s=answer.retry_after_s, now_s=now_s)
                if answer.code in FINAL:
                    refused = Refused(answer.sentence, peer=partner, code=answer.code.name)
                    self._note(partner, "will never swap", refused)
                return None
            case _:
                raise CorruptPayload(f"it answered an offer with {type(answer).__name__}", peer=partner)

    def _standing(self) -> Standing:
        return Standing(self._exchange.progress, self._exchange.step_s, self._free_in_s())

    def _free_in_s(self) -> float:
        swap = self._running[0] if self._running else None
        if swap is None or not swap.is_moving:
            return 0.0
        start, stop = self._units.bounds(swap.part)
        return max(0.0, swap.moving_s + (stop - start) / max(1.0, self.link.elements_per_s) - self._loop.time())

    def _busy_retry_s(self) -> float:
        least_s, most_s = BUSY_RETRY_S
        return max(least_s, min(most_s, self._slice_s() / 4))

    def _at_most(self) -> int:
        """Return how many units this peer's link should carry in one swap."""
        if self._outer.wait:
            return self._units.num_units
        return self._units.count_of(self.link.elements_per_s * self._slice_s())

    def _slice_s(self) -> float:
        return max(SLICE_STEPS * self._exchange.step_s, ROUND_TRIPS * self.link.round_trip_s)

    def _agree(
        self, stream: FrameStream, swap_id: bytes, partner: str, theirs: Standing, part: Slice, *, told_step: int
    ) -> Swap:
        self._pairing.began(partner, self._directory.live(), num_live=self._directory.num_live())
        self._agreed_step = self._exchange.step
        return Swap(self._shared, stream, swap_id, partner=partner, theirs=theirs, part=part, told_step=told_step)

    # offers of other peers

    def is_verified(self, swap_id: bytes) -> bool:
        """Return whether this peer has verified a swap and not abandoned it. The partner asks this."""
        return self._shared.verified.get(swap_id, False)

    async def on_swap(self, stream: FrameStream) -> None:
        """Answer one offer and, if it is accepted, run the swap to its end."""
        try:
            offer = await stream.receive(self._deadlines.offer_s)
            refusal = await self._refusal(offer)
            if not refusal:
                assert isinstance(offer, Offer)
                refusal = await self._accept(stream, offer)
            if refusal:
                self.counts.refused[refusal.code.name] += 1
                await send_within(self._deadlines.offer_s, stream, refusal, peer=stream.peer)
        except PeerError as error:
            log.debug("an offer from %s failed: %s", stream.peer, error)
        finally:
            await stream.close()

    async def _accept(self, stream: FrameStream, offer: Offer) -> Refuse | None:
        """Run a swap if there is a slot and a slice for it. Otherwise, return a refusal."""
        caller, told_step, has_given_way = offer.hello.peer_id, self._exchange.step, False
        if self._ask_task and not self._ask_task.done():
            # Of two offers, that of the higher peer id counts, so that no circle of peers can wait.
            if caller > self._outside.hello().peer_id:
                if refusal := self._occupied(offer):
                    return refusal
                has_given_way = self._ask_task.cancel()
            elif caller == self._asking:
                return Refuse(RefuseCode.CROSSED, "we have made offers to each other, and mine counts")
            await asyncio.wait({self._ask_task}, timeout=HOLD_S)
        if self._asking:
            return Refuse(RefuseCode.BUSY, "I have a partner", self._busy_retry_s())
        if refusal := self._occupied(offer):
            return refusal
        part = self._ages.choose(offer.ages, self._exchange.step, at_most=min(offer.at_most, self._at_most()))
        if not part:
            if has_given_way:  # nobody can end the offers of this peer for nothing
                self._pairing.shares.swapped(caller)
            return Refuse(RefuseCode.BUSY, "other swaps carry all slices that we could swap", self._busy_retry_s())
        self._ages.begin(part)
        swap = self._agree(stream, offer.swap_id, caller, offer.standing, part, told_step=told_step)
        await self._swap(swap, first=Accept(self._outside.hello(), self._standing(), part))
        return None

    def _occupied(self, offer: Offer) -> Refuse | None:
        """Return the reason to refuse an offer if there is no slot for it, even without an offer of this peer."""
        if self.state != "training" or not self._may_agree():
            return Refuse(RefuseCode.BUSY, "I have a partner", self._busy_retry_s())
        if (missing := self._missing_steps()) > 0:
            retry_s = max(self._busy_retry_s(), missing * self._exchange.step_s)
            return Refuse(RefuseCode.BUSY, "my swaps would take too much time", retry_s)
        if abs(offer.standing.free_in_s - self._free_in_s()) > MOST_APART * self._slice_s():
            return Refuse(RefuseCode.BUSY, "we would wait too long for each other", 0.0)
        return None

    async def _refusal(self, offer: Frame) -> Refuse | None:
        """Return the reason to refuse an offer, whether or not there is a slot."""
        if not isinstance(offer, Offer) or not self._is_sound(offer):
            return Refuse(RefuseCode.MALFORMED, "a swap must begin with a valid offer")
        caller, apart = offer.hello.peer_id, offer.standing.progress - self._exchange.progress
        if refuse := other_kind(self._outside.hello(), offer.hello):
            return refuse
        if self.state != "training":
            return Refuse(RefuseCode.NOT_TRAINING, f"this peer is {self.state}", PAUSED_S)
        if not await self._is_listed(caller):
            return Refuse(RefuseCode.UNLISTED, "I have not read your record yet", self._busy_retry_s())
        if abs(apart) > STALE_FURTHEST * self._outside.spec.furthest:
            who = "you are" if apart < 0 else "I am"
            return Refuse(RefuseCode.STALE, f"{who} {100 * abs(apart):.1f} % of the run behind", STALE_RETRY_S)
        has_had = self._pairing.shares.has_had(caller)
        if has_had and (not self._is_idle() or self._pairing.avoids(caller, self._directory.live())):
            return Refuse(RefuseCode.OVER_SHARE, "you have had your share of my swaps", SHARE_RETRY_S)
        return None

    async def _is_listed(self, caller: str) -> bool:
        """Return within LOOK_S whether a caller has a live record, in this peer's copy of the directory or by a lookup.

        All callers together cause at most 30 lookups per minute. Beyond that, a newcomer is recognized only after the
        next regular read of the directory.
        """
        if self._directory.knows(caller):
            return True
        if not self._looks.take(EVERYBODY):
            return False
        try:
            async with asyncio.timeout(LOOK_S):
                return await self._directory.find(caller, timeout_s=LOOK_S) is not None
        except TimeoutError:
            return False

    def _is_sound(self, offer: Offer) -> bool:
        return (
            len(offer.swap_id) == SWAP_ID_BYTES
            and bool(offer.hello.peer_id)
            and len(offer.ages) == self._units.num_units
            and offer.at_most > 0
            and _is_possible(offer.standing)
        )

    # swaps

    async def _swap_of_ours(self, swap: Swap) -> None:
        try:
            if self.state == "training":
                await self._swap(swap)
            else:  # this peer has been paused since it made the offer
                self._ages.end(swap.part, mixed_at=None)
        finally:
            await swap.stream.close()

    async def _swap(self, swap: Swap, *, first: Accept | None = None) -> None:
        """Run one swap, after sending `first`. A failure of the partner ends here."""
        began_s, is_committed = self._loop.time(), False
        if not self._running:
            swap.first_s = began_s
        self._running.append(swap)
        try:
            if first:
                await send_within(self._deadlines.offer_s, swap.stream, first, peer=swap.partner)
            coding = await self._within_limit(swap)
            is_committed = True
            self.counts.swaps += 1
            halves = await swap.elsewhere(self._exchange.judge, coding, swap.partner)
            now_s = self._loop.time()
            self.link.committed(len(coding.values), swap, began_s, now_s)
            self._exchange.committed(
                Committed(
                    swap.swap_id,
                    swap.partner,
                    swap.progress,
                    swap.told_step,
                    swap.part,
                    coding.start,
                    halves,
                    snapshot_step=swap.snapshot_step,
                    seconds=now_s - began_s,
                    num_live=self._directory.num_live(),
                )
            )
        except PeerError as error:
            self._failed(swap, error)
            # The traceback and the swap refer to each other, which would keep slices in memory.
            error.__traceback__ = error.__context__ = None
        finally:
            if not is_committed:
                self._ages.end(swap.part, mixed_at=None)
            self._free_since_s = self._loop.time()
            if num_swaps := self._held_up(swap):
                self._pairing.shares.held_up(swap.partner, num_swaps)
            self._running.remove(swap)
            if self._running:
                self._running[0].first_s = min(self._running[0].first_s, self._free_since_s)
            await self._shared.tell_change()

    async def _within_limit(self, swap: Swap) -> Coding:
        """Run a swap. A partner that sends one chunk after another just in time cannot keep it open for hours."""
        limit_s = None if self._outer.wait else LONGEST_S + LONGEST_STEPS * self._exchange.step_s
        try:
            async with asyncio.timeout(limit_s):
                return await swap.run()
        except TimeoutError:
            self.link.elements_per_s /= 2  # perhaps its link has become slow, and slices are too long for it
            raise TimedOut("the swap took far longer than an inner step", peer=swap.partner) from None

    def _failed(self, swap: Swap, error: PeerError) -> None:
        partner, now_s = swap.partner, self._loop.time()
        if not swap.is_moving and isinstance(error, Unreachable):
            # The partner has agreed with somebody else while its answer or this peer's answer was on its way.
            self._pairing.refused(partner, RefuseCode.BUSY, retry_after_s=self._busy_retry_s(), now_s=now_s)
            return
        if isinstance(error, Diverged):
            self._exchange.has_diverged = True
            return
        self.counts.failures[next(kind for type_, kind in KINDS if isinstance(error, type_))] += 1
        self._pairing.failed(partner, now_s)
        self._note(partner, "a swap failed", error)
        if isinstance(error, CorruptPayload):
            self._outside.on_corrupt(partner, str(error))

    def _note(self, peer: str, what: str, error: PeerError) -> None:
        live = self._directory.live()
        who = next((named(peer, each.name) for each in live if each.peer_id == peer), named(peer))
        num_failing = self._pairing.num_failing(live)
        share = f"swaps with {num_failing} of {counted(len(live), 'live peer')} fail: " if num_failing else ""
        self.counts.last_failure = f"{who}: {what}: {error}; {share}{error.advice[num_failing >= len(live)]}"
        self.counts.failed_at_s = self._loop.time()
        log.info("%s: %s: %s", who, what, error)


def _is_possible(standing: Standing) -> bool:
    return 0 <= standing.progress < math.inf and math.isfinite(standing.step_s) and math.isfinite(standing.free_in_s)
