from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.swarm.announcer import CopyWatch
from noloco_p2p.swarm.records import PeerRecord

OLD = PeerRecord("a", "demo", "ab" * 32, session_key="old", started_at_ms=1000, sequence=7)
NEW = replace(OLD, session_key="new", started_at_ms=2000)


def stops(own: PeerRecord, *found: PeerRecord) -> bool:
    watch = CopyWatch()
    return True in {watch.must_stop(own, record) for record in found}


def spoken(record: PeerRecord) -> tuple[PeerRecord, PeerRecord]:
    return replace(record, sequence=10), replace(record, sequence=11)


def test_the_older_start_stops_when_the_newer_has_spoken_twice() -> None:
    assert stops(OLD, *spoken(NEW))
    assert not stops(NEW, *spoken(OLD))


def test_what_an_earlier_start_left_behind_is_no_copy() -> None:
    """The record of an earlier start does not change any more, even if the clock was set back in between."""
    assert not stops(OLD, NEW, NEW, NEW)


def test_the_own_word_another_peer_and_a_farewell_are_no_copies() -> None:
    assert not stops(OLD, *spoken(OLD))
    assert not stops(OLD, *spoken(replace(NEW, peer_id="b")))
    assert not stops(OLD, *(replace(record, state="leaving") for record in spoken(NEW)))


@given(st.integers(0, 3), st.integers(0, 3), st.sampled_from("ab"), st.sampled_from("ab"))
def test_of_two_starts_exactly_one_stops(at: int, other_at: int, key: str, other_key: str) -> None:
    first = replace(OLD, started_at_ms=at, session_key=key)
    second = replace(OLD, started_at_ms=other_at, session_key=other_key)
    assert stops(first, *spoken(second)) + stops(second, *spoken(first)) == (1 if key != other_key else 0)
