from __future__ import annotations

from noloco_p2p.rates import Rate
from noloco_p2p.swarm.kademlia.protocol import KNOWN_FOR_S, MAX_KNOWN, MAX_PEERS, Allowance

OF_ONE, OF_ALL, OF_KNOWN = Rate(per_s=2.0, burst=10.0), Rate(per_s=20.0, burst=100.0), Rate(per_s=1.0, burst=5.0)


def made() -> Allowance:
    return Allowance(of_one=OF_ONE, of_all=OF_ALL, of_known=OF_KNOWN)


def asked(allowance: Allowance, peer: str, number: int, *, now_s: float = 0.0) -> int:
    """Return how many of `number` simultaneous requests are answered."""
    admitted = 0
    for _ in range(number):
        if allowance.admits(peer, now_s=now_s):
            allowance.charge(peer, 1.0, now_s=now_s)
            admitted += 1
    return admitted


def test_one_peer_gets_its_burst_and_then_its_rate() -> None:
    allowance = made()
    assert asked(allowance, "a", 50) == 10
    assert asked(allowance, "a", 50, now_s=3.0) == 6
    assert asked(allowance, "b", 50, now_s=3.0) == 10, "others are not concerned"
    assert asked(allowance, "a", 50, now_s=1000.0) == 10, "no more than the burst is saved up"


def test_what_strangers_and_other_nodes_ask_leaves_a_node_that_answers_its_own_allowance() -> None:
    allowance = made()
    for name in ("neighbour", *(f"liar {number}" for number in range(20))):
        allowance.answered(name, now_s=0.0)
    assert sum(asked(allowance, f"invented {number}", 10) for number in range(100)) == OF_ALL.burst
    assert sum(asked(allowance, f"liar {number}", 10) for number in range(20)) == 20 * OF_KNOWN.burst
    assert asked(allowance, "neighbour", 10) == OF_KNOWN.burst
    allowance.charge("invented", 1e6, now_s=0.0)
    assert asked(allowance, "neighbour", 10, now_s=3.0) == 3


def test_nodes_that_come_later_displace_none_that_goes_on_answering() -> None:
    allowance = made()
    allowance.answered("neighbour", now_s=0.0)
    for number in range(3 * MAX_KNOWN):
        allowance.answered(f"late {number}", now_s=1.0)
    allowance.charge("invented", 1e6, now_s=1.0)
    assert asked(allowance, "neighbour", 10, now_s=1.0) == OF_KNOWN.burst
    assert sum(asked(allowance, f"late {number}", 1, now_s=1.0) for number in range(3 * MAX_KNOWN)) == MAX_KNOWN - 1
    allowance.answered("newer", now_s=KNOWN_FOR_S)
    assert asked(allowance, "newer", 1, now_s=KNOWN_FOR_S) == 1, "the neighbour has been silent for too long"
    assert asked(allowance, "neighbour", 1, now_s=KNOWN_FOR_S) == 0


def test_an_answer_that_was_dear_is_paid_off_later() -> None:
    allowance = made()
    assert asked(allowance, "a", 1) == 1
    allowance.charge("a", 19.0, now_s=0.0)
    assert asked(allowance, "a", 1, now_s=4.0) == 0
    assert asked(allowance, "a", 1, now_s=6.0) == 1


def test_a_flood_of_peer_ids_takes_a_bounded_room() -> None:
    allowance = made()
    for number in range(3 * MAX_PEERS):
        allowance.admits(f"invented {number}", now_s=1e6)
    assert len(allowance._peers) == MAX_PEERS
