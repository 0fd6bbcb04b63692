"""The rounds of one peer as a table: each row is a sequence of events and the actions that the driver must take.

This peer is `beta`, so that ids of other peers sort before and after its own: `alpha` and `gamma`. A step reads
`event arguments -> actions [PHASE]`; the actions and the phase are checked if they are given. A row may start with
`PAIRED`, `EARLY` or `TRAILING`, which stand for the first steps of a row.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from noloco_p2p.errors import CorruptPayload, PeerError, Unreachable
from noloco_p2p.gossip.frames import (
    Abort,
    AbortCode,
    Accept,
    Boundary,
    Frame,
    Hello,
    Offer,
    Part,
    Ready,
    Refuse,
    RefuseCode,
    SectionName,
)
from noloco_p2p.gossip.outcome import Alone, Half, Outcome, Swapped
from noloco_p2p.gossip.pairing import Pairing
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
from noloco_p2p.gossip.round_state import LAST_LOOK_S, RoundState
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.gossip.sections import section_plans
from noloco_p2p.gossip.swap import Ended
from noloco_p2p.spec import CodecSpec

STEPS, STEP_S = 10, 2.0  # of a round, which lasts 20 s
EARLY_BYTES, LATE_BYTES = 200, 100
PLANS, EARLY_PLANS = (
    section_plans(CodecSpec(outer_gradient=codec), swap_momentum=False, num_elements=100) for codec in ("int8", "none")
)
HERE = Boundary(0, None, None, 0.0)
BOUNDARIES = {
    "near": HERE,
    "far": Boundary(0, 100.0, 20.0, 0.0),
    "long": Boundary(0, None, None, 0.0, inner_steps=1000),
    "stale": Boundary(500, None, None, 0.5, inner_steps=STEPS),
}


def hello(peer_id: str, *, layout: str = "model") -> Hello:
    return Hello(peer_id, "run", "digest", layout=layout)


class FakeSwap:
    """Counters that a test sets."""

    def __init__(self, late_bytes: int) -> None:
        self._late_bytes = late_bytes
        self.bytes_sent = self.bytes_received = self.bytes_moved = 0
        self.partner_staged_s: float | None = None

    def num_bytes(self, part: Part) -> int:
        return EARLY_BYTES if part is Part.EARLY else self._late_bytes

    def pair(self, name: SectionName) -> Any:
        return name

    def pairs(self) -> dict[SectionName, Any]:
        return {}

    def abandon(self, reason: PeerError) -> None:
        raise AssertionError("the state machine returns an action instead")


class Bench:
    """Feeds one RoundState; each event returns its actions in words."""

    def __init__(self, own_id: str = "beta", *, seed: int = 0) -> None:
        self.now_s = 0.0
        self.others = ["alpha", "gamma"]
        self.unlisted: list[str] = []
        self.step_rate = StepRate(STEPS)
        self.state = RoundState(
            hello=lambda: hello(own_id),
            live=self._live,
            num_live=lambda: len(self.others) + 1,
            step_rate=self.step_rate,
            pairing=Pairing(random.Random(seed)),
        )
        self.plans = PLANS
        self.rounds = 0
        self.asked: Ask | None = None
        self.incoming: dict[str, Incoming] = {}
        self.swaps: dict[str, Any] = {}

    def _live(self) -> list[Candidate]:
        peers = [peer.partition(":") for peer in self.others]
        return [Candidate(peer, address=peer, state=state or "training") for peer, _, state in peers]

    def words(self, actions: list[Action]) -> str:
        return ", ".join(filter(None, (self._word(action) for action in actions)))

    def _word(self, action: Action) -> str:
        match action:
            case Bind(_, partner):
                active, more = self.state.swap_began(action, self._swap(), self.now_s)
                self.swaps[partner] = active
                return ", ".join(filter(None, [f"swap with {partner}", self.words(more)]))
            case Reply(to, refuse):
                return f"refuse {to.offer.hello.peer_id} {refuse.code.name}"
            case Abandon(swap, _):
                return f"abandon {next(name for name, active in self.swaps.items() if active.swap is swap)}"
            case Strike(peer_id, _):
                return f"strike {peer_id}"
            case CompareModels(candidate, _):
                return f"compare with {candidate.peer_id}"
            case Report():
                return "report"

    def _swap(self) -> FakeSwap:
        return FakeSwap(LATE_BYTES if self.plans is PLANS else 0)

    # the peers around it, and time

    def no_late_part(self) -> None:
        """Leave out the late part of all swaps."""
        self.plans = EARLY_PLANS

    def at(self, seconds: str) -> None:
        self.now_s = float(seconds)

    def live(self, *peers: str) -> None:
        self.others = list(peers)

    def unlist(self, peer: str) -> None:
        self.unlisted.append(peer)

    def train(self, num_steps: str) -> None:
        """Take whole inner steps of STEP_S each."""
        for _ in range(int(num_steps)):
            self.now_s += STEP_S
            self.step_rate.step(self.now_s)

    def goodput(self, bytes_per_s: str) -> None:
        for _ in range(3):
            self.state.goodput.note(EARLY_BYTES, EARLY_BYTES / float(bytes_per_s))

    def moved(self, peer: str, num_bytes: str) -> None:
        self.swaps[peer].swap.bytes_moved = int(num_bytes)

    def peer_is(self, state: str) -> None:
        self.state.peer_state = state

    def was_refused_as_stale(self) -> str:
        return "yes" if self.state.was_refused_as_stale else "no"

    def hurry(self) -> None:
        self.state.is_leaving = True

    # events

    def open(self, patience_s: str = "0") -> str:
        opening = Opening(self.rounds, 0.0, 1000, STEPS, {}, float(patience_s))
        self.rounds += 1
        self.step_rate.open_round(self.now_s)
        return self.words(self.state.open(opening, self.plans, self.now_s))

    def seek(self) -> str:
        match self.state.seek(self.now_s):
            case Ask(candidate) as ask:
                self.asked = ask
                return f"ask {candidate.peer_id}"
            case Wait():
                return "wait"
            case None:
                return "nothing"

    def accepted(self, boundary: str = "near", *, by: str = "", layout: str = "model") -> str:
        assert self.asked is not None
        return self._answered(Accept(hello(by or self.asked.candidate.peer_id, layout=layout), BOUNDARIES[boundary]))

    def accepted_by_another(self) -> str:
        return self.accepted(by="delta")

    def accepted_with_another_model(self) -> str:
        return self.accepted(layout="another")

    def answered_with_nonsense(self) -> str:
        return self._answered(Ready(Part.EARLY))

    def refused(self, code: str, retry_after_s: str = "5") -> str:
        return self._answered(Refuse(RefuseCode[code], "no", float(retry_after_s)))

    def unreachable(self) -> str:
        return self._answered(Unreachable("it is gone"))

    def _answered(self, answer: Frame | PeerError) -> str:
        assert self.asked is not None
        mine = self.state.standing(self.now_s)
        return self.words(self.state.offer_answered(self.asked, answer, mine=mine, now_s=self.now_s))

    def offer_from(self, peer: str, boundary: str = "near", layout: str = "model") -> str:
        self.incoming[peer] = Incoming(
            Offer(hello(peer, layout=layout), bytes(16), BOUNDARIES[boundary]), peer not in self.unlisted
        )
        return self.words(self.state.offer_came(self.incoming[peer], self.now_s))

    def hold_expires(self, peer: str) -> str:
        return self.words(self.state.hold_expired(self.incoming[peer], self.now_s))

    def offer_gone(self, peer: str) -> None:
        self.state.offer_gone(self.incoming[peer])

    def early(self, peer: str) -> None:
        self.state.committed(self.swaps[peer].swap, Part.EARLY, self.now_s)

    def late(self, peer: str) -> None:
        self.state.committed(self.swaps[peer].swap, Part.LATE, self.now_s)

    def breaks(self, peer: str, how: str = "cut") -> str:
        errors = {
            "cut": Unreachable("cut", peer=peer),
            "corrupt": CorruptPayload("not finite", peer=peer),
            "own": CorruptPayload("my own"),
            "ended": Ended(Abort(AbortCode.ABANDONED, "my boundary came"), peer=peer),
        }
        return self.words(self.state.swap_ended(self.swaps[peer], errors[how], self.now_s))

    def watch(self, peer: str) -> str:
        return self.words(self.state.swap_watched(self.swaps[peer], self.now_s))

    def boundary(self) -> str:
        return self.words(self.state.reach_boundary(self.now_s))

    def cannot_stage(self) -> str:
        return self.words(self.state.cannot_stage("it is not finite", self.now_s))

    def is_over(self, wait_s: str) -> str:
        return "yes" if self.state.is_over(self.now_s, until_s=self.now_s + float(wait_s)) else "no"

    def end(self) -> str:
        return self._ended(*self.state.end(self.now_s))

    def withdraw(self) -> str:
        return self._ended(*self.state.withdraw(self.now_s))

    def _ended(self, outcome: Outcome, actions: list[Action]) -> str:
        match outcome:
            case Swapped(received):
                words = f"swapped with {received.partner}"
            case Half(received):
                words = f"half with {received.partner}"
            case Alone(_, cause, link):
                words = f"alone {cause}{' measured' if link else ''}"
        return ", ".join(filter(None, [words, self.words(actions)]))

    def correction(self, before: str) -> str:
        correction = self.state.take_correction(int(before))
        return f"of {correction.partner} in round {correction.round}" if correction else "none"

    def corrected(self) -> None:
        self.state.corrected()

    def forget(self) -> str:
        return self.words(self.state.forget())

    def stop(self) -> str:
        return self.words(self.state.stop(self.now_s))

    def step(self, text: str) -> None:
        match = re.fullmatch(r"(?P<event>[^\[]*?)(?: -> (?P<actions>[^\[]*?))? ?(?:\[(?P<phase>\w+)\])?", text)
        assert match, text
        name, *arguments = match["event"].split()
        did = getattr(self, name)(*arguments)
        if match["actions"] is not None:
            assert (did or "nothing") == match["actions"], f"{text}: {did}"
        if match["phase"]:
            assert self.state.phase.name == match["phase"], f"{text}: {self.state.phase}"


PAIRED = ["live alpha", "open", "seek -> ask alpha", "accepted -> swap with alpha [SWAPPING]"]
EARLY = [*PAIRED, "early alpha [EARLY]"]
TRAILING = [*EARLY, "boundary", "end -> half with alpha [CLOSED]", "live gamma", "open [SEEKING]"]
BEGINNINGS = {"PAIRED": PAIRED, "EARLY": EARLY, "TRAILING": TRAILING}

TABLE = f"""

