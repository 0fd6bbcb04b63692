"""Who makes room: the first of those that are most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.net.crowd import Crowd


def test_a_group_that_is_full_makes_room_itself() -> None:
    crowd = Crowd(of_one=2, in_all=10)
    assert [crowd.enter(number, "a") for number in range(4)] == [[], [], [0], [1]]
    assert crowd.enter(4, "b") == []


def test_the_largest_group_makes_room_when_there_are_too_many() -> None:
    crowd = Crowd(of_one=3, in_all=4)
    for number, group in enumerate("abbb"):
        assert crowd.enter(number, group) == []
    assert crowd.enter(4, "c") == [1]
    assert 0 in crowd


def test_who_has_left_counts_no_more() -> None:
    crowd = Crowd(of_one=1, in_all=1)
    crowd.enter(0, "a")
    crowd.leave(0)
    crowd.leave(0)
    assert crowd.enter(1, "a") == []


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60))
def test_never_too_many_and_never_the_newest(comers: list[tuple[str, bool]]) -> None:
    crowd, here = Crowd(of_one=3, in_all=7), set[int]()
    for number, (group, has_left) in enumerate(comers):
        gone = crowd.enter(number, group)
        here = (here | {number}) - set(gone)
        assert number not in gone
        if has_left:
            crowd.leave(min(here))
            here.remove(min(here))
        assert len(crowd) == len(here) <= 7
        assert all(each in crowd for each in here)
