from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.swarm.records import TTL_S, PeerRecord
from noloco_p2p.swarm.view import MEMORY_S, View

DHT_NOW_S = 1_800_000_000.0
A = PeerRecord("a", "demo", "ab" * 32, addresses=("10.0.0.1:1",), sequence=5, expires_at_s=DHT_NOW_S + TTL_S)


def merge(view: View, *records: PeerRecord, now_s: float = 0.0) -> list[PeerRecord]:
    return view.merge(records, now_s=now_s, dht_now_s=DHT_NOW_S + now_s)


def live(view: View, now_s: float = 0.0) -> list[str]:
    return [candidate.peer_id for candidate in view.live(now_s=now_s)]


def test_a_peer_is_live_until_its_ttl() -> None:
    view = View("me")
    assert merge(view, A) == [A]
    assert live(view, TTL_S) == ["a"]
    assert live(view, TTL_S + 0.1) == []
    [candidate] = view.live(now_s=0)
    assert (candidate.address, candidate.state) == ("10.0.0.1:1", "training")


def test_only_those_that_were_drawn_are_offered() -> None:
    view = View("me")
    merge(view, A, replace(A, peer_id="b"))
    assert [candidate.peer_id for candidate in view.live(now_s=0.0, among={"b"})] == ["b"]
    assert len(view.records(now_s=0.0)) == 2


def test_a_newer_word_is_never_replaced_by_an_older_one() -> None:
    view = View("me")
    leaving = replace(A, sequence=6, state="leaving")
    merge(view, A)
    merge(view, leaving)
    assert merge(view, A) == []
    assert live(view) == []
    assert [record for record, _ in view.records(now_s=0)] == [leaving]


def test_repeating_the_same_word_does_not_make_it_younger() -> None:
    view = View("me")
    merge(view, A)
    merge(view, replace(A, expires_at_s=DHT_NOW_S + 2 * TTL_S), now_s=TTL_S - 1)
    assert live(view, TTL_S + 1) == []


def test_the_age_of_a_word_heard_late_follows_from_its_expiry() -> None:
    view = View("me")
    merge(view, replace(A, expires_at_s=DHT_NOW_S + 20.0))
    assert view.records(now_s=0)[0][1] == TTL_S - 20.0
    assert live(view, 20.1) == []


def test_expired_far_future_and_own_words_are_ignored() -> None:
    view = View("me")
    late = replace(A, expires_at_s=DHT_NOW_S + 2 * TTL_S + 1)
    assert merge(view, replace(A, expires_at_s=DHT_NOW_S), late, replace(A, peer_id="me")) == []
    assert view.records(now_s=0) == []


def test_a_peer_without_an_address_or_behind_a_closed_port_is_alive_but_never_called() -> None:
    for changes in ({"addresses": ()}, {"reachability": "outbound-only"}, {"reachability": "relayed"}):
        view = View("me")
        merge(view, replace(A, **changes))
        assert [candidate.can_be_called for candidate in view.live(now_s=0)] == [False]
        assert view.records(now_s=0)


def test_sequence_numbers_are_forgotten_in_the_end() -> None:
    view = View("me")
    merge(view, A)
    merge(view, now_s=MEMORY_S + 1)
    restarted = replace(A, sequence=1, expires_at_s=A.expires_at_s + MEMORY_S)
    assert merge(view, restarted, now_s=MEMORY_S + 1) == [restarted]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.floats(-10, 130)), max_size=40))
def test_the_view_holds_the_highest_acceptable_sequence_in_any_order(words: list[tuple[str, int, float]]) -> None:
    view = View("me")
    best: dict[str, int] = {}
    for peer, sequence, remaining_s in words:
        merge(view, replace(A, peer_id=peer, sequence=sequence, expires_at_s=DHT_NOW_S + remaining_s))
        if 0 < (DHT_NOW_S + remaining_s) - DHT_NOW_S <= 2 * TTL_S:
            best[peer] = max(best.get(peer, 0), sequence)
    assert {record.peer_id: record.sequence for record, _ in view.records(now_s=0)} == best