# own offers

an offer is accepted and both parts come
    EARLY; boundary; late alpha [DONE]; end -> swapped with alpha
a refused offer is followed by one to another peer
    live alpha; open; seek -> ask alpha [OFFERING]; refused TAKEN -> nothing [SEEKING]; live alpha gamma;
    seek -> ask gamma
a peer that refuses for a moment is asked again, and not at once
    live alpha; open; seek -> ask alpha; refused BUSY 0.1 -> nothing; seek -> wait; at 1; seek -> ask alpha
an unreachable peer is reported, and left alone for a while
    live alpha; open; seek -> ask alpha; unreachable -> report [SEEKING]; seek -> wait
a peer of another model is compared
    live alpha; open; seek -> ask alpha; refused OTHER_MODEL -> report, compare with alpha; end -> alone refused
a refusal for its place in the run is remembered
    live alpha; open; seek; was_refused_as_stale -> no; refused STALE; was_refused_as_stale -> yes
an acceptance with another model is none
    live alpha; open; seek; accepted_with_another_model -> report, compare with alpha [SEEKING]
an acceptance by another peer is none
    live alpha; open; seek; accepted_by_another -> report [SEEKING]
an answer that is neither yes nor no
    live alpha; open; seek; answered_with_nonsense -> report [SEEKING]
