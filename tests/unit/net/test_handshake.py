"""A proof is valid for one call of one caller, on one connection, to one session of one peer."""

from __future__ import annotations

import pytest
from harness.identities import identity_of
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.errors import CorruptPayload, PeerError, Refused
from noloco_p2p.net.handshake import CHALLENGE_S, Challenges, Greeting
from noloco_p2p.net.session import Session
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

CALLER, ANSWERER, RELAY = (Session(identity_of(name)) for name in ("caller", "answerer", "relay"))
ADDRESS = "ipv4:192.0.2.7:4711"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def proof_for(challenges: Challenges, session: Session = ANSWERER, *, caller: Session = CALLER) -> pb.Proof:
    greeting = Greeting.to(session.identity.peer_id, session.key)
    reply = challenges.answer(greeting.request(), ADDRESS)
    [(_, value)] = greeting.prove(reply, caller)
    return pb.Proof.FromString(value)


def test_a_caller_is_who_it_proves_to_be() -> None:
    challenges = Challenges(ANSWERER)
    for caller in (CALLER, RELAY):
        assert challenges.check(proof_for(challenges, caller=caller), ADDRESS) == caller.identity.peer_id


def test_none_of_a_thousand_replays_is_accepted() -> None:
    challenges = Challenges(ANSWERER)
    proof = proof_for(challenges)
    challenges.check(proof, ADDRESS)
    for _ in range(1000):
        with pytest.raises(Refused, match="a proof is valid for only one call"):
            challenges.check(proof, ADDRESS)


def test_a_challenge_serves_for_one_try() -> None:
    """Otherwise one greeting would pay for any number of signature checks."""
    challenges = Challenges(ANSWERER)
    proof = proof_for(challenges)
    wrong = pb.Proof.FromString(proof.SerializeToString())
    wrong.signature = bytes(64)
    with pytest.raises(Refused, match="the signature was not"):
        challenges.check(wrong, ADDRESS)
    with pytest.raises(Refused, match="already been used"):
        challenges.check(proof, ADDRESS)


def test_a_proof_ages_by_the_clock_of_who_asked_for_it() -> None:
    clock = Clock()
    challenges = Challenges(ANSWERER, clock=clock)
    early, late = proof_for(challenges), proof_for(challenges)
    clock.now_s += CHALLENGE_S - 0.1
    challenges.check(early, ADDRESS)
    clock.now_s += 0.2
    with pytest.raises(Refused, match="older than 10 s"):
        challenges.check(late, ADDRESS)


def test_what_was_taken_is_remembered_for_its_life_only() -> None:
    clock = Clock()
    challenges = Challenges(ANSWERER, clock=clock)
    for _ in range(50):
        challenges.check(proof_for(challenges), ADDRESS)
        clock.now_s += 1.0
    assert len(challenges._taken) <= CHALLENGE_S + 2


def test_another_connection_and_another_start_do_not_take_it() -> None:
    challenges = Challenges(ANSWERER)
    with pytest.raises(Refused, match="not issued by this peer"):
        challenges.check(proof_for(challenges), "ipv4:192.0.2.7:4712")
    with pytest.raises(Refused, match="not issued by this peer"):
        Challenges(Session(ANSWERER.identity)).check(proof_for(challenges), ADDRESS)


def test_who_is_called_cannot_pass_the_proof_on() -> None:
    """The relay asks the victim for a challenge and passes it to the caller as its own."""
    victim = Challenges(ANSWERER)
    greeting = Greeting.to(RELAY.identity.peer_id, RELAY.key)
    challenge = victim.answer(greeting.request(), ADDRESS).challenge
    words = b"noloco_p2p answerer 1\x00" + greeting.nonce + challenge + RELAY.key + RELAY.identity.peer_id.encode()
    reply = pb.GreetReply(challenge=challenge, signature=RELAY.identity.sign(words))
    [(_, value)] = greeting.prove(reply, CALLER)
    with pytest.raises(Refused, match="signature"):
        victim.check(pb.Proof.FromString(value), ADDRESS)


def test_a_caller_notices_that_another_peer_answers() -> None:
    greeting = Greeting.to(ANSWERER.identity.peer_id, ANSWERER.key)
    reply = Challenges(RELAY).answer(greeting.request(), ADDRESS)
    with pytest.raises(PeerError, match="another peer may have answered"):
        greeting.prove(reply, CALLER)
    with pytest.raises(CorruptPayload, match="no valid challenge"):
        greeting.prove(pb.GreetReply(), CALLER)


def test_nobody_takes_the_name_of_another() -> None:
    challenges = Challenges(ANSWERER)
    proof = proof_for(challenges)
    proof.peer_id = RELAY.identity.peer_id
    with pytest.raises(Refused, match="signature"):
        challenges.check(proof, ADDRESS)


def test_a_name_that_is_not_proven_cannot_play_with_a_terminal() -> None:
    challenges = Challenges(ANSWERER)
    proof = proof_for(challenges)
    proof.peer_id = "x\x1bc\nHI"
    with pytest.raises(Refused, match=r"made by \.\.xcHI for this peer"):
        challenges.check(proof, ADDRESS)


def test_one_peer_has_one_name() -> None:
    """Counts and bans are by peer id, and the base58 decoder ignores blanks, so an alias must not verify."""
    challenges = Challenges(ANSWERER)
    greeting = Greeting.to(ANSWERER.identity.peer_id, ANSWERER.key)
    reply = challenges.answer(greeting.request(), ADDRESS)
    alias = CALLER.identity.peer_id + " "
    words = b"noloco_p2p caller 1\x00" + greeting.nonce + reply.challenge + ANSWERER.key
    signature = CALLER.identity.sign(words + (ANSWERER.identity.peer_id + alias).encode())
    proof = pb.Proof(peer_id=alias, nonce=greeting.nonce, challenge=reply.challenge, signature=signature)
    with pytest.raises(Refused, match="signature"):
        challenges.check(proof, ADDRESS)


@given(st.builds(pb.Proof, peer_id=st.text(), nonce=st.binary(), challenge=st.binary(), signature=st.binary()))
def test_nonsense_is_refused_in_words(proof: pb.Proof) -> None:
    with pytest.raises(Refused, match="authentication failed"):
        Challenges(ANSWERER).check(proof, ADDRESS)
    with pytest.raises(CorruptPayload):
        Challenges(ANSWERER).answer(pb.GreetRequest(nonce=proof.nonce[:15]), ADDRESS)
