"""When places run out, the oldest holder of the largest group makes room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.net.proxy import Quota


def test_a_group_that_is_full_makes_room_itself() -> None:
    quota = Quota(of_one=2, in_all=10)
    assert [quota.enter(number, "a") for number in range(4)] == [[], [], [0], [1]]
    assert quota.enter(4, "b") == []


def test_the_largest_group_makes_room_when_there_are_too_many() -> None:
    quota = Quota(of_one=3, in_all=4)
    for number, group in enumerate("abbb"):
        assert quota.enter(number, group) == []
    assert quota.enter(4, "c") == [1]
    assert 0 in quota


def test_who_has_left_counts_no_more() -> None:
    quota = Quota(of_one=1, in_all=1)
    quota.enter(0, "a")
    quota.leave(0)
    quota.leave(0)
    assert quota.enter(1, "a") == []


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60))
def test_never_too_many_and_never_the_newest(comers: list[tuple[str, bool]]) -> None:
    quota, here = Quota(of_one=3, in_all=7), set[int]()
    for number, (group, has_left) in enumerate(comers):
        gone = quota.enter(number, group)
        here = (here | {number}) - set(gone)
        assert number not in gone
        if has_left:
            quota.leave(min(here))
            here.remove(min(here))
        assert len(quota) == len(here) <= 7
        assert all(each in quota for each in here)