an acceptance of a round longer than the run allows
    live alpha; open; seek; accepted long -> report
an acceptance by a peer that is too far away
    live alpha; open; seek; accepted stale -> report
an answer after the round ended changes nothing
    live alpha; open; seek; boundary; end -> alone no_answer; open; accepted -> nothing [SEEKING];
    refused BUSY -> nothing [SEEKING]
the round ends while an offer is out
    live alpha; open; seek; boundary [OFFERING]; end -> alone no_answer

# offers of other peers

an offer is accepted while this peer seeks
    open; offer_from gamma -> swap with gamma [SWAPPING]
between rounds
    offer_from gamma -> refuse gamma BETWEEN_ROUNDS
with a partner
    PAIRED; offer_from gamma -> refuse gamma TAKEN [SWAPPING]
with an early part
    EARLY; offer_from gamma -> refuse gamma TAKEN [EARLY]
while paused
    open; peer_is paused; offer_from gamma -> refuse gamma NOT_TRAINING [SEEKING]
from the own id
    open; offer_from beta -> refuse beta MALFORMED
from another model
    open; offer_from gamma near another -> refuse gamma OTHER_MODEL
half a round away
    open; train 1; offer_from gamma far -> refuse gamma TOO_FAR
of a round that is too long
    open; offer_from gamma long -> refuse gamma MALFORMED
from a peer without a live record
    open; unlist gamma; offer_from gamma -> refuse gamma UNLISTED [SEEKING]
of a peer that has had its share
    live alpha gamma; open; offer_from gamma -> swap with gamma; breaks gamma; offer_from gamma -> swap with gamma;
    breaks gamma; at 15; offer_from gamma -> refuse gamma OVER_SHARE [SEEKING]
