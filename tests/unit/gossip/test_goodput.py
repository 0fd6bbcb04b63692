"""What a transfer may take, by those before it."""

from __future__ import annotations

import pytest

from noloco_p2p.gossip.goodput import REMEMBERED, Goodput


def measured(*seconds: float) -> Goodput:
    goodput = Goodput()
    for each in seconds:
        goodput.note(1000, each)
    return goodput


def test_nothing_is_claimed_before_the_first_transfer() -> None:
    assert Goodput().seconds_for(10) is None
    empty = measured()
    empty.note(0, 5.0)
    assert empty.seconds_for(10) is None


def test_one_transfer_leaves_room_as_its_spread_is_not_known() -> None:
    assert measured(2.0).seconds_for(1000) == pytest.approx(4.0)


def test_a_steady_link_needs_no_room_and_an_unsteady_one_gets_it() -> None:
    assert measured(2.0, 2.0, 2.0).seconds_for(500) == pytest.approx(1.0)
    assert measured(1.0, 2.0, 3.0).seconds_for(1000) == pytest.approx(3.0)


def test_one_slow_partner_is_no_slow_link_but_half_of_all_are() -> None:
    steady = [1.0] * REMEMBERED
    assert measured(*steady, 50.0).seconds_for(1000) == pytest.approx(1.0)
    changed = measured(*steady, *[50.0] * (REMEMBERED // 2 + 1)).seconds_for(1000)
    assert changed is not None
    assert changed >= 50.0
