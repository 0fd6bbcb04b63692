"""This pure state machine runs the rounds of one peer.

Its inputs are events and their times, and its outputs are actions for the driver.

    SEEKING -> OFFERING -> SWAPPING -> EARLY -> DONE
       ^          |           |          |
       +--refused-+--failed---+          +--late part failed--> HALF
    any -> CLOSED when the round ends

If the swaps of a run have no late part, SWAPPING leads directly to DONE.

A round has at most one partner whose early part is committed. Nothing is reserved before an offer is accepted. If a
round ends before its late part is committed, its swap continues in the next round as the trailing swap, and the late
part becomes a correction. `round_driver.py` performs the actions.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from noloco_p2p.errors import CorruptPayload, PeerError, Refused, TimedOut, Unreachable
from noloco_p2p.gossip.active_swap import ActiveSwap, SwapHandle
from noloco_p2p.gossip.frames import (
    AbortCode,
    Accept,
    Boundary,
    Frame,
    Hello,
    Offer,
    Part,
    Refuse,
    RefuseCode,
    SectionName,
    other_kind,
)
from noloco_p2p.gossip.outcome import Alone, Correction, Half, LonelyCause, Outcome, Swapped
from noloco_p2p.gossip.pairing import Pairing
from noloco_p2p.gossip.rate_estimators import Goodput, StepRate
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
from noloco_p2p.gossip.round_length import LinkMeasure
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.gossip.sections import SectionPlan, part_bytes
from noloco_p2p.gossip.staleness import refuse_distant, refuse_stale, too_long
from noloco_p2p.gossip.swap import Ended
from noloco_p2p.telemetry.console import named

POLL_S = 0.1  # matchmaking polls at this interval, because no event announces newcomers and retry times
LAST_LOOK_S = 1.0  # how long a peer without a partner keeps looking for one at its boundary
TRAILING_RETRY_S = 1.0
TRAILING_SHARE = 1 / 3  # the fraction of a round during which the trailing swap has the link to itself
NOT_TRAINING_RETRY_S = 60.0
UNLISTED_RETRY_S = 1.0
OTHER_KINDS = (RefuseCode.OTHER_VERSION, RefuseCode.OTHER_SPEC, RefuseCode.OTHER_RUN, RefuseCode.OTHER_MODEL)


class RoundState:
    """The current round of one peer, and the trailing swap and corrections of earlier rounds.

    `hello` returns this peer's Hello, `live` the known live peers, and `num_live` the number of all live peers,
    including this peer. `step_rate` holds the measured speeds, and `pairing` remembers the answers of peers. Each
    method handles an event. It changes the state at once and returns the actions that the driver must perform, in
    order.
    """

    def __init__(
        self,
        *,
        hello: Callable[[], Hello],
        live: Callable[[], Sequence[Candidate]],
        num_live: Callable[[], int],
        step_rate: StepRate,
        pairing: Pairing,
    ) -> None:
        self.peer_state = "training"  # or "paused", "leaving" or "done"; offers are accepted only while training
        self.is_leaving = False  # whether this peer no longer waits at boundaries
        self.was_refused_as_stale = False  # whether another peer refused this one as stale
        self.goodput = Goodput()
        self.corrections: deque[Correction] = deque(maxlen=2)
        self.trailing: ActiveSwap | None = None
        self.unreachable: set[str] = set()  # peers already reported, until a swap with them begins
        self._hello = hello
        self._live = live
        self._num_live = num_live
        self._step_rate = step_rate
        self._pairing = pairing
        self._held: deque[Incoming] = deque()  # offers that wait until this peer's own offer is answered
        self._is_correcting = False
        self._begin(None, (), 0.0)
        self.phase = RoundPhase.CLOSED

    def _begin(self, opening: Opening | None, plans: tuple[SectionPlan, ...], now_s: float) -> None:
        self.phase = RoundPhase.SEEKING
        self.opening = opening  # None while no round is open
        self.plans = plans
        self.index, self.progress = (opening.round, opening.progress) if opening else (0, 0.0)
        self.partner = ""
        self.active: ActiveSwap | None = None  # the swap of this round
        self.asked: Ask | None = None  # this peer's offer that has not been answered yet
        self.reason, self.cause = "", LonelyCause.NO_ANSWER  # why there is no partner yet
        self._failed_link: LinkMeasure | None = None  # measured by a swap whose early part failed
        self._opened_s = now_s
        self._patient_until_s = now_s + (opening.patience_s if opening else 0.0)
        self._boundary_s: float | None = None  # when this peer reached its boundary

    # the phases of a round, in the order of training

    def open(self, opening: Opening, plans: tuple[SectionPlan, ...], now_s: float) -> list[Action]:
        """Begin a round. If a hung network thread left the last round open, end that round first."""
        actions: list[Action] = []
        if self.phase is not RoundPhase.CLOSED:
            actions += self._drop_trailing() + self.end(now_s)[1] + self._drop_trailing()
        self._begin(opening, plans, now_s)
        self._is_correcting = False  # in case `corrected` was never called
        is_patient = opening.patience_s > 0
        self._pairing.open_round(self._live(), num_live=self._num_live(), is_patient=is_patient)
        return actions + self._release(now_s)

    def reach_boundary(self, now_s: float) -> list[Action]:
        """Drop the trailing swap, and close the round if it can no longer find a partner."""
        actions = self._drop_trailing()
        self._boundary_s = now_s
        if self.active:
            self.active.boundary_s = now_s
        if self.is_hopeless(now_s):
            self.phase = RoundPhase.CLOSED  # no peer may join a round whose gradient is not encoded
        return actions

    def cannot_stage(self, reason: str, now_s: float) -> list[Action]:
        """Abandon the swap because this peer's outer gradient cannot be sent.

        The early part is kept if it was committed.
        """
        actions: list[Action] = []
        if self.active:
            error = CorruptPayload(f"this peer's outer gradient cannot be sent: {reason}")
            actions.append(Abandon(self.active.swap, error))
        if not self.has_early_part:
            self._close()
        return actions + self._release(now_s)

    def is_over(self, now_s: float, *, until_s: float) -> bool:
        """Return whether the round, at its boundary, is complete or cannot receive anything more by `until_s`."""
        if (
            self.phase in (RoundPhase.DONE, RoundPhase.HALF, RoundPhase.CLOSED)
            or self.is_leaving
            or self.is_hopeless(now_s)
        ):
            return True
        if self.active is None or self.phase not in (RoundPhase.SWAPPING, RoundPhase.EARLY):
            return False
        return self.active.expected_s(now_s, self.goodput) > until_s

    def end(self, now_s: float) -> tuple[Outcome, list[Action]]:
        """End the round with the parts that have been committed so far.

        If the late part is in flight, its swap continues as the trailing swap.
        """
        outcome, actions = self._outcome(now_s)
        self._close()
        self.opening = None
        return outcome, actions + self._release(now_s)

    def withdraw(self, now_s: float) -> tuple[Outcome, list[Action]]:
        """End the round before its boundary. The swap is dropped, because the outer gradient will never be sent."""
        actions = self._drop_trailing() if self.has_early_part else []
        outcome, more = self.end(now_s)
        actions += more
        if not isinstance(outcome, Alone):
            actions += self._drop_trailing()  # the swap of this round, whose late part will not arrive
        return outcome, actions

    def take_correction(self, before: int) -> Correction | None:
        """Return a late part of a round whose index is below `before`. Apply it at once, then call `corrected`.

        The result is None while the vectors that it changes are being sent, or are about to be sent, to a partner.
        """
        is_sending = self.phase in (RoundPhase.OFFERING, RoundPhase.SWAPPING)
        if not self.corrections or self.corrections[0].round >= before or is_sending:
            return None
        self._is_correcting = True
        return self.corrections.popleft()

    def corrected(self) -> None:
        self._is_correcting = False

    def forget(self) -> list[Action]:
        """Drop the late parts of earlier rounds, because the vectors that they belong to have been replaced."""
        self.corrections.clear()
        return self._drop_trailing()

    def stop(self, now_s: float) -> list[Action]:
        """End the round and its swaps, because this peer is shutting down."""
        self._close()
        actions = self._drop_trailing()
        if self.active:
            actions.append(Abandon(self.active.swap, Unreachable("this peer is leaving")))
        return actions + self._release(now_s)

    # the current state

    @property
    def has_early_part(self) -> bool:
        return self.phase in (RoundPhase.EARLY, RoundPhase.DONE, RoundPhase.HALF)

    def standing(self, now_s: float) -> Boundary:
        """Return this peer's position in its round, as it is announced to a partner."""
        return self._step_rate.boundary(round_index=self.index, progress=self.progress, now_s=now_s)

    def waits_for_trailing(self, now_s: float) -> bool:
        """Return whether matchmaking must wait for the trailing swap to end or for its correction to be applied.

        During this wait, the trailing swap has the link to itself, so that the last partner's gradient arrives early.
        The correction is applied first, because the vectors must not change once this round has begun to send them. If
        the late part takes too long, it must share the link, and its correction waits until this round's early part has
        arrived.
        """
        if self._is_correcting:
            return True
        round_s = self._step_rate.seconds_per_round()
        is_long = round_s is not None and now_s - self._opened_s > TRAILING_SHARE * round_s
        return not is_long and (self.trailing is not None or bool(self.corrections))

    def is_hopeless(self, now_s: float) -> bool:
        """Return whether this round can no longer find a partner."""
        if self.phase is not RoundPhase.SEEKING:
            return False
        if self._boundary_s is not None and now_s > max(self._boundary_s + LAST_LOOK_S, self._patient_until_s):
            return True
        return not self._pairing.hopeful(self._live(), now_s, latest_s=max(now_s, self._patient_until_s))

    # matchmaking: offers of this peer

    def seek(self, now_s: float) -> Ask | Wait | None:
        """Return the next step of matchmaking, or None if this round no longer needs a partner."""
        if self.phase is RoundPhase.CLOSED:
            return None
        if self.phase is not RoundPhase.SEEKING or self.waits_for_trailing(now_s):
            return Wait(POLL_S)
        candidate = self._pairing.choose(self._live(), now_s, latest_s=self._latest_offer_s(now_s))
        if candidate is None:
            # The wait ends as soon as the drawn peer may be asked again. If it always lasted until the next poll, two
            # peers that refuse each other because both have made an offer would ask again at the same moment.
            return Wait(min(POLL_S, self._pairing.wait_s(now_s)))
        self.phase, self.asked = RoundPhase.OFFERING, Ask(candidate)
        return self.asked

    def offer_answered(self, ask: Ask, answer: Frame | PeerError, *, mine: Boundary, now_s: float) -> list[Action]:
        """Handle the answer to an offer that announced `mine`. The answer is a frame or an error."""
        fault = answer if isinstance(answer, PeerError) else self._fault_of(ask.candidate, answer)
        if fault is None and isinstance(answer, Accept):
            self._step_rate.hear(ask.candidate.peer_id, answer.boundary, now_s=now_s)
            if self.asked is not ask:
                return []  # superseded while the answer was in flight
            if not (fault := self._fault_of_boundary(ask.candidate, mine, answer.boundary)):
                return [self._bind(ask, ask.candidate.peer_id, mine, answer.boundary)]
        assert fault is not None
        actions = self._refused(ask, fault, now_s) if isinstance(fault, Refused) else self._failed(ask, fault, now_s)
        return actions + self.offer_dropped(ask, now_s)

    def offer_dropped(self, ask: Ask, now_s: float) -> list[Action]:
        """Record that this peer's offer is no longer pending."""
        if self.asked is ask:
            self.phase, self.asked = RoundPhase.SEEKING, None
        return self._release(now_s)

    def _fault_of(self, candidate: Candidate, answer: Frame) -> PeerError | None:
        peer_id = candidate.peer_id
        if isinstance(answer, Refuse):
            return Refused(answer.sentence, peer=peer_id, code=answer.code.name, retry_after_s=answer.retry_after_s)
        if not isinstance(answer, Accept) or answer.hello.peer_id != peer_id:
            return CorruptPayload("the reply to an offer is neither a valid Accept nor a valid Refuse", peer=peer_id)
        if refuse := other_kind(self._hello(), answer.hello):
            return Refused(refuse.sentence, peer=peer_id, code=refuse.code.name)
        return None

    def _fault_of_boundary(self, candidate: Candidate, mine: Boundary, theirs: Boundary) -> PeerError | None:
        assert self.opening is not None
        wrong = too_long(theirs, self.opening.longest_round)
        if not wrong and refuse_stale(mine, theirs, total_steps=self.opening.total_steps):
            wrong = f"it claims to be at {100 * theirs.progress:.2f} % of the run, too far from this peer"
        return CorruptPayload(f"it accepted the offer, but {wrong}", peer=candidate.peer_id) if wrong else None

    def _refused(self, ask: Ask, error: Refused, now_s: float) -> list[Action]:
        peer_id, code = ask.candidate.peer_id, RefuseCode[error.code]
        self._pairing.refused(peer_id, code=code, retry_after_s=error.retry_after_s, now_s=now_s)
        self.reason, self.cause = f"{named(peer_id)} refused: {error}", LonelyCause.REFUSED
        self.was_refused_as_stale |= code is RefuseCode.STALE
        actions: list[Action] = []
        if code in OTHER_KINDS:
            actions.append(Report(f"{named(peer_id)} is not in this run: {error}", error))
        if code is RefuseCode.OTHER_MODEL:
            actions.append(CompareModels(ask.candidate, error))
        return actions

    def _failed(self, ask: Ask, error: PeerError, now_s: float) -> list[Action]:
        peer_id = ask.candidate.peer_id
        level = logging.DEBUG if peer_id in self.unreachable else logging.WARNING
        self.unreachable &= {peer.peer_id for peer in self._live()}  # a dead peer stays listed until its record expires
        self.unreachable.add(peer_id)
        self._pairing.failed(peer_id, now_s=now_s)
        return [Report(f"the offer to {named(peer_id)} failed: {error}", error, level)]

    def _latest_offer_s(self, now_s: float) -> float:
        """Return the latest time at which an offer still lets the early part arrive within the round."""
        early_s = self.goodput.seconds_for(part_bytes(self.plans, Part.EARLY)) or 0.0
        if self._patient_until_s > now_s:
            return self._patient_until_s - early_s
        left_s = None if self._boundary_s is not None else self._step_rate.seconds_to_boundary(now_s)
        return now_s if left_s is None else now_s + left_s - early_s

    # matchmaking: offers of other peers

    def offer_came(self, incoming: Incoming, now_s: float) -> list[Action]:
        """Answer an offer now, or hold it until this peer's own offer is answered."""
        if self._holds(incoming.offer):
            self._held.append(incoming)
            return []
        return [self._answer(incoming, now_s)]

    def hold_expired(self, incoming: Incoming, now_s: float) -> list[Action]:
        """Answer an offer that was held for as long as its caller can be expected to wait."""
        if incoming not in self._held:
            return []
        self._held.remove(incoming)
        return [self._answer(incoming, now_s)]

    def offer_gone(self, incoming: Incoming) -> None:
        """Forget an offer whose stream ended before it was answered."""
        if incoming in self._held:
            self._held.remove(incoming)

    def _holds(self, offer: Offer) -> bool:
        """Return whether to hold an offer, instead of refusing it as BUSY, while this peer's own offer is pending.

        Only offers from higher peer ids are held, so that peers never wait for each other in a cycle.
        """
        caller, own_id = offer.hello.peer_id, self._hello().peer_id
        return self.asked is not None and self.asked.candidate.peer_id != caller and caller > own_id

    def _release(self, now_s: float) -> list[Action]:
        """Answer the held offers in order, unless an offer of this peer is pending.

        If an offer is accepted, the driver reports `swap_began` before the others are answered.
        """
        actions: list[Action] = []
        while self._held and self.phase is not RoundPhase.OFFERING:
            actions.append(self._answer(self._held.popleft(), now_s))
            if isinstance(actions[-1], Bind):
                break
        return actions

    def _answer(self, incoming: Incoming, now_s: float) -> Bind | Reply:
        refuse = self._refusal(incoming, now_s)
        if refuse:
            return Reply(incoming, refuse)
        offer = incoming.offer
        return self._bind(incoming, offer.hello.peer_id, self.standing(now_s), offer.boundary)

    def _refusal(self, incoming: Incoming, now_s: float) -> Refuse | None:
        """Return the refusal of an offer, or None to accept it."""
        offer = incoming.offer
        ours, caller = self._hello(), offer.hello.peer_id
        if refuse := other_kind(ours, offer.hello):
            return refuse
        if caller == ours.peer_id:
            return Refuse(
                RefuseCode.MALFORMED, "your peer id is the same as mine: do not use one identity key on two machines"
            )
        if not incoming.is_listed:
            return Refuse(RefuseCode.UNLISTED, "I have no live record of you yet", UNLISTED_RETRY_S)
        self._step_rate.hear(caller, offer.boundary, now_s=now_s)  # even if the offer is refused
        if self.peer_state != "training":
            return Refuse(RefuseCode.NOT_TRAINING, f"I am {self.peer_state}", NOT_TRAINING_RETRY_S)
        if self.phase is RoundPhase.SEEKING and self.waits_for_trailing(now_s):
            wait_s = self._trailing_left_s(now_s)
            return Refuse(RefuseCode.BUSY, "the late part of my last round is still being sent", wait_s)
        mine = self.standing(now_s)
        if refuse := self._refusal_in_phase(offer, mine, now_s):
            return refuse
        assert self.opening is not None
        total_steps, longest_round = self.opening.total_steps, self.opening.longest_round
        distant = refuse_distant(mine, offer.boundary, total_steps=total_steps, longest_round=longest_round)
        return distant or self._refusal_of_share(caller, mine)

    def _refusal_of_share(self, caller: str, mine: Boundary) -> Refuse | None:
        """Return a refusal if the caller has had its share of swaps, unless this peer itself has asked the caller."""
        is_asked = self.asked is not None and self.asked.candidate.peer_id == caller
        if is_asked or not self._pairing.has_had_its_share(caller):
            return None
        wait_s = mine.seconds_to_boundary if mine.seconds_to_boundary is not None else 1.0
        return Refuse(RefuseCode.OVER_SHARE, "you have used up your share of my swaps", wait_s)

    def _refusal_in_phase(self, offer: Offer, mine: Boundary, now_s: float) -> Refuse | None:
        caller = offer.hello.peer_id
        match self.phase:
            case RoundPhase.SEEKING:
                return None
            case RoundPhase.CLOSED:
                return Refuse(RefuseCode.BETWEEN_ROUNDS, "my next round has not begun yet", 0.05)
            case RoundPhase.OFFERING:
                assert self.asked is not None
                if self.asked.candidate.peer_id != caller:
                    return Refuse(RefuseCode.BUSY, "I am waiting for another peer to answer my offer", 0.1)
                if self._hello().peer_id > caller:
                    return Refuse(RefuseCode.CROSSED, "our offers crossed, and mine takes precedence", 0.1)
                return None
            case _:
                self._pairing.turned_away(caller, mine=mine, theirs=offer.boundary)
                wait_s = mine.seconds_to_boundary if mine.seconds_to_boundary is not None else 1.0
                if self.active:  # this peer may first have to wait for its partner at the boundary
                    wait_s = max(wait_s, self.active.expected_s(now_s, self.goodput) - now_s)
                return Refuse(RefuseCode.TAKEN, f"I already have a partner for round {self.index}", wait_s)

    def _trailing_left_s(self, now_s: float) -> float:
        """Estimate how many more seconds matchmaking will wait for the trailing swap."""
        round_s = self._step_rate.seconds_per_round()
        if self.trailing is None or round_s is None:
            return TRAILING_RETRY_S
        until_s = min(self._opened_s + TRAILING_SHARE * round_s, self.trailing.expected_s(now_s, self.goodput))
        return max(0.0, until_s - now_s)

    # swaps

    def _bind(self, via: Ask | Incoming, partner: str, mine: Boundary, theirs: Boundary) -> Bind:
        assert self.phase in (RoundPhase.SEEKING, RoundPhase.OFFERING), self.phase
        self.phase, self.partner, self.asked = RoundPhase.SWAPPING, partner, None
        self.unreachable.discard(partner)
        self._pairing.began(partner)
        return Bind(via, partner, mine, theirs)

    def swap_began(self, bind: Bind, swap: SwapHandle, now_s: float) -> tuple[ActiveSwap, list[Action]]:
        """Record the start of a swap. The driver calls this while it performs the `Bind`."""
        assert self.opening is not None
        self.active = ActiveSwap(
            bind.partner,
            self.index,
            self.opening.total_steps,
            bind.mine,
            bind.theirs,
            swap,
            began_s=now_s,
            boundary_s=self._boundary_s,
        )
        return self.active, self._release(now_s)

    def watches(self, active: ActiveSwap) -> bool:
        """Return whether this swap may still be abandoned for another. If so, the driver must call `swap_watched`."""
        return self.phase is RoundPhase.SWAPPING and active is self.active and self._boundary_s is None

    def swap_watched(self, active: ActiveSwap, now_s: float) -> list[Action]:
        """Abandon the swap if its early part will miss the boundary and there is still time for another partner."""
        left_s = self._step_rate.seconds_to_boundary(now_s) if self.watches(active) else None
        if left_s is None or not active.misses(now_s + left_s, now_s, self.goodput):
            return []
        return [
            Abandon(active.swap, TimedOut("the early part would arrive too late for this round", peer=active.partner))
        ]

    def committed(self, swap: SwapHandle, part: Part, now_s: float) -> None:
        """Record a part that both partners have verified. The round advances, or a late part becomes a correction."""
        if self.active and swap is self.active.swap:
            self.active.committed(part, now_s, self.goodput)
            if part is Part.EARLY:
                assert self.phase is RoundPhase.SWAPPING, self.phase
                has_late_part = any(plan.part is Part.LATE for plan in self.plans)
                self.phase = RoundPhase.EARLY if has_late_part else RoundPhase.DONE
                self._pairing.met(self.active.partner)
            else:
                assert self.phase is RoundPhase.EARLY, self.phase
                self.phase = RoundPhase.DONE
        elif self.trailing and swap is self.trailing.swap:
            trailing, self.trailing = self.trailing, None
            gradient = swap.pair(SectionName.OUTER_GRADIENT)
            self.corrections.append(Correction(gradient, trailing.partner, trailing.round, trailing.agreed))

    def swap_ended(self, active: ActiveSwap, error: PeerError, now_s: float) -> list[Action]:
        """Handle a failed swap. If its early part was not committed, the round looks for another partner."""
        is_trailing, is_active = active is self.trailing, active is self.active
        actions: list[Action] = []
        if is_trailing or (is_active and self.phase is not RoundPhase.CLOSED):
            kept = "nothing applied" if active.early_s is None else "early part kept"
            text = f"round {active.round} | swap with {named(active.partner)} failed: {error} | {kept}"
            actions.append(Report(text, error))
        if isinstance(error, CorruptPayload) and error.peer == active.partner:
            actions.append(Strike(active.partner, str(error)))
        if is_trailing:
            self.trailing = None
        if is_active:
            self._lose_partner(active, error, now_s)
        return actions

    def _lose_partner(self, active: ActiveSwap, error: PeerError, now_s: float) -> None:
        active.broken_off(now_s, self.goodput)
        if isinstance(error, Ended) and error.code is AbortCode.ABANDONED:
            # This is not a fault. The partner's boundary came first, and its next round may match.
            between = RefuseCode.BETWEEN_ROUNDS
            self._pairing.refused(active.partner, code=between, retry_after_s=POLL_S, now_s=now_s)
        else:
            self._pairing.failed(active.partner, now_s=now_s)
        self.reason = f"the swap with {named(active.partner)} failed: {error}"
        self.cause = LonelyCause.FAILED
        if self.phase is RoundPhase.SWAPPING:
            self._failed_link, self.active = active.link(now_s), None
            self.phase, self.partner = RoundPhase.SEEKING, ""
        elif self.phase is RoundPhase.EARLY:
            self.phase = RoundPhase.HALF

    # the end of a round

    def _close(self) -> None:
        self.phase, self.asked = RoundPhase.CLOSED, None

    def _drop_trailing(self) -> list[Action]:
        trailing, self.trailing = self.trailing, None
        reason = Unreachable("the late part did not arrive before the next boundary")
        return [Abandon(trailing.swap, reason)] if trailing else []

    def _outcome(self, now_s: float) -> tuple[Outcome, list[Action]]:
        active = self.active
        if active is not None and self.has_early_part:
            received, self.active = active.received(now_s, num_live=self._num_live()), None
            if self.phase is RoundPhase.DONE:
                return Swapped(received), []
            if self.phase is RoundPhase.EARLY:
                self.trailing = active
                return Half(received, "its outer gradient has not arrived yet"), []
            return Half(received, self.reason), []
        if self.phase is RoundPhase.SWAPPING and active is not None:
            self.active = None
            active.broken_off(now_s, self.goodput)
            error = Unreachable("the round ended before the early part was committed")
            reason = f"the early part of the swap with {named(active.partner)} was not complete at the boundary"
            return Alone(reason, LonelyCause.SLOW, active.link(now_s)), [Abandon(active.swap, error)]
        others = self._live()
        if not any(other.state == "training" for other in others):
            resting = ", ".join(sorted({other.state for other in others}))
            return Alone(
                f"no other live peer{f' is training (their states: {resting})' if resting else ''}",
                LonelyCause.NOBODY,
            ), []
        return Alone(self.reason or "no offer has been answered yet", self.cause, self._failed_link), []