of a peer that has had its share and was drawn: accepted, as the offers crossed
    live alpha gamma; open; offer_from gamma; breaks gamma; offer_from gamma; breaks gamma; at 15; live gamma;
    seek -> ask gamma; live alpha gamma; offer_from gamma -> swap with gamma
refused as over the share: another peer is asked
    live alpha; open; seek -> ask alpha; refused OVER_SHARE 5 -> nothing; live alpha gamma; at 1; seek -> ask gamma
far ahead in the run
    open; offer_from gamma stale -> refuse gamma STALE

# crossed and held offers

crossed with a lower id: the own offer stands
    live alpha; open; seek -> ask alpha; offer_from alpha -> refuse alpha CROSSED [OFFERING];
    accepted -> swap with alpha
crossed with a higher id: its offer stands
    live gamma; open; seek -> ask gamma; offer_from gamma -> swap with gamma [SWAPPING];
    refused CROSSED -> nothing [SWAPPING]; early gamma [EARLY]
crossed with a higher id that accepted, too: the overtaken stream is left
    live gamma; open; seek; offer_from gamma -> swap with gamma; accepted -> nothing [SWAPPING]
an offer of a lower id is refused while an own one is out
    live gamma; open; seek -> ask gamma; offer_from alpha -> refuse alpha BUSY
an offer of a higher id is held, and accepted when the own one is refused
    live alpha; open; seek -> ask alpha; offer_from gamma -> nothing; refused TAKEN -> swap with gamma [SWAPPING]
a held offer is refused when the own one is accepted
    live alpha; open; seek; offer_from gamma -> nothing; accepted -> swap with alpha, refuse gamma TAKEN
of two held offers the first is accepted
    live alpha; open; seek; offer_from gamma -> nothing; offer_from delta -> nothing;
    unreachable -> report, swap with gamma, refuse delta TAKEN
an offer is held for a while only
    live alpha; open; seek; offer_from gamma -> nothing; hold_expires gamma -> refuse gamma BUSY;
    hold_expires gamma -> nothing; refused TAKEN -> nothing [SEEKING]
a held offer whose caller went away is forgotten
    live alpha; open; seek; offer_from gamma -> nothing; offer_gone gamma; refused TAKEN -> nothing [SEEKING]
a held offer is refused when the round ends
    live alpha; open; seek; offer_from gamma -> nothing; boundary; end -> alone no_answer, refuse gamma BETWEEN_ROUNDS
a held offer is refused when this peer stops
    live alpha; open; seek; offer_from gamma; stop -> refuse gamma BETWEEN_ROUNDS [CLOSED]

# the early part and the boundary

the early part comes before the boundary
    EARLY; boundary; is_over 10 -> no
the early part comes after the boundary
    PAIRED; boundary [SWAPPING]; early alpha [EARLY]; late alpha [DONE]
the early part never comes
    PAIRED; boundary; is_over 10 -> no; end -> alone slow measured, abandon alpha [CLOSED]
the round has all it can get
    EARLY; boundary; late alpha; is_over 10 -> yes
what cannot come in time is not waited for
    EARLY; goodput 1; boundary; is_over 10 -> yes
what can come in time is waited for
    EARLY; goodput 100; boundary; is_over 10 -> no
a partner is found at the boundary
    live alpha; open; boundary [SEEKING]; is_over 10 -> no; offer_from alpha -> swap with alpha; is_over 10 -> no

# a run whose swaps have no late part

the early part is all, and nothing is waited for
    no_late_part; PAIRED; early alpha [DONE]; boundary; is_over 10 -> yes; end -> swapped with alpha [CLOSED]
an early part that is not here at the boundary is given up
    no_late_part; PAIRED; boundary; end -> alone slow measured, abandon alpha [CLOSED]
nothing trails into the next round
    no_late_part; PAIRED; early alpha; boundary; end -> swapped with alpha; correction 1 -> none; live gamma; open;
    seek -> ask gamma
another partner is refused
    no_late_part; PAIRED; early alpha; offer_from gamma -> refuse gamma TAKEN [DONE]
withdrawn, the round keeps its swap
    no_late_part; PAIRED; early alpha; withdraw -> swapped with alpha [CLOSED]
a swap that fails before its early part gives way to another
    no_late_part; PAIRED; breaks alpha -> report [SEEKING]; live alpha gamma; seek -> ask gamma
a closing round waits for the early part, and not for the boundary of the partner
    no_late_part; live alpha; goodput 100; open 30; seek; accepted far -> swap with alpha; boundary;
    is_over 1 -> yes; is_over 3 -> no; early alpha; is_over 3 -> yes
a late part would wait for that boundary
    live alpha; goodput 100; open 30; seek; accepted far -> swap with alpha; boundary; is_over 10 -> yes

