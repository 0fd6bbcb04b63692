"""An invitation admits its holder to one run until it expires, and what a peer shows of it admits nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.identities import identity_of
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.errors import TicketError
from noloco_p2p.invitation import Invitation, NotInvited, invite, is_marked
from noloco_p2p.ticket import Ticket

NOW_S = 1_800_000_000.0
RUN_KEY = identity_of("run key")
HERE = invite(RUN_KEY, expires_at_s=NOW_S + 1000, seed=bytes([1]) * 32)
THERE = invite(RUN_KEY, expires_at_s=NOW_S + 100, seed=bytes([2]) * 32)
FOREIGN = invite(identity_of("another run"), expires_at_s=NOW_S + 1000, seed=bytes([1]) * 32)
PEER = identity_of("peer").peer_id
DIGEST = "ab" * 32


def test_peers_with_different_invitations_to_a_run_know_each_other() -> None:
    HERE.check(THERE.membership(PEER), peer_id=PEER, now_s=NOW_S)
    THERE.check(HERE.membership(PEER), peer_id=PEER, now_s=NOW_S)
    assert HERE.listing(DIGEST).view == THERE.listing(DIGEST).view
    assert HERE.tls_seed() == THERE.tls_seed()


@pytest.mark.parametrize(
    ("membership", "now_s", "words"),
    [
        (b"", NOW_S, "presented no invitation"),
        (FOREIGN.membership(PEER), NOW_S, "not signed by its run key"),
        (THERE.membership(identity_of("thief").peer_id), NOW_S, "belongs to another peer"),
        (THERE.membership(PEER), NOW_S + 101, "expired on 2027-01-15"),
    ],
)
def test_strangers_thieves_and_those_who_are_late_are_refused(membership: bytes, now_s: float, words: str) -> None:
    with pytest.raises(NotInvited, match=words):
        HERE.check(membership, peer_id=PEER, now_s=now_s)
    with pytest.raises(NotInvited, match="ask for a new ticket"):
        HERE.check_time(NOW_S + 1001)


@given(st.data())
def test_no_changed_bit_is_accepted(data: st.DataObject) -> None:
    membership, invitation = bytearray(THERE.membership(PEER)), bytearray(HERE.encode())
    membership[data.draw(st.integers(0, len(membership) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(NotInvited):
        HERE.check(bytes(membership), peer_id=PEER, now_s=NOW_S)
    place = data.draw(st.integers(0, len(invitation) - 1))
    invitation[place] ^= 1 << data.draw(st.integers(0, 7))
    if 72 <= place < 104:
        return  # the shared secret is not signed; with a wrong one the TLS handshake fails
    with pytest.raises(TicketError):
        Invitation.decode(bytes(invitation))


def test_a_ticket_carries_it() -> None:
    ticket = Ticket("run", "ab" * 32, (), HERE)
    assert Ticket.decode(ticket.encode()) == ticket
    assert len(ticket.encode()) < 500
    assert Ticket.decode(replace(ticket, invitation=None).encode()).invitation is None


def test_only_members_can_mark_a_record() -> None:
    here, foreign = HERE.listing(DIGEST), FOREIGN.listing(DIGEST)
    good = THERE.listing(DIGEST).mark(PEER)
    assert is_marked(here.view, PEER, good)
    for mark in ("", "x", "é", good[:-4], "A" * 86, foreign.mark(PEER), here.mark(identity_of("other").peer_id)):
        assert not is_marked(here.view, PEER, mark)
    assert not is_marked(here.view[:-2], PEER, good)
    assert is_marked(DIGEST, PEER, ""), "a public run asks for none"


def test_what_is_listed_tells_nobody_of_which_run() -> None:
    views = {HERE.listing(DIGEST).view, HERE.listing("cd" * 32).view, FOREIGN.listing(DIGEST).view}
    assert len(views) == 3, "it takes the secret and the digest to name a view"
    shown = HERE.membership(PEER) + HERE.listing(DIGEST).mark(PEER).encode() + HERE.listing(DIGEST).view.encode()
    assert HERE.seed not in shown
    assert HERE.secret not in shown
    assert not any(DIGEST in view or RUN_KEY.public_key.hex() in view for view in views)
