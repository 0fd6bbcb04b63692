"""One peer's rounds on the network thread: seeks a partner, answers offers, runs the swap, gives the outcome.

Every method runs on the event loop; `exchange.py` is the door for the main thread. Decisions are those of `round.py`
and `pairing.py`; between a decision and the change of state it calls for there is no await: nothing can come between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from noloco_p2p.codec.modulo import Bounds
from noloco_p2p.errors import CorruptPayload, PeerError, Refused, TimedOut, Unreachable
from noloco_p2p.gossip.deadlines import INTERNET, Deadlines
from noloco_p2p.gossip.frames import (
    PROTOCOL_VERSION,
    AbortCode,
    Accept,
    Boundary,
    Frame,
    Hello,
    Offer,
    Part,
    Payload,
    Refuse,
    RefuseCode,
    SectionName,
    SwapState,
)
from noloco_p2p.gossip.goodput import Goodput
from noloco_p2p.gossip.outcome import (
    Alone,
    Correction,
    Half,
    LonelyCause,
    Outcome,
    Received,
    Swapped,
    Traffic,
)
from noloco_p2p.gossip.pace import Pace
from noloco_p2p.gossip.pairing import Pairing
from noloco_p2p.gossip.payload_memory import PayloadMemory
from noloco_p2p.gossip.pipeline import Staged
from noloco_p2p.gossip.round import Phase, Round
from noloco_p2p.gossip.round_length import LinkMeasure
from noloco_p2p.gossip.running import Running
from noloco_p2p.gossip.seams import Candidate, Directory, FrameStream, Transport
from noloco_p2p.gossip.sections import SectionPlan, part_bytes
from noloco_p2p.gossip.swap import Ended, Ledger, Swap

log = logging.getLogger(__name__)

POLL_S = 0.1  # how often the directory is looked at for newcomers while a partner is sought
WATCH_S = 0.5  # how often a swap on its way is judged
LAST_LOOK_S = 1.0  # at its boundary a peer without a partner looks for one so long, however many it could still ask
REMEMBERED_SWAPS = 16
TRAILING_SHARE = 1 / 3  # of a round, in which the late part of the last one has the link to itself
TRAILING_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Opening:
    """The state of a peer at the opening of a round. The tensors must not change until the outcome is collected."""

    round: int
    progress: float
    early_state: dict[SectionName, Tensor]  # flat, fp32, on the CPU


class RoundRunner:
    """`rng` draws partners and the ids of swaps; `clock` gives seconds, those by which `pace` is fed."""

    def __init__(
        self,
        *,
        hello: Callable[[], Hello],
        transport: Transport,
        directory: Directory,
        pace: Pace,
        executor: Executor,
        rng: random.Random,
        deadlines: Deadlines = INTERNET,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.traffic = Traffic()
        self.memory = PayloadMemory()
        self.corrections: deque[Correction] = deque(maxlen=2)
        self.state = "training"
        self.last_fault = self.last_fault_advice = ""
        self.last_fault_at_s = 0.0  # Unix time
        self._unreachable: set[str] = set()
        self._hello = hello
        self._transport = transport
        self._directory = directory
        self._pace = pace
        self._executor = executor
        self._deadlines = deadlines
        self._clock = clock
        self._rng = rng
        self._pairing = Pairing(rng)
        self._plans: tuple[SectionPlan, ...] = ()
        self._bounds: dict[SectionName, Bounds] = {}
        self._round = Round(0, own_id=hello().peer_id)
        self._round.close()
        self._opening: Opening | None = None
        self._staged: Staged | None = None
        self._running: Running | None = None
        self._trailing: Running | None = None  # of the last round, its late part still on the way
        self._reason, self._cause = "", LonelyCause.NO_ANSWER
        self._failed_link: LinkMeasure | None = None  # of a swap of this round that did not come to its early part
        self._ledgers: OrderedDict[bytes, Ledger] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._seeker: asyncio.Task[None] | None = None
        self._goodput = Goodput()
        self._opened_s = 0.0  # when this round was opened, by the clock
        self._boundary_s: float | None = None  # when its boundary came
        self._correcting = False  # the main thread adds a correction to the vectors now
        self._changed = asyncio.Event()

    @property
    def phase(self) -> Phase:
        """How far the round of now has come."""
        return self._round.phase

    def swap_now(self) -> tuple[Swap, float] | None:
        """The swap that runs, or whose late part is still on its way, and when it began (monotonic seconds)."""
        running = self._running or self._trailing
        return (running.swap, running.began_s) if running else None

    # the beats of a round, called for the main thread

    async def open(self, opening: Opening, plans: tuple[SectionPlan, ...]) -> None:
        if self._round.phase is not Phase.CLOSED:  # this thread was silent when the last outcome was asked for
            self._conclude(self._round)
            self._drop_trailing()
        self._plans = plans
        for plan in plans:
            if plan.modulo and plan.name not in self._bounds:
                self._bounds[plan.name] = Bounds(plan.num_elements, codec=plan.modulo)
        self._opening = opening
        self._opened_s = self._clock()
        self._staged = Staged()
        self._round = Round(opening.round, own_id=self._hello().peer_id, progress=opening.progress)
        self._running = None
        self._reason, self._cause = "", LonelyCause.NO_ANSWER
        self._failed_link = None
        self._boundary_s = None
        self._correcting = False  # whoever opens a round is done with correcting, also when he could not say so
        self._pairing.open_round()
        self._seeker = self._own(self._seek(self._round))
        self._notify()

    async def begin_stage(self) -> bool:
        """The boundary is here: a late part of the last round is given up.

        False = no partner can be had in this round, so that nothing needs to be coded.
        """
        self._drop_trailing()
        self._boundary_s = self._clock()
        if self._running:
            self._running.boundary_s = self._boundary_s
        self._notify()
        if self._round.phase is Phase.CLOSED:
            return False
        if self._hopeless(self._round):
            self._round.close()  # nobody may join a round whose gradient is not coded
            return False
        return True

    def stage(self, payload: Payload) -> None:
        assert self._staged is not None
        self._staged.put(payload)

    def cannot_stage(self, reason: str) -> None:
        """The own outer gradient cannot be sent: a committed early part stays half, everything else ends here."""
        if self._running:
            self._running.swap.abandon(CorruptPayload(f"the own outer gradient cannot be sent: {reason}"))
        if not self._round.early_committed:
            self._round.close()

    async def collect(self, wait_s: float) -> Outcome:
        """Ends the round: waits up to `wait_s` while something may still come in that time, then tells what was got."""
        round_, until_s = self._round, self._clock() + wait_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._settled(round_) and self._is_worth_waiting(round_, until_s):
                    await self._wait_for_change(POLL_S)
        return self._conclude(round_)

    async def take_correction(self, before: int) -> Correction | None:
        """A late part of a round before `before`, to be applied at once; `corrected` tells that it was.

        None while the vectors that it changes are on their way to a partner.
        """
        if not self.corrections or self.corrections[0].round >= before or self._round.phase is Phase.SWAPPING:
            return None
        self._correcting = True
        return self.corrections.popleft()

    def corrected(self) -> None:
        self._correcting = False
        self._notify()

    async def stop(self) -> None:
        """Abandon what runs and wait until all tasks have ended."""
        self._round.close()
        self._drop_trailing()
        if self._running:
            self._running.swap.abandon(Unreachable("this peer leaves"))
        if self._seeker:
            self._seeker.cancel()
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)  # let farewells out
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # answering

    def admit(self, hello: Hello) -> None:
        """Raises Refused when the caller is of another protocol version, run or spec."""
        ours = self._hello()
        for code, mine, theirs, what in (
            (
                RefuseCode.OTHER_VERSION,
                ours.protocol_version.split(".")[0],
                hello.protocol_version.split(".")[0],
                f"protocol version {PROTOCOL_VERSION} here, {hello.protocol_version or 'none'} there",
            ),
            (
                RefuseCode.OTHER_RUN,
                ours.run_name,
                hello.run_name,
                f"run {ours.run_name} here, {hello.run_name!r} there",
            ),
            (
                RefuseCode.OTHER_SPEC,
                ours.spec_digest,
                hello.spec_digest,
                f"spec digest {ours.spec_digest[:16]}.. here, {hello.spec_digest[:16] or 'none'}.. there",
            ),
            (
                RefuseCode.OTHER_MODEL,
                ours.layout if hello.layout else "",
                hello.layout if ours.layout else "",
                f"model layout {ours.layout[:16]}.. here, {hello.layout[:16]}.. there",
            ),
        ):
            if mine != theirs:
                raise Refused(what, peer=hello.peer_id, code=code.name)

    def swap_state(self, swap_id: bytes) -> SwapState:
        ledger = self._ledgers.get(swap_id)
        return ledger.state() if ledger else SwapState()

    async def on_swap(self, stream: FrameStream) -> None:
        """Answer one offer, and carry the swap out when it is accepted."""
        try:
            offer = await stream.receive(self._deadlines.offer_s)
            if not isinstance(offer, Offer) or len(offer.swap_id) != 16 or not offer.hello.peer_id:
                await self._send(stream, Refuse(RefuseCode.MALFORMED, "a swap begins with an offer"))
                return
            refuse = self._answer(offer)
            if refuse:
                await self._send(stream, refuse)
                return
            mine = self._boundary(self._round)
            round_, running = self._bind(stream, offer.swap_id, offer.hello.peer_id, mine, offer.boundary)
            try:
                await self._send(stream, Accept(self._hello(), mine))
            except PeerError as error:
                self._swap_ended(round_, running, error)
                return
            await self._run(round_, running)
        except PeerError as error:
            log.debug("an offer from %s came to nothing: %s", stream.peer, error)
        finally:
            await stream.close()

    def _answer(self, offer: Offer) -> Refuse | None:
        try:
            self.admit(offer.hello)
        except Refused as error:
            return Refuse(RefuseCode[error.code], str(error))
        if offer.hello.peer_id == self._hello().peer_id:
            return Refuse(RefuseCode.MALFORMED, "this is my own peer id: a key must not be used on two machines")
        if self.state != "training":
            return Refuse(RefuseCode.NOT_TRAINING, f"I am {self.state}", 60.0)
        if self._round.wants_partner and self._trails():
            return Refuse(RefuseCode.BUSY, "the late part of my last round is on its way", TRAILING_RETRY_S)
        return self._round.answer(offer, mine=self._boundary(self._round))

    # seeking

    async def _seek(self, round_: Round) -> None:
        while round_.phase is not Phase.CLOSED:
            if not round_.wants_partner or self._trails():
                await self._wait_for_change(POLL_S)
                continue
            now_s = self._clock()
            candidate = self._pairing.choose(self._directory.live(), now_s, latest_s=self._latest_offer_s(now_s))
            if candidate is None:
                # To ask at the next poll, instead of when the drawn peer may be asked, would let peers that refuse each
                # other, as each has an offer out, ask again at one moment, and refuse each other again.
                await self._wait_for_change(min(POLL_S, self._pairing.wait_s(now_s)))
                continue
            round_.offer_to(candidate.peer_id)
            try:
                await self._offer(round_, candidate)
            except Refused as error:
                self._refused(candidate.peer_id, error)
            except PeerError as error:
                told = candidate.peer_id in self._unreachable  # it stays in the directory until its record expires
                level = logging.DEBUG if told else logging.WARNING
                self._fault(f"offer to {_short(candidate.peer_id)} failed: {error}", error, level=level)
                self._unreachable.add(candidate.peer_id)
                self._pairing.failed(candidate.peer_id, now_s=self._clock())
            finally:
                if round_.is_offering_to(candidate.peer_id):
                    round_.offer_failed()
                self._notify()

    def _trails(self) -> bool:
        """The last round is not over: its late part gets the link first, and its correction the vectors.

        So the partner's gradient comes early, and what is sent of this round does not change any more. A late part that
        takes long has to share the link; its correction then waits until the early part is here.
        """
        if self._correcting:
            return True
        round_s = self._pace.seconds_per_round()
        is_long = round_s is not None and self._clock() - self._opened_s > TRAILING_SHARE * round_s
        return not is_long and (self._trailing is not None or bool(self.corrections))

    def _latest_offer_s(self, now_s: float) -> float:
        """Until when an offer may wait, if the early part is to arrive within the round."""
        left_s = None if self._boundary_s is not None else self._pace.seconds_to_boundary(now_s)
        early_s = self._goodput.seconds_for(part_bytes(self._plans, Part.EARLY)) or 0.0
        return now_s if left_s is None else now_s + left_s - early_s

    async def _offer(self, round_: Round, candidate: Candidate) -> None:
        """Raises Refused or another PeerError; on success the swap runs in a task of its own."""
        stream = await self._transport.open_swap(candidate, timeout_s=self._deadlines.dial_s)
        bound = False
        try:
            swap_id, mine = self._rng.randbytes(16), self._boundary(round_)
            await self._send(stream, Offer(self._hello(), swap_id, mine))
            reply = await stream.receive(self._deadlines.offer_s)
            if isinstance(reply, Refuse):
                raise Refused(
                    reply.sentence, peer=candidate.peer_id, code=reply.code.name, retry_after_s=reply.retry_after_s
                )
            if not isinstance(reply, Accept) or reply.hello.peer_id != candidate.peer_id:
                raise CorruptPayload("the answer to an offer was neither yes nor no", peer=candidate.peer_id)
            self.admit(reply.hello)
            if not round_.is_offering_to(candidate.peer_id):
                return  # overtaken while the answer was on its way
            _, running = self._bind(stream, swap_id, candidate.peer_id, mine, reply.boundary)
            bound = True
            self._own(self._run(round_, running))
        finally:
            if not bound:
                await stream.close()

    def _refused(self, peer_id: str, error: Refused) -> None:
        code = RefuseCode[error.code]
        self._pairing.refused(peer_id, code=code, retry_after_s=error.retry_after_s, now_s=self._clock())
        self._reason, self._cause = f"{_short(peer_id)} refused: {error}", LonelyCause.REFUSED
        if code in (RefuseCode.OTHER_VERSION, RefuseCode.OTHER_SPEC, RefuseCode.OTHER_RUN, RefuseCode.OTHER_MODEL):
            self._fault(f"{_short(peer_id)} is not of this run: {error}", error)

    # swapping

    def _bind(
        self, stream: FrameStream, swap_id: bytes, partner: str, mine: Boundary, theirs: Boundary
    ) -> tuple[Round, Running]:
        assert self._opening is not None
        assert self._staged is not None
        self._round.bind(partner)
        self._unreachable.discard(partner)
        swap = Swap(
            stream,
            swap_id=swap_id,
            partner=partner,
            plans=self._plans,
            early_state=self._opening.early_state,
            bounds={plan.name: self._bounds[plan.name] for plan in self._plans if plan.modulo},
            staged=self._staged,
            executor=self._executor,
            memory=self.memory,
            traffic=self.traffic,
            on_commit=self._committed,
            ask_partner=self._ask,
            deadlines=self._deadlines,
        )
        self._ledgers[swap_id] = swap.ledger
        if len(self._ledgers) > REMEMBERED_SWAPS:
            self._ledgers.popitem(last=False)
        self._running = Running(swap, self._round.index, mine, theirs, self._clock(), self._boundary_s)
        self._notify()
        return self._round, self._running

    async def _run(self, round_: Round, running: Running) -> None:
        watch = self._own(self._watch(round_, running))
        try:
            await running.swap.run()
        except PeerError as error:
            self._swap_ended(round_, running, error)
        except BaseException:  # cancelled, or a mistake of ours: the round must not wait for it
            self._swap_ended(round_, running, Unreachable("it was broken off here", peer=running.swap.partner))
            raise
        finally:
            watch.cancel()

    async def _watch(self, round_: Round, running: Running) -> None:
        """Gives up an early part that will miss the boundary, while there is time for another partner."""
        while round_.phase is Phase.SWAPPING and running is self._running and self._boundary_s is None:
            await asyncio.sleep(WATCH_S)
            now_s = self._clock()
            left_s = self._pace.seconds_to_boundary(now_s)
            if left_s is not None and running.misses(now_s + left_s, now_s, self._goodput):
                running.swap.abandon(TimedOut("too slow for this round", peer=running.swap.partner))
                return

    def _committed(self, swap: Swap, part: Part) -> None:
        """Called by the swap in the moment of the commit: the round moves on, or a late part becomes a correction."""
        if self._running and swap is self._running.swap:
            self._running.committed(part, self._clock(), self._goodput)
            if part is Part.EARLY:
                self._round.commit_early()
                self._pairing.met(swap.partner)
            else:
                self._round.commit_late()
        elif self._trailing and swap is self._trailing.swap:
            gradient, trailing = swap.pair(SectionName.OUTER_GRADIENT), self._trailing
            self.corrections.append(Correction(gradient, swap.partner, trailing.round, trailing.agreed_inner_steps))
            self._trailing = None
        self._notify()

    def _swap_ended(self, round_: Round, running: Running, error: PeerError) -> None:
        kept = "early part kept" if Part.EARLY in running.swap.ledger.committed else "nothing applied"
        if round_.phase is not Phase.CLOSED or running is self._trailing:
            what = f"round {round_.index} | swap with {_short(running.swap.partner)} failed: {error} | {kept}"
            self._fault(what, error)
        if running is self._trailing:
            self._trailing = None
        if running is self._running and round_ is self._round:
            now_s = self._clock()
            running.broken_off(now_s, self._goodput)
            if isinstance(error, Ended) and error.code is AbortCode.ABANDONED:
                # No fault: its boundary came first, and its next round may fit.
                between = RefuseCode.BETWEEN_ROUNDS
                self._pairing.refused(running.swap.partner, code=between, retry_after_s=POLL_S, now_s=now_s)
            else:
                self._pairing.failed(running.swap.partner, now_s=now_s)
            if round_.phase is Phase.SWAPPING:
                self._failed_link = running.link(now_s)
            round_.swap_failed()
            self._reason = f"the swap with {_short(running.swap.partner)} failed: {error}"
            self._cause = LonelyCause.FAILED
        self._notify()

    async def _ask(self, partner: str, swap_id: bytes) -> SwapState:
        """What the partner knows of a swap; nothing when it cannot be asked."""
        candidate = await self._directory.find(partner, timeout_s=self._deadlines.status_s)
        if candidate is None:
            return SwapState()
        try:
            status = await self._transport.status(candidate, swap_id=swap_id, timeout_s=self._deadlines.status_s)
        except PeerError:
            return SwapState()
        return status.swap

    # ending

    def _conclude(self, round_: Round) -> Outcome:
        outcome = self._outcome(round_)
        round_.close()
        if self._seeker:
            self._seeker.cancel()
        self._opening = None
        return outcome

    def _settled(self, round_: Round) -> bool:
        return round_.phase in (Phase.DONE, Phase.HALF, Phase.CLOSED) or self._hopeless(round_)

    def _is_worth_waiting(self, round_: Round, until_s: float) -> bool:
        """False when what is still to come cannot be here by then, by measured rates and the partner's own word."""
        if self._running is None or round_.phase not in (Phase.SWAPPING, Phase.EARLY):
            return True
        return self._running.expected_s(self._clock(), self._goodput) <= until_s

    def _hopeless(self, round_: Round) -> bool:
        if round_.phase is not Phase.SEEKING:
            return False
        now_s = self._clock()
        if self._boundary_s is not None and now_s - self._boundary_s > LAST_LOOK_S:
            return True
        return not self._pairing.hopeful(self._directory.live(), now_s)

    def _outcome(self, round_: Round) -> Outcome:
        running, phase, now_s = self._running, round_.phase, self._clock()
        if running is not None and round_.early_committed:
            received = Received(
                partner=running.swap.partner,
                partner_round=running.partner.round,
                partner_progress=running.partner.progress,
                agreed_inner_steps=running.agreed_inner_steps,
                sections=running.swap.pairs(),
                link=running.link(now_s),
                bytes_sent=running.swap.bytes_sent,
                bytes_received=running.swap.bytes_received,
                seconds=now_s - running.began_s,
                lateness_s=running.lateness_s(now_s),
                transfer_s=running.transfer_s(now_s),
            )
            self._running = None
            if phase is Phase.DONE:
                return Swapped(received)
            if phase is Phase.EARLY:
                self._trailing = running
                return Half(received, "its outer gradient is not here yet")
            return Half(received, self._reason)
        if phase is Phase.SWAPPING and running is not None:
            partner, self._running = running.swap.partner, None
            running.broken_off(now_s, self._goodput)
            running.swap.abandon(Unreachable("the round ended before the early part was committed"))
            reason = f"the swap with {_short(partner)} was not ready at the boundary"
            return Alone(reason, LonelyCause.SLOW, running.link(now_s))
        if not self._directory.live():
            return Alone("no other live peer", LonelyCause.NOBODY)
        return Alone(self._reason or "no answer to an offer yet", self._cause, self._failed_link)

    def _drop_trailing(self) -> None:
        if self._trailing:
            trailing, self._trailing = self._trailing, None
            trailing.swap.abandon(Unreachable("the next boundary came before the late part"))

    # small parts

    async def _send(self, stream: FrameStream, frame: Frame) -> None:
        """An offer or its answer: one small frame, which only a frozen peer does not take."""
        try:
            await asyncio.wait_for(stream.send(frame), self._deadlines.offer_s)
        except TimeoutError:
            raise TimedOut(f"it took no message for {self._deadlines.offer_s:g} s", peer=stream.peer) from None

    def _boundary(self, round_: Round) -> Boundary:
        return self._pace.boundary(round_index=round_.index, progress=round_.progress, now_s=self._clock())

    def _fault(self, text: str, error: PeerError, *, level: int = logging.WARNING) -> None:
        self.last_fault, self.last_fault_advice, self.last_fault_at_s = text, error.advice, time.time()
        log.log(level, text)

    def _notify(self) -> None:
        self._changed.set()

    async def _wait_for_change(self, at_most_s: float) -> None:
        """Until something changed, or for a moment: newcomers and retry times are not announced."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), at_most_s)

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a network task ended in an unexpected error", exc_info=error)


def _short(peer_id: str) -> str:
    return f"..{peer_id[-6:]}"