# the late part trails

a late part after its boundary becomes a correction
    TRAILING; late alpha; correction 1 -> of alpha in round 0; corrected; correction 1 -> none; seek -> ask gamma
a trailing late part is dropped at the next boundary
    TRAILING; boundary -> abandon alpha; breaks alpha -> nothing; end -> alone no_answer
a trailing swap that breaks is reported, and no loss for this round
    TRAILING; breaks alpha -> report [SEEKING]; seek -> ask gamma
matchmaking waits for the trailing swap
    TRAILING; seek -> wait; offer_from gamma -> refuse gamma BUSY; late alpha; seek -> wait;
    correction 1 -> of alpha in round 0; seek -> wait; corrected; seek -> ask gamma
a trailing swap that takes long shares the link
    EARLY; train 10; boundary; end -> half with alpha; live gamma; open; seek -> wait; train 4; seek -> ask gamma
a correction is not given while vectors travel
    EARLY; train 10; boundary; end; live gamma; open; train 4; seek; accepted -> swap with gamma; late alpha;
    correction 1 -> none; early gamma; correction 1 -> of alpha in round 0
a correction is not given while an offer is out, which may be accepted in a moment
    EARLY; train 10; boundary; end; live gamma; open; train 4; seek -> ask gamma; late alpha;
    correction 1 -> none; accepted -> swap with gamma; early gamma; correction 1 -> of alpha in round 0
a correction of this round waits for the next
    TRAILING; late alpha; correction 0 -> none
a correction whose end was never reported ends with its round
    TRAILING; late alpha; correction 1 -> of alpha in round 0; seek -> wait; boundary; end; open; seek -> ask gamma
vectors that were replaced take no late part
    EARLY; boundary; end -> half with alpha; forget -> abandon alpha; late alpha; correction 1 -> none
corrections are forgotten with the vectors
    TRAILING; late alpha; forget -> nothing; correction 1 -> none

# withdrawing

withdraw without a partner
    live alpha; open; withdraw -> alone no_answer [CLOSED]
withdraw with an offer out
    live alpha; open; seek; withdraw -> alone no_answer; accepted -> nothing [CLOSED]
withdraw while the early part travels
    PAIRED; withdraw -> alone slow measured, abandon alpha [CLOSED]
withdraw with an early part
    EARLY; withdraw -> half with alpha, abandon alpha [CLOSED]
withdraw after the late part failed
    EARLY; breaks alpha; withdraw -> half with alpha
withdraw without a partner leaves the trailing swap
    TRAILING; withdraw -> alone no_answer; late alpha; correction 1 -> of alpha in round 0
withdraw with an early part ends the trailing swap, too
    EARLY; train 10; boundary; end; live gamma; open; train 4; seek; accepted -> swap with gamma; early gamma;
    withdraw -> half with gamma, abandon alpha, abandon gamma
withdraw between rounds
    live alpha; withdraw -> alone no_answer

# swaps that fail

a swap fails before its early part: another partner is sought
    PAIRED; breaks alpha -> report [SEEKING]; live alpha gamma; seek -> ask gamma; accepted -> swap with gamma
a swap fails before its early part, and nobody else is found
    PAIRED; breaks alpha -> report; boundary; end -> alone failed measured
a partner whose boundary came first may be asked again soon
    PAIRED; breaks alpha ended -> report [SEEKING]; seek -> wait; at 1; seek -> ask alpha
a swap fails after its early part
    EARLY; breaks alpha -> report [HALF]; boundary; is_over 10 -> yes; end -> half with alpha
a swap fails after its round
    PAIRED; boundary; end -> alone slow measured, abandon alpha; breaks alpha -> nothing
a partner that sends what no honest peer sends
    PAIRED; breaks alpha corrupt -> report, strike alpha
own vectors that cannot be sent are no fault of the partner
    PAIRED; breaks alpha own -> report
a swap that will miss the boundary gives way to another
    live alpha; goodput 100; open; train 2; seek; accepted -> swap with alpha; watch alpha -> nothing; train 2;
    moved alpha 20; watch alpha -> abandon alpha; breaks alpha -> report [SEEKING]
a swap that is slow and in time goes on
    live alpha; goodput 100; open; train 2; seek; accepted; train 2; moved alpha 150; watch alpha -> nothing
after the boundary no swap gives way
    PAIRED; goodput 100; train 4; boundary; watch alpha -> nothing

# the own gradient cannot be sent

no gradient, no partner
    live alpha; open; boundary; cannot_stage -> nothing [CLOSED]
no gradient while the early part travels
    PAIRED; boundary; cannot_stage -> abandon alpha [CLOSED]; breaks alpha own -> nothing; end -> alone failed
