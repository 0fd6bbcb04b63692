from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.swarm.records import TTL_S, PeerRecord
from noloco_p2p.swarm.sightings import MEMORY_S, Sightings

DHT_NOW_S = 1_800_000_000.0
A = PeerRecord("a", "demo", "ab" * 32, addresses=("10.0.0.1:1",), sequence=5, expires_at_s=DHT_NOW_S + TTL_S)


def merge(sightings: Sightings, *records: PeerRecord, now_s: float = 0.0) -> list[PeerRecord]:
    return sightings.merge(records, now_s=now_s, dht_now_s=DHT_NOW_S + now_s)


def live(sightings: Sightings, now_s: float = 0.0) -> list[str]:
    return [candidate.peer_id for candidate in sightings.live(now_s=now_s)]


def test_a_peer_is_live_until_its_ttl() -> None:
    sightings = Sightings("me")
    assert merge(sightings, A) == [A]
    assert live(sightings, TTL_S) == ["a"]
    assert live(sightings, TTL_S + 0.1) == []
    [candidate] = sightings.live(now_s=0)
    assert (candidate.address, candidate.state) == ("10.0.0.1:1", "training")


def test_only_those_that_were_drawn_are_offered() -> None:
    sightings = Sightings("me")
    merge(sightings, A, replace(A, peer_id="b"))
    assert [candidate.peer_id for candidate in sightings.live(now_s=0.0, among={"b"})] == ["b"]
    assert len(sightings.records(now_s=0.0)) == 2


def test_a_newer_word_is_never_replaced_by_an_older_one() -> None:
    sightings = Sightings("me")
    leaving = replace(A, sequence=6, state="leaving")
    merge(sightings, A)
    merge(sightings, leaving)
    assert merge(sightings, A) == []
    assert live(sightings) == []
    assert [record for record, _ in sightings.records(now_s=0)] == [leaving]


def test_repeating_the_same_word_does_not_make_it_younger() -> None:
    sightings = Sightings("me")
    merge(sightings, A)
    merge(sightings, replace(A, expires_at_s=DHT_NOW_S + 2 * TTL_S), now_s=TTL_S - 1)
    assert live(sightings, TTL_S + 1) == []


def test_the_age_of_a_word_heard_late_follows_from_its_expiry() -> None:
    sightings = Sightings("me")
    merge(sightings, replace(A, expires_at_s=DHT_NOW_S + 20.0))
    assert sightings.records(now_s=0)[0][1] == TTL_S - 20.0
    assert live(sightings, 20.1) == []


def test_expired_far_future_and_own_words_are_ignored() -> None:
    sightings = Sightings("me")
    late = replace(A, expires_at_s=DHT_NOW_S + 2 * TTL_S + 1)
    assert merge(sightings, replace(A, expires_at_s=DHT_NOW_S), late, replace(A, peer_id="me")) == []
    assert sightings.records(now_s=0) == []


def test_a_peer_without_an_address_or_behind_a_closed_port_is_alive_but_never_called() -> None:
    for changes in (
        {"addresses": ()},
        {"reachability": "outbound-only"},
        {"reachability": "relayed"},
        {"reachability": "punched"},
    ):
        sightings = Sightings("me")
        merge(sightings, replace(A, **changes))
        assert [candidate.can_be_called for candidate in sightings.live(now_s=0)] == [False]
        assert sightings.records(now_s=0)


def test_sequence_numbers_are_forgotten_in_the_end() -> None:
    sightings = Sightings("me")
    merge(sightings, A)
    merge(sightings, now_s=MEMORY_S + 1)
    restarted = replace(A, sequence=1, expires_at_s=A.expires_at_s + MEMORY_S)
    assert merge(sightings, restarted, now_s=MEMORY_S + 1) == [restarted]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.floats(-10, 130)), max_size=40))
def test_the_view_holds_the_highest_acceptable_sequence_in_any_order(words: list[tuple[str, int, float]]) -> None:
    sightings = Sightings("me")
    best: dict[str, int] = {}
    for peer, sequence, remaining_s in words:
        merge(sightings, replace(A, peer_id=peer, sequence=sequence, expires_at_s=DHT_NOW_S + remaining_s))
        if 0 < (DHT_NOW_S + remaining_s) - DHT_NOW_S <= 2 * TTL_S:
            best[peer] = max(best.get(peer, 0), sequence)
    assert {record.peer_id: record.sequence for record, _ in sightings.records(now_s=0)} == best


def test_the_private_address_of_a_peer_behind_the_same_router_is_tried_first() -> None:
    sightings = Sightings("me")
    merge(sightings, replace(A, addresses=("203.0.114.9:1", "192.168.1.8:1")), replace(A, peer_id="b"))
    assert [(each.address, each.nearby) for each in sightings.live(now_s=0)] == [
        ("203.0.114.9:1", "192.168.1.8:1"),
        ("10.0.0.1:1", ""),
    ]
