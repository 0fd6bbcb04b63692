"""The round driver feeds events to `RoundState` on the network thread, and performs the resulting actions.

It handles everything that takes time, such as offers, streams, swaps and timers, but makes no decisions. All
methods run on the event loop. `exchange.py` connects them to the training thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

from noloco_p2p.codec.modulo import Bounds
from noloco_p2p.errors import PeerError, Refused, TimedOut, Unreachable
from noloco_p2p.gossip.active_swap import ActiveSwap
from noloco_p2p.gossip.deadlines import INTERNET, Deadlines
from noloco_p2p.gossip.frames import (
    Accept,
    Frame,
    Hello,
    Offer,
    Part,
    Payload,
    Refuse,
    RefuseCode,
    SectionName,
    SwapState,
    other_kind,
)
from noloco_p2p.gossip.introductions import Introductions
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.outcome import Correction, Outcome, Traffic
from noloco_p2p.gossip.pairing import Pairing
from noloco_p2p.gossip.payload_memory import PayloadMemory
from noloco_p2p.gossip.pipeline import Staged
from noloco_p2p.gossip.questions import find_difference
from noloco_p2p.gossip.rate_estimators import StepRate
from noloco_p2p.gossip.round_events import (
    Abandon,
    Action,
    Ask,
    Bind,
    CompareModels,
    Incoming,
    Opening,
    Reply,
    Report,
    RoundPhase,
    Strike,
    Wait,
)
from noloco_p2p.gossip.round_state import POLL_S, RoundState
from noloco_p2p.gossip.seams import Directory, FrameStream, Transport
from noloco_p2p.gossip.sections import SectionPlan
from noloco_p2p.gossip.swap import Ledger, Swap
from noloco_p2p.owned_tasks import OwnedTasks
from noloco_p2p.telemetry.console import named

log = logging.getLogger(__name__)

HOLD_S = 2.0  # the longest time for which an offer is held; shorter than the deadline of any offer
WATCH_S = 0.5  # how often the progress of an early part is checked
FAREWELL_S = 2.0  # time limit for sending Abort to all partners when this peer stops
SWAP_ID_BYTES = 16
REMEMBERED_SWAPS = 16


@dataclass(slots=True)
class LastFault:
    """The last fault of another peer: its description, advice on how to fix it, and the Unix time when it occurred."""

    text: str = ""
    advice: str = ""
    at_s: float = 0.0

    def report(self, text: str, error: PeerError, *, level: int = logging.WARNING) -> None:
        self.text, self.advice, self.at_s = text, error.advice, time.time()
        log.log(level, text)


class RoundDriver:
    """The driver of a peer's rounds.

    `rng` draws partners and the ids of swaps, both of which must be unpredictable. `clock` returns seconds and must be
    the clock that `step_rate` uses. If a partner sends data that no honest peer would send, `on_corrupt` is called with
    the partner's id and a description.
    """

    def __init__(
        self,
        *,
        hello: Callable[[], Hello],
        transport: Transport,
        directory: Directory,
        step_rate: StepRate,
        executor: Executor,
        rng: random.Random,
        deadlines: Deadlines = INTERNET,
        clock: Callable[[], float] = time.monotonic,
        on_corrupt: Callable[[str, str], None] = lambda peer_id, reason: None,
    ) -> None:
        self.round = RoundState(
            hello=hello,
            live=lambda: directory.live(),
            num_live=lambda: directory.num_live(),
            step_rate=step_rate,
            pairing=Pairing(rng),
        )
        self.step_rate = step_rate
        self._layout: ModelLayout | None = None
        self.fault = LastFault()
        self.traffic = Traffic()
        self.memory = PayloadMemory()
        self.on_corrupt = on_corrupt
        self._hello = hello
        self._transport = transport
        self._directory = directory
        self._introductions = Introductions(directory, clock=clock)
        self._executor = executor
        self._rng = rng
        self._deadlines = deadlines
        self._clock = clock
        self._tasks = OwnedTasks("a task of a round")
        self._matchmaking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._staged = Staged()  # this peer's outer gradient, for the swap of this round
        self._streams: dict[Ask | Incoming, tuple[FrameStream, bytes]] = {}  # undecided offers and their swap ids
        self._decisions: dict[Incoming, asyncio.Future[Refuse | ActiveSwap]] = {}
        self._bounds: dict[SectionName, Bounds] = {}
        self._ledgers: OrderedDict[bytes, Ledger] = OrderedDict()

    def now_s(self) -> float:
        """Return the current time of this driver's clock, in seconds. The call is thread-safe if the clock is."""
        return self._clock()

    @property
    def layout(self) -> ModelLayout | None:
        """The layout of this peer's model, once it is known. Setting it discards the bounds of the previous model."""
        return self._layout

    @layout.setter
    def layout(self, layout: ModelLayout | None) -> None:
        self._layout = layout
        self._bounds = {}

    @property
    def phase(self) -> RoundPhase:
        return self.round.phase

    @property
    def partner(self) -> str:
        """The partner in the current round, or "" while there is none."""
        return self.round.partner

    @property
    def peer_state(self) -> str:
        """The state that is announced to the swarm: "training", "paused", "leaving" or "done"."""
        return self.round.peer_state

    @peer_state.setter
    def peer_state(self, state: str) -> None:
        self.round.peer_state = state

    @property
    def corrections(self) -> deque[Correction]:
        return self.round.corrections

    @property
    def last_fault(self) -> str:
        return self.fault.text

    def take_refused_as_stale(self) -> bool:
        """Return whether any peer has refused this peer as stale since the last call. The call is thread-safe."""
        refused, self.round.was_refused_as_stale = self.round.was_refused_as_stale, False
        return refused

    def hurry(self) -> None:
        """Stop waiting at boundaries, because this peer was asked to leave.

        The call is safe in a signal handler and on any thread.
        """
        self.round.is_leaving = True

    def swap_now(self) -> tuple[Swap, float] | None:
        """Return the current swap (or the trailing swap if there is none) and its start time on the driver's clock."""
        active = self.round.active or self.round.trailing
        return (_swap_of(active), active.began_s) if active else None

    # the phases of a round

    def open(self, opening: Opening, plans: tuple[SectionPlan, ...]) -> None:
        """Begin a round and start matchmaking."""
        self._end_matchmaking()
        self._staged = Staged()
        self._do(self.round.open(opening, plans, self._clock()))
        self._matchmaking = self._tasks.start(self._seek(opening))
        self._changed.set()

    def reach_boundary(self) -> bool:
        """Record that this peer has reached its boundary. Return False if no partner can be found in this round.

        If the result is False, the outer gradient does not need to be encoded.
        """
        self._do(self.round.reach_boundary(self._clock()))
        self._changed.set()
        return self.phase is not RoundPhase.CLOSED

    def stage(self, payload: Payload) -> None:
        """Stage the next encoded chunk of this peer's outer gradient."""
        self._staged.put(payload)

    def cannot_stage(self, reason: str) -> None:
        """Report that this peer's outer gradient cannot be sent."""
        self._do(self.round.cannot_stage(reason, self._clock()))

    def poll(self, wait_s: float) -> Outcome | None:
        """At the boundary, end the round if it is complete or if nothing more can arrive within `wait_s` seconds.

        It returns None if waiting may help, because a partner may still be found or a part may still arrive.
        """
        now_s = self._clock()
        if wait_s > 0 and not self.round.is_over(now_s, until_s=now_s + wait_s):
            return None
        return self._end()

    async def wait_until_over(self, wait_s: float) -> None:
        """Wait until `poll` would end the round, for at most `wait_s` seconds."""
        until_s = self._clock() + wait_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self.round.is_over(self._clock(), until_s=until_s):
                    await self._wait_for_change(POLL_S)

    async def collect(self, wait_s: float) -> Outcome:
        """Wait until the round is over, for at most `wait_s` seconds, and end it."""
        await self.wait_until_over(wait_s)
        return self._end()

    def withdraw(self) -> Outcome:
        """End the round before its boundary."""
        self._end_matchmaking()
        outcome, actions = self.round.withdraw(self._clock())
        self._do(actions)
        self._changed.set()
        return outcome

    def take_correction(self, before: int) -> Correction | None:
        """Return the result of `RoundState.take_correction`. Call `corrected` after applying the correction."""
        return self.round.take_correction(before)

    def corrected(self) -> None:
        self.round.corrected()
        self._changed.set()

    def forget(self) -> None:
        """Drop the late parts of earlier rounds, because the vectors that they belong to have been replaced."""
        self._do(self.round.forget())

    async def stop(self) -> None:
        """Abandon all swaps and wait until all tasks have ended."""
        self._do(self.round.stop(self._clock()))
        self._end_matchmaking()
        await self._tasks.stop(grace_s=FAREWELL_S)

    def _end(self) -> Outcome:
        self._end_matchmaking()
        outcome, actions = self.round.end(self._clock())
        self._do(actions)
        self._changed.set()
        return outcome

    def _end_matchmaking(self) -> None:
        if self._matchmaking:
            self._matchmaking.cancel()

    # calls from other peers

    def admit(self, hello: Hello) -> None:
        """Raise Refused if the caller has a different protocol version, run, spec or model."""
        if refuse := other_kind(self._hello(), hello):
            raise Refused(refuse.sentence, peer=hello.peer_id, code=refuse.code.name)

    def swap_state(self, swap_id: bytes) -> SwapState:
        """Return the state of a swap, in reply to a request from the partner."""
        ledger = self._ledgers.get(swap_id)
        return ledger.state() if ledger else SwapState()

    async def on_swap(self, stream: FrameStream) -> None:
        """Answer one offer and, if it is accepted, run the swap to its end."""
        try:
            offer = await stream.receive(self._deadlines.offer_s)
            if not isinstance(offer, Offer) or len(offer.swap_id) != SWAP_ID_BYTES or not offer.hello.peer_id:
                await self._send(stream, Refuse(RefuseCode.MALFORMED, "a swap must begin with a valid offer"))
                return
            is_listed = await self._introductions.is_listed(offer.hello.peer_id)
            decision = await self._decide(stream, Incoming(offer, is_listed))
            if isinstance(decision, Refuse):
                self.traffic.note_refusal(decision.code)
                await self._send(stream, decision)
                return
            try:
                await self._send(stream, Accept(self._hello(), decision.mine))
            except PeerError as error:
                self._swap_ended(decision, error)
                return
            except BaseException:
                self._swap_ended(decision, Unreachable("this peer aborted the swap", peer=decision.partner))
                raise
            await self._run_swap(decision)
        except PeerError as error:
            log.debug("an offer from %s failed: %s", stream.peer, error)
        finally:
            await stream.close()

    async def _decide(self, stream: FrameStream, incoming: Incoming) -> Refuse | ActiveSwap:
        """Return the state machine's decision on an offer, after at most HOLD_S seconds."""
        decision: asyncio.Future[Refuse | ActiveSwap] = asyncio.get_running_loop().create_future()
        self._streams[incoming] = stream, incoming.offer.swap_id
        self._decisions[incoming] = decision
        try:
            self._do(self.round.offer_came(incoming, self._clock()))
            if not decision.done():
                await asyncio.wait({decision}, timeout=HOLD_S)
            if not decision.done():
                self._do(self.round.hold_expired(incoming, self._clock()))
            return decision.result()
        except asyncio.CancelledError:
            self.round.offer_gone(incoming)
            if decision.done() and isinstance(active := decision.result(), ActiveSwap):
                self._swap_ended(active, Unreachable("this peer aborted the swap", peer=active.partner))
            raise
        finally:
            del self._streams[incoming], self._decisions[incoming]

    # matchmaking

    async def _seek(self, opening: Opening) -> None:
        """Look for partners until the round ends, because another partner is needed whenever a swap fails.

        The loop also checks `opening`, because `wait_for` can swallow the cancellation of this task in Python versions
        before 3.12.
        """
        while self.round.opening is opening and (step := self.round.seek(self._clock())) is not None:
            if isinstance(step, Wait):
                await self._wait_for_change(step.at_most_s)
            else:
                await self._offer(step)

    async def _offer(self, ask: Ask) -> None:
        """Make one offer and report the answer. If the offer is accepted, the swap runs in its own task."""
        stream: FrameStream | None = None
        is_bound = False
        mine = self.round.standing(self._clock())
        try:
            try:
                stream = await self._transport.open_swap(ask.candidate, timeout_s=self._deadlines.dial_s)
                swap_id, mine = self._rng.randbytes(SWAP_ID_BYTES), self.round.standing(self._clock())
                self._streams[ask] = stream, swap_id
                await self._send(stream, Offer(self._hello(), swap_id, mine))
                answer = await stream.receive(self._deadlines.offer_s)
            except PeerError as error:
                answer = error.with_traceback(None)  # its traceback would keep this frame and the stream alive
            actions = self.round.offer_answered(ask, answer, mine=mine, now_s=self._clock())
            is_bound = any(isinstance(action, Bind) and action.via is ask for action in actions)
            self._do(actions)
            self._changed.set()
        finally:
            self._streams.pop(ask, None)
            self._do(self.round.offer_dropped(ask, self._clock()))
            if stream and not is_bound:
                await stream.close()

    async def _send(self, stream: FrameStream, frame: Frame) -> None:
        """Send an offer or an answer. Raises PeerError.

        These frames are small, so a peer that does not accept one in time is evidently frozen.
        """
        try:
            await asyncio.wait_for(stream.send(frame), self._deadlines.offer_s)
        except TimeoutError:
            raise TimedOut(
                f"it did not accept any message for {self._deadlines.offer_s:g} s", peer=stream.peer
            ) from None

    async def _compare_models(self, action: CompareModels, layout: ModelLayout) -> None:
        difference = await find_difference(self._transport, action.candidate, layout)
        if difference:
            text = f"{named(action.candidate.peer_id)} is training a different model: {difference}"
            self.fault.report(text, action.error)

    # actions

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Bind():
                    self._bind(action)
                case Reply(to, refuse):
                    self._decisions[to].set_result(refuse)
                case Abandon(swap, reason):
                    swap.abandon(reason)
                case Report(text, error, level):
                    self.fault.report(text, error, level=level)
                case Strike(peer_id, reason):
                    self.on_corrupt(peer_id, reason)
                case CompareModels():
                    if self.layout:
                        self._tasks.start(self._compare_models(action, self.layout))

    def _bind(self, bind: Bind) -> None:
        stream, swap_id = self._streams[bind.via]
        swap = self._make_swap(stream, swap_id, bind.partner)
        self._ledgers[swap_id] = swap.ledger
        if len(self._ledgers) > REMEMBERED_SWAPS:
            self._ledgers.popitem(last=False)
        active, actions = self.round.swap_began(bind, swap, self._clock())
        self._changed.set()
        self._do(actions)
        if isinstance(bind.via, Incoming):
            self._decisions[bind.via].set_result(active)
        else:
            self._tasks.start(self._run_swap(active))

    async def _wait_for_change(self, at_most_s: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), at_most_s)

    # swaps

    def _make_swap(self, stream: FrameStream, swap_id: bytes, partner: str) -> Swap:
        opening, plans = self.round.opening, self.round.plans
        assert opening is not None
        return Swap(
            stream,
            swap_id=swap_id,
            partner=partner,
            plans=plans,
            early_state=opening.early_state,
            bounds=self._bounds_of(plans, opening.round),
            staged=self._staged,
            executor=self._executor,
            memory=self.memory,
            traffic=self.traffic,
            on_commit=self._committed,
            ask_partner=self._ask_partner,
            deadlines=self._deadlines,
        )

    def _bounds_of(self, plans: Iterable[SectionPlan], round_index: int) -> dict[SectionName, Bounds]:
        """Return the bounds of each section that uses modulo coding. The bounds adapt from swap to swap."""
        for plan in plans:
            if plan.modulo and plan.name not in self._bounds:
                self._bounds[plan.name] = Bounds(plan.num_elements)
        for bounds in self._bounds.values():
            bounds.begin_swap(round_index)
        return {plan.name: self._bounds[plan.name] for plan in plans if plan.modulo}

    async def _run_swap(self, active: ActiveSwap) -> None:
        watch = self._tasks.start(self._watch(active))
        try:
            await _swap_of(active).run()
        except PeerError as error:
            self._swap_ended(active, error)
            # The traceback and the swap refer to each other. Without this line, payloads as large as the model would
            # stay in memory until the garbage collector runs.
            error.__traceback__ = error.__context__ = None
        except BaseException:  # after cancellation or a bug, the round must not wait for this swap
            self._swap_ended(active, Unreachable("this peer aborted the swap", peer=active.partner))
            raise
        finally:
            watch.cancel()

    async def _watch(self, active: ActiveSwap) -> None:
        while self.round.watches(active):
            await asyncio.sleep(WATCH_S)
            self._do(self.round.swap_watched(active, self._clock()))

    def _committed(self, swap: Swap, part: Part) -> None:
        """Report a committed part. The swap calls this at the moment of the commit."""
        self.round.committed(swap, part, self._clock())
        self._changed.set()

    def _swap_ended(self, active: ActiveSwap, error: PeerError) -> None:
        self._do(self.round.swap_ended(active, error, self._clock()))
        self._changed.set()

    async def _ask_partner(self, partner: str, swap_id: bytes) -> SwapState:
        """Request the state of a swap from the partner. The result is empty if the partner cannot be reached."""
        candidate = await self._directory.find(partner, timeout_s=self._deadlines.status_s)
        if candidate is None:
            return SwapState()
        try:
            status = await self._transport.status(candidate, swap_id=swap_id, timeout_s=self._deadlines.status_s)
        except PeerError:
            return SwapState()
        return status.swap


def _swap_of(active: ActiveSwap) -> Swap:
    assert isinstance(active.swap, Swap)
    return active.swap