no gradient after the early part
    EARLY; boundary; cannot_stage -> abandon alpha [EARLY]; breaks alpha own -> report [HALF]; end -> half with alpha

# rounds in which nothing can come

nobody is there
    live; open; boundary -> nothing [CLOSED]; end -> alone nobody
nobody trains
    live alpha:paused gamma:done; open; boundary -> nothing [CLOSED]; end -> alone nobody
all have refused for this round
    live alpha; open; seek; refused TOO_FAR 60; boundary -> nothing [CLOSED]
nobody joins a round that ended for lack of hope
    live; open; boundary; offer_from gamma -> refuse gamma BETWEEN_ROUNDS
hope at the boundary ends after a last look
    live alpha; open; boundary; is_over 10 -> no; at {LAST_LOOK_S + 0.1}; is_over 10 -> yes
a closing round is patient
    live alpha; open 30; seek; refused TAKEN 20; boundary [SEEKING]; at 15; is_over 30 -> no; at 31; is_over 30 -> yes
a closing round prefers peers other than the last partner
    EARLY; boundary; late alpha; end -> swapped with alpha; live alpha gamma; open 30; seek -> ask gamma;
    refused TAKEN 20; seek -> wait
a peer that leaves waits for nobody
    EARLY; boundary; is_over 10 -> no; hurry; is_over 10 -> yes
a round whose outcome nobody took ends with the next opening
    PAIRED; open -> abandon alpha [SEEKING]; breaks alpha -> nothing [SEEKING]
a half round whose outcome nobody took leaves no late part
    EARLY; open -> abandon alpha [SEEKING]; late alpha; correction 9 -> none
a stop abandons both swaps
    EARLY; train 10; boundary; end; live gamma; open; train 4; seek; accepted -> swap with gamma;
    stop -> abandon alpha, abandon gamma [CLOSED]; seek -> nothing
