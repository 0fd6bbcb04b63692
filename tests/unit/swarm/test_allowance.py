"""Floods of requests use up what their senders may ask, and what all may ask, but not the share of known nodes."""

from __future__ import annotations

from noloco_p2p.swarm.kademlia.protocol import (
    KNOWN_FOR_S,
    MAX_KNOWN,
    MAX_PEERS,
    OF_ALL,
    OF_KNOWN,
    OF_ONE,
    Allowance,
)

FLOOD = 10_000


class At:
    """An allowance, at a time that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.allowance = Allowance(lambda: self.now_s)

    def asked(self, peer: str, number: int, *, units: float = 1.0) -> int:
        """Return how many of `number` simultaneous requests are answered."""
        admitted = 0
        for _ in range(number):
            if self.allowance.admits(peer):
                self.allowance.charge(peer, units)
                admitted += 1
        return admitted


def test_one_peer_gets_its_burst_and_then_its_rate() -> None:
    at = At()
    assert at.asked("a", FLOOD) == OF_ONE[1]
    at.now_s = 3.0
    assert at.asked("a", FLOOD) == 3 * OF_ONE[0]
    assert at.asked("b", 100) == 100, "others are not concerned"
    at.now_s = 1000.0
    assert at.asked("a", FLOOD) == OF_ONE[1], "no more than the burst is saved up"


def test_what_strangers_and_other_nodes_ask_leaves_a_node_that_answers_its_own_allowance() -> None:
    at = At()
    for name in ("neighbour", *(f"liar {number}" for number in range(20))):
        at.allowance.answered(name)
    assert sum(at.asked(f"invented {number}", 10) for number in range(FLOOD)) == OF_ALL[1]
    assert sum(at.asked(f"liar {number}", FLOOD) for number in range(20)) == 20 * OF_KNOWN[1]
    assert at.asked("neighbour", FLOOD) == OF_KNOWN[1]
    at.allowance.charge("invented", 1e6)
    at.now_s = 3.0
    assert at.asked("neighbour", 10) == 3 * OF_KNOWN[0]


def test_nodes_that_come_later_displace_none_that_goes_on_answering() -> None:
    at = At()
    at.allowance.answered("neighbour")
    at.now_s = 1.0
    late = [f"late {number}" for number in range(3 * MAX_KNOWN)]
    for name in late:
        at.allowance.answered(name)
    at.allowance.charge("invented", 1e6)
    assert at.asked("neighbour", 10) == 10
    assert sum(at.asked(name, 1) for name in late) == MAX_KNOWN - 1
    at.now_s = KNOWN_FOR_S
    at.allowance.answered("newer")
    assert at.asked("newer", 1) == 1, "the neighbour has been silent for too long"
    assert at.asked("neighbour", 1) == 0


def test_an_answer_that_was_dear_is_paid_off_later() -> None:
    at = At()
    assert at.asked("a", 2, units=OF_ONE[1] + 3 * OF_ONE[0]) == 1
    at.now_s = 2.9
    assert at.asked("a", 1) == 0
    at.now_s = 8.0  # the shared allowance is paid off, too
    assert at.asked("a", 1) == 1


def test_a_flood_of_peer_ids_takes_a_bounded_room() -> None:
    at = At()
    for number in range(3 * MAX_PEERS):
        at.allowance.charge(f"invented {number}", 0.1)
    assert len(at.allowance._peers) == MAX_PEERS
