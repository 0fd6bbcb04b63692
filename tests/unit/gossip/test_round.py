"""One round of one peer: at most one partner, decisions that change nothing, and crossed offers that leave one swap."""

from __future__ import annotations

import copy
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from noloco_p2p.gossip.frames import Boundary, Hello, Offer, Refuse, RefuseCode
from noloco_p2p.gossip.round import Phase, Round

HERE = Boundary(0, 10.0, 20.0, 0.0)
FAR = Boundary(0, 100.0, 20.0, 0.0)
PEERS = ["alpha", "beta", "gamma"]


def offer(peer_id: str, *, boundary: Boundary = HERE) -> Offer:
    return Offer(Hello(peer_id, "run", "digest"), bytes(16), boundary)


class RoundMachine(RuleBasedStateMachine):
    """What a runner may do to a round, in any order; `beta` is this peer, so that both orders of ids are met."""

    def __init__(self) -> None:
        super().__init__()
        self.round = Round(0, own_id="beta")
        self.committed: list[str] = []

    @precondition(lambda self: self.round.wants_partner)
    @rule(peer=st.sampled_from(["alpha", "gamma"]))
    def make_an_offer(self, peer: str) -> None:
        self.round.offer_to(peer)

    @precondition(lambda self: self.round.phase is Phase.OFFERING)
    @rule()
    def offer_is_refused(self) -> None:
        self.round.offer_failed()
        assert self.round.wants_partner

    @precondition(lambda self: self.round.phase is Phase.OFFERING)
    @rule()
    def offer_is_accepted(self) -> None:
        target = self.round.target
        self.round.bind(target)
        assert (self.round.partner, self.round.target) == (target, "")

    @rule(peer=st.sampled_from(["alpha", "gamma"]), boundary=st.sampled_from([HERE, FAR]))
    def an_offer_comes(self, peer: str, boundary: Boundary) -> None:
        before = vars(copy.copy(self.round))
        answer = self.round.answer(offer(peer, boundary=boundary), mine=HERE)
        assert vars(self.round) == before, "answer() decides and changes nothing"
        if answer is None:
            assert boundary is HERE
            assert self.round.phase in (Phase.SEEKING, Phase.OFFERING)
            assert self.round.target in ("", peer), "an offer of mine is out to somebody else"
            self.round.bind(peer)
        else:
            assert answer.sentence
            assert answer.retry_after_s > 0

    @precondition(lambda self: self.round.phase is Phase.SWAPPING)
    @rule()
    def early_part_is_committed(self) -> None:
        self.round.commit_early()
        self.committed.append(self.round.partner)

    @precondition(lambda self: self.round.phase is Phase.EARLY)
    @rule()
    def late_part_is_committed(self) -> None:
        self.round.commit_late()

    @precondition(lambda self: self.round.partner)
    @rule()
    def the_swap_fails(self) -> None:
        self.round.swap_failed()

    @rule()
    def the_round_is_collected(self) -> None:
        self.round.close()

    @invariant()
    def at_most_one_partner_is_committed(self) -> None:
        assert len(self.committed) <= 1
        if self.round.early_committed:
            assert [self.round.partner] == self.committed

    @invariant()
    def a_target_is_there_exactly_while_an_offer_is_out(self) -> None:
        if self.round.phase is not Phase.CLOSED:
            assert bool(self.round.target) == (self.round.phase is Phase.OFFERING)


TestRoundMachine = RoundMachine.TestCase
TestRoundMachine.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize(
    ("phase", "code"),
    [
        (Phase.SEEKING, None),
        (Phase.SWAPPING, RefuseCode.TAKEN),
        (Phase.EARLY, RefuseCode.TAKEN),
        (Phase.DONE, RefuseCode.TAKEN),
        (Phase.HALF, RefuseCode.TAKEN),
        (Phase.CLOSED, RefuseCode.BETWEEN_ROUNDS),
    ],
)
def test_every_phase_has_its_answer(phase: Phase, code: RefuseCode | None) -> None:
    round_ = Round(0, own_id="beta")
    round_.phase = phase
    answer = round_.answer(offer("alpha"), mine=HERE)
    assert (answer.code if answer else None) is code


def test_taken_says_when_the_next_round_begins() -> None:
    round_ = Round(0, own_id="beta")
    round_.bind("gamma")
    answer = round_.answer(offer("alpha"), mine=HERE)
    assert answer is not None
    assert answer.retry_after_s == HERE.seconds_to_boundary


def test_a_peer_half_a_round_away_is_refused_with_the_seconds() -> None:
    answer = Round(0, own_id="beta").answer(offer("alpha", boundary=FAR), mine=HERE)
    assert answer is not None
    assert answer.code is RefuseCode.TOO_FAR
    assert "78.00 s" in answer.sentence


# Crossed offers. Each side: its offer goes out (at once, as both are seeking), and two messages reach it: the other's
# offer, and the answer to its own. An answer exists only after the offer reached the other side. All orders are tried.


def crossed(first: str, second: str, order: tuple[tuple[str, str], ...]) -> dict[str, bool]:
    """Which of the two streams ("first" opened by `first`) stand when the events come in `order`."""
    rounds = {first: Round(0, own_id=first), second: Round(0, own_id=second)}
    other = {first: second, second: first}
    for peer, round_ in rounds.items():
        round_.offer_to(other[peer])
    answers: dict[str, Refuse | None] = {}
    stands = {first: False, second: False}
    for kind, opener in order:
        acceptor = other[opener]
        if kind == "offer":
            answers[opener] = rounds[acceptor].answer(offer(opener), mine=HERE)
            if answers[opener] is None:
                rounds[acceptor].bind(opener)
        elif answers[opener] is None:
            if rounds[opener].is_offering_to(acceptor):
                rounds[opener].bind(acceptor)
                stands[opener] = True
            else:  # overtaken: the opener closes its stream, and the acceptor loses its swap
                rounds[acceptor].swap_failed()
        elif rounds[opener].is_offering_to(acceptor):
            rounds[opener].offer_failed()
    return stands


@given(ids=st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=2, unique=True))
@settings(max_examples=50, deadline=None)
def test_of_two_crossed_offers_exactly_one_stream_stands_in_every_order(ids: list[str]) -> None:
    first, second = ids
    events = [(kind, peer) for kind in ("offer", "answer") for peer in ids]
    for order in itertools.permutations(events):
        if all(order.index(("offer", peer)) < order.index(("answer", peer)) for peer in ids):
            stands = crossed(first, second, order)
            assert stands == {first: first > second, second: second > first}, order
