from __future__ import annotations

from noloco_p2p.rates import Rate
from noloco_p2p.swarm.allowance import MAX_PEERS, Allowance

OF_ONE, OF_ALL = Rate(per_s=2.0, burst=10.0), Rate(per_s=20.0, burst=100.0)


def asked(allowance: Allowance, peer: str, number: int, *, is_known: bool = False, now_s: float = 0.0) -> int:
    """How many of so many requests at one moment are answered."""
    admitted = 0
    for _ in range(number):
        if allowance.admits(peer, is_known=is_known, now_s=now_s):
            allowance.charge(peer, 1.0, now_s=now_s)
            admitted += 1
    return admitted


def test_one_peer_gets_its_burst_and_then_its_rate() -> None:
    allowance = Allowance(of_one=OF_ONE, of_all=OF_ALL)
    assert asked(allowance, "a", 50) == 10
    assert asked(allowance, "a", 50, now_s=3.0) == 6
    assert asked(allowance, "b", 50, now_s=3.0) == 10, "others are not concerned"
    assert asked(allowance, "a", 50, now_s=1000.0) == 10, "no more than the burst is saved up"


def test_many_strangers_leave_half_to_those_who_are_known() -> None:
    allowance = Allowance(of_one=OF_ONE, of_all=OF_ALL)
    assert sum(asked(allowance, f"invented {number}", 10) for number in range(100)) == 50
    assert asked(allowance, "neighbour", 10, is_known=True) == 10
    assert sum(asked(allowance, f"neighbour {number}", 10, is_known=True) for number in range(100)) == 40


def test_an_answer_that_was_dear_is_paid_off_later() -> None:
    allowance = Allowance(of_one=OF_ONE, of_all=OF_ALL)
    assert asked(allowance, "a", 1) == 1
    allowance.charge("a", 19.0, now_s=0.0)
    assert asked(allowance, "a", 1, now_s=4.0) == 0
    assert asked(allowance, "a", 1, now_s=6.0) == 1


def test_a_flood_of_peer_ids_takes_a_bounded_room() -> None:
    allowance = Allowance(of_one=OF_ONE, of_all=OF_ALL)
    for number in range(3 * MAX_PEERS):
        allowance.admits(f"invented {number}", is_known=False, now_s=1e6)
    assert len(allowance._peers) == MAX_PEERS
