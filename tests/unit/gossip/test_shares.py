"""The account of each peer bounds the swaps that it may take, and the memory for accounts is bounded."""

from __future__ import annotations

import math

import pytest

from noloco_p2p.gossip.pairing import FAIR_SHARES, LEAST, MAX_ACCOUNTS, MOST, START, Shares


def swaps_of_a_greedy_peer(num_rounds: int, *, num_live: int, is_listed: bool = True) -> int:
    shares, swaps = Shares(), 0
    for _ in range(num_rounds):
        shares.earn(["greedy"] if is_listed else [], num_live=num_live)
        if not shares.has_had("greedy"):
            shares.swapped("greedy")
            swaps += 1
    return swaps


@pytest.mark.parametrize("num_live", [3, 9, 16, 1000])
@pytest.mark.parametrize("num_rounds", [20, 400])
@pytest.mark.parametrize("is_listed", [True, False])
def test_who_takes_all_it_can_gets_its_share_and_a_few_more(num_live: int, num_rounds: int, is_listed: bool) -> None:
    swaps = swaps_of_a_greedy_peer(num_rounds, num_live=num_live, is_listed=is_listed)
    assert swaps <= START + FAIR_SHARES * num_rounds / (num_live - 1)
    assert swaps >= min(num_rounds, int(FAIR_SHARES * num_rounds / (num_live - 1)))


def test_who_leaves_and_comes_back_gains_nothing() -> None:
    shares = Shares()
    for _ in range(3):
        shares.swapped("greedy")
    shares.earn([], num_live=9)
    shares.earn(["greedy"], num_live=9)
    assert shares.has_had("greedy")


def test_an_account_has_a_floor_and_a_ceiling() -> None:
    shares = Shares()
    for _ in range(1000):
        shares.swapped("often")
        shares.earn(["often", "never"], num_live=10**9)
    assert shares.owes("often")
    for _ in range(int(MOST - LEAST)):
        shares.earn(["often", "never"], num_live=2)
    for peer in ("often", "never"):
        for _ in range(int(MOST)):
            assert not shares.has_had(peer)
            shares.swapped(peer)
        assert shares.has_had(peer)
        assert not shares.owes(peer)
        shares.swapped(peer)
        assert shares.owes(peer)


def test_who_holds_a_peer_up_pays_for_the_swaps_of_that_time() -> None:
    shares, num_swaps = Shares(), 0
    shares.swapped("late")
    shares.held_up("late", 20.0)
    while shares.is_slow("late"):
        shares.earn(["late"], num_live=2)
        num_swaps += 1
    assert num_swaps == math.ceil((20 - START + LEAST) / FAIR_SHARES)


def test_memory_is_bounded_and_those_that_owe_most_are_kept() -> None:
    shares = Shares()
    for number in range(2 * MAX_ACCOUNTS):
        shares.swapped(f"peer{number}")
    for _ in range(3):
        shares.swapped("debtor")
    shares.earn([], num_live=10**9)
    assert len(shares._accounts) == MAX_ACCOUNTS
    assert shares.has_had("debtor")