"""


def rows() -> dict[str, list[str]]:
    """Parse the table into a mapping from titles to steps."""
    found: dict[str, list[str]] = {}
    for line in TABLE.splitlines():
        if line.startswith("    "):
            for step in line.strip(" ;").split("; "):
                list(found.values())[-1].extend(BEGINNINGS.get(step, [step]))
        elif line and not line.startswith("#"):
            assert line not in found, line
            found[line] = []
    return found


@pytest.mark.parametrize("steps", rows().values(), ids=rows())
def test_a_row(steps: list[str]) -> None:
    bench = Bench()
    for step in steps:
        bench.step(step)


def test_every_event_has_a_row() -> None:
    """Public methods of RoundState that change it are events, and the table must call each of them."""
    used = {step.split()[0] for steps in rows().values() for step in steps}
    called = "".join(inspect.getsource(getattr(Bench, name)) for name in used | {"_answered", "_word"})
    events = [name for name in vars(RoundState) if not name.startswith("_") and callable(getattr(RoundState, name))]
    queries = {"waits_for_trailing", "is_hopeless", "watches", "offer_dropped"}  # helpers of events, except the last
    assert not [name for name in events if f"self.state.{name}(" not in called and name not in queries]


def test_an_offer_that_the_driver_drops_is_not_out_any_more() -> None:
    """The task of the offer has failed by a bug; offers that waited for its answer are answered."""
    bench = Bench()
    for step in ["live alpha", "open", "seek", "offer_from gamma -> nothing"]:
        bench.step(step)
    assert bench.asked is not None
    assert bench.words(bench.state.offer_dropped(bench.asked, 0.0)) == "swap with gamma"


def test_taken_says_when_the_next_round_begins() -> None:
    bench = Bench()
    for step in [*PAIRED, "train 3"]:
        bench.step(step)
    (reply,) = bench.state.offer_came(Incoming(Offer(hello("gamma"), bytes(16), HERE), True), bench.now_s)
    assert isinstance(reply, Reply)
    assert reply.refuse.retry_after_s == pytest.approx(7 * STEP_S)


def test_the_seconds_of_a_boundary_too_far_are_given() -> None:
    bench = Bench()
    for step in ["open", "train 5"]:  # 10 s left in a round of 20 s
        bench.step(step)
    (reply,) = bench.state.offer_came(Incoming(Offer(hello("gamma"), bytes(16), BOUNDARIES["far"]), True), bench.now_s)
    assert isinstance(reply, Reply)
    assert "78.00 s" in reply.refuse.sentence


def steps(text: str, *, seed: int = 0) -> Bench:
    bench = Bench(seed=seed)
    for step in text.split("; "):
        bench.step(step)
    return bench


def test_a_peer_that_stays_unreachable_is_reported_loudly_once() -> None:
    """The next warning comes only after a swap with the peer has started."""
    bench, levels = steps("live alpha; open"), []
    for at_s in (0, 11, 22):
        bench.step(f"at {at_s}")
        if at_s == 22:
            bench.step("offer_from alpha -> swap with alpha")
            bench.step("breaks alpha")
            bench.step("at 33")
        bench.step("seek -> ask alpha")
        assert bench.asked is not None
        error = Unreachable("it is gone")
        (report,) = bench.state.offer_answered(bench.asked, error, mine=HERE, now_s=bench.now_s)
        assert isinstance(report, Report)
        levels.append(report.level)
    assert levels == [logging.WARNING, logging.DEBUG, logging.WARNING]


def test_the_last_partner_is_drawn_only_when_nobody_else_is_here() -> None:
    bench = steps("live alpha; open; seek; accepted; early alpha; boundary; late alpha; end; live alpha gamma")
    for _ in range(20):
        bench.step("open")
        bench.step("seek -> ask gamma")
        bench.step("boundary")
        bench.step("end")


def test_a_peer_that_was_turned_away_is_asked_first_in_the_next_round() -> None:
    """It was refused as this round ends before its own."""
    theirs = Boundary(0, 19.0, 20.0, 0.0)
    text = "live alpha gamma delta epsilon; open; train 1; offer_from alpha; early alpha; train 2"
    for seed in range(20):
        bench = steps(text, seed=seed)
        (reply,) = bench.state.offer_came(Incoming(Offer(hello("delta"), bytes(16), theirs), True), bench.now_s)
        assert isinstance(reply, Reply)
        for step in ("boundary", "end", "forget", "open", "seek -> ask delta"):
            bench.step(step)


def test_a_swap_tells_the_lateness_of_the_partner_from_the_transfer() -> None:
    bench = steps("live alpha; open; at 1; seek; accepted; at 5; early alpha; at 10; boundary; at 13")
    bench.swaps["alpha"].swap.partner_staged_s = 12.0
    bench.step("late alpha")
    bench.step("at 14")
    outcome, _ = bench.state.end(bench.now_s)
    assert isinstance(outcome, Swapped)
    received = outcome.received
    assert (received.seconds, received.lateness_s, received.transfer_s) == (13.0, 2.0, 1.0)


def test_without_a_late_part_nobody_was_late() -> None:
    bench = steps("no_late_part; live alpha; open 30; seek; accepted; at 1; boundary; at 5; early alpha; at 6")
    outcome, _ = bench.state.end(bench.now_s)
    assert isinstance(outcome, Swapped)
    assert (outcome.received.lateness_s, outcome.received.transfer_s, outcome.received.link.late_s) == (0.0, 0.0, 0.0)
    assert outcome.received.link.early_s == 5.0


@pytest.mark.parametrize("how", ["breaks alpha", "withdraw"])
def test_an_early_part_that_did_not_come_is_a_measurement_of_the_link(how: str) -> None:
    bench = steps("live alpha; open; seek; accepted; at 10; moved alpha 50")
    assert bench.state.goodput.seconds_for(100) is None
    bench.step(how)
    assert bench.state.goodput.seconds_for(100) == pytest.approx(2 * 100 * 10 / 50)


# any order


class RoundMachine(RuleBasedStateMachine):
    """All calls that a driver may make to a round, in any order."""

    plans = PLANS

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.bench.plans = self.plans
        self.state = self.bench.state
        self.bench.open()
        self.committed: list[str] = []

    @rule(seconds=st.sampled_from([0.0, 0.05, 1.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.now_s += seconds

    @rule()
    def matchmaking_goes_on(self) -> None:
        self.bench.seek()

    @precondition(lambda self: self.bench.asked is not None)
    @rule(answer=st.sampled_from(["accepted", "unreachable", "refused BUSY 0.1", "refused TAKEN", "refused CROSSED"]))
    def an_own_offer_is_answered(self, answer: str) -> None:
        self.bench.step(answer)

    @rule(peer=st.sampled_from(["alpha", "gamma", "delta"]), boundary=st.sampled_from(["near", "stale"]))
    def an_offer_comes(self, peer: str, boundary: str) -> None:
        before = self.state.phase
        did = self.bench.offer_from(peer, boundary)
        if did.startswith("swap with"):
            assert boundary == "near"
            assert before in (RoundPhase.SEEKING, RoundPhase.OFFERING)
        elif not did:
            assert before is RoundPhase.OFFERING, "held for no reason"

    @precondition(lambda self: self.bench.incoming)
    @rule()
    def a_hold_expires(self) -> None:
        for peer in self.bench.incoming:
            self.bench.hold_expires(peer)

    @precondition(lambda self: self.state.phase is RoundPhase.SWAPPING)
    @rule()
    def the_early_part_is_committed(self) -> None:
        self.bench.early(self.state.partner)
        self.committed.append(self.state.partner)

    @precondition(lambda self: self.state.phase is RoundPhase.EARLY)
    @rule()
    def the_late_part_is_committed(self) -> None:
        self.bench.late(self.state.partner)

    @precondition(lambda self: self.state.phase in (RoundPhase.SWAPPING, RoundPhase.EARLY))
    @rule(how=st.sampled_from(["cut", "ended", "corrupt"]))
    def the_swap_fails(self, how: str) -> None:
        self.bench.breaks(self.state.partner, how)

    @precondition(lambda self: self.state.trailing is not None)
    @rule(is_cut=st.booleans())
    def the_trailing_swap_ends(self, is_cut: bool) -> None:
        trailing, now_s = self.state.trailing, self.bench.now_s
        assert trailing is not None
        if is_cut:
            self.state.swap_ended(trailing, Unreachable("cut"), now_s)
        else:
            self.state.committed(trailing.swap, Part.LATE, now_s)
        assert self.state.trailing is None

    @rule(how=st.sampled_from(["end", "withdraw"]), is_open=st.booleans())
    def the_round_ends(self, how: str, is_open: bool) -> None:
        phase = self.state.phase
        if how == "end":
            self.bench.boundary()
        did = getattr(self.bench, how)()
        if phase is not RoundPhase.CLOSED:
            assert did.startswith("alone") == (not self.committed), did
        self.committed = []
        assert self.state.phase is RoundPhase.CLOSED
        assert not self.state._held
        if is_open:
            self.bench.open()

    @invariant()
    def at_most_one_partner_is_committed(self) -> None:
        assert len(self.committed) <= 1
        if self.state.has_early_part:
            assert [self.state.partner] == self.committed

    @invariant()
    def what_is_out_fits_the_phase(self) -> None:
        assert (self.state.asked is not None) == (self.state.phase is RoundPhase.OFFERING)
        assert not self.state._held or self.state.phase is RoundPhase.OFFERING, "a held offer would wait for nothing"
        if self.state.phase is RoundPhase.SWAPPING or self.state.has_early_part:
            assert self.state.active is not None


class EarlyRoundMachine(RoundMachine):
    """The same calls in a run whose swaps have no late part."""

    plans = EARLY_PLANS

    @invariant()
    def nothing_is_left_of_a_round(self) -> None:
        assert self.state.phase not in (RoundPhase.EARLY, RoundPhase.HALF)
        assert self.state.trailing is None


TestRoundMachine = RoundMachine.TestCase
TestRoundMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestEarlyRoundMachine = EarlyRoundMachine.TestCase
TestEarlyRoundMachine.settings = TestRoundMachine.settings


# Crossed offers. On each side the offer leaves at once, as both are seeking, and two messages arrive: the other's
# offer, and the answer to its own. An answer exists only after the offer has arrived. All orders are tried.


def crossed(first: str, second: str, order: tuple[tuple[str, str], ...]) -> dict[str, bool]:
    """Return which of the two streams survive when the events come in `order`; "first" is opened by `first`."""
    benches, other = {first: Bench(first), second: Bench(second)}, {first: second, second: first}
    for peer, bench in benches.items():
        bench.others = [other[peer]]
        bench.open()
        bench.seek()
    answers: dict[str, str] = {}
    for kind, opener in order:
        acceptor, bench = other[opener], benches[opener]
        if kind == "offer":
            answers[opener] = benches[acceptor].offer_from(opener)
        elif answers[opener].startswith("swap with"):
            if not bench.accepted():  # overtaken: the opener closes its stream, and the acceptor loses its swap
                benches[acceptor].breaks(opener)
                answers[opener] = ""
        else:
            bench.refused(answers[opener].rpartition(" ")[2], "0.1")
    return {opener: answers[opener].startswith("swap with") for opener in (first, second)}


@given(ids=st.lists(st.text("abcd", min_size=1, max_size=8), min_size=2, max_size=2, unique=True))
@settings(max_examples=30, deadline=None)
def test_of_two_crossed_offers_exactly_one_stream_stands_in_every_order(ids: list[str]) -> None:
    first, second = ids
    events = [(kind, peer) for kind in ("offer", "answer") for peer in ids]
    for order in itertools.permutations(events):
        if all(order.index(("offer", peer)) < order.index(("answer", peer)) for peer in ids):
            stands = crossed(first, second, order)
            assert stands == {first: first > second, second: second > first}, order
