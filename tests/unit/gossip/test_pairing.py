"""The choice of a partner: uniform over peers, no useless repeats, and no waiting when nobody is left to ask."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from noloco_p2p.gossip.frames import FINAL, PASSING, Boundary, RefuseCode
from noloco_p2p.gossip.pairing import (
    FAILED_RETRY_S,
    PASSED_OVER_S,
    PASSING_TRIES,
    Pairing,
    lateness_s,
    too_far_s,
)
from noloco_p2p.gossip.seams import Candidate

LASTING = set(RefuseCode) - PASSING - FINAL


def candidates(num_peers: int, *, state: str = "training") -> list[Candidate]:
    return [Candidate(f"peer{number}", f"host:{number}", state=state) for number in range(num_peers)]


def chosen(pairing: Pairing, live: list[Candidate], now_s: float, *, latest_s: float = 1e9) -> str:
    candidate = pairing.choose(live, now_s, latest_s=latest_s)
    return candidate.peer_id if candidate else ""


def boundary(to_boundary_s: float | None, per_round_s: float | None) -> Boundary:
    return Boundary(0, to_boundary_s, per_round_s, 0.0)


def test_every_peer_is_drawn_with_the_same_chance() -> None:
    """Chi-square over 10 peers and 5,000 rounds: above 27.9 (9 degrees of freedom) for one in a thousand fair seeds."""
    pairing, live, draws = Pairing(random.Random(1)), candidates(10), Counter[str]()
    for _ in range(5_000):
        pairing.open_round([], num_live=10)
        draws[chosen(pairing, live, 0.0)] += 1
    assert sum((count - 500) ** 2 / 500 for count in draws.values()) < 27.9
    assert len(draws) == 10


def test_the_order_of_the_directory_does_not_matter_to_chance() -> None:
    """Each peer is last in the list in turn, so a draw that favours a position in the list fails."""
    pairing, live, draws = Pairing(random.Random(2)), candidates(5), Counter[str]()
    for turn in range(5_000):
        pairing.open_round([], num_live=10)
        rotated = live[turn % 5 :] + live[: turn % 5]
        draws[chosen(pairing, rotated, 0.0)] += 1
    assert sum((count - 1_000) ** 2 / 1_000 for count in draws.values()) < 18.5  # 4 degrees of freedom, 1 in 1,000


def test_who_was_turned_away_and_still_waits_is_asked_first_and_only_in_the_next_round() -> None:
    live = candidates(10)
    pairing = Pairing(random.Random(0))
    for _ in range(20):
        pairing.open_round([], num_live=10)
        pairing.turned_away("peer7", mine=boundary(2.0, 20.0), theirs=boundary(15.0, 20.0))
        pairing.turned_away("peer8", mine=boundary(2.0, 20.0), theirs=boundary(1.0, 20.0))  # its round ends earlier
        pairing.open_round([], num_live=10)
        assert chosen(pairing, live, 0.0) == "peer7"
    pairing.refused("peer7", code=RefuseCode.TAKEN, retry_after_s=3.0, now_s=0.0)
    draws = set()
    for _ in range(50):
        pairing.open_round([], num_live=10)
        draws.add(chosen(pairing, live, 10.0))
    assert len(draws) > 5, "chance again"


def test_nobody_there_is_nobody_chosen() -> None:
    pairing = Pairing(random.Random(0))
    assert chosen(pairing, [], 0.0) == ""
    assert not pairing.hopeful([], 0.0, latest_s=0.0)


@pytest.mark.parametrize("state", ["paused", "leaving", "done", "unheard of"])
def test_only_a_training_peer_is_asked(state: str) -> None:
    pairing, live = Pairing(random.Random(0)), candidates(3, state=state)
    assert chosen(pairing, live, 0.0) == ""
    assert not pairing.hopeful(live, 0.0, latest_s=0.0)


def test_a_taken_target_is_kept_while_its_next_round_is_in_time() -> None:
    pairing, live = Pairing(random.Random(3)), candidates(5)
    target = chosen(pairing, live, 0.0)
    pairing.refused(target, code=RefuseCode.TAKEN, retry_after_s=30.0, now_s=0.0)
    assert [chosen(pairing, live, now_s, latest_s=40.0) for now_s in (0.0, 10.0, 29.9)] == ["", "", ""]
    assert chosen(pairing, live, 30.0, latest_s=40.0) == target


def test_the_wait_for_a_target_is_known_to_the_moment() -> None:
    pairing, live = Pairing(random.Random(3)), candidates(5)
    assert pairing.wait_s(0.0) == math.inf
    target = chosen(pairing, live, 0.0)
    assert pairing.wait_s(0.0) == math.inf
    pairing.refused(target, code=RefuseCode.TAKEN, retry_after_s=30.0, now_s=0.0)
    assert chosen(pairing, live, 10.0, latest_s=40.0) == ""
    assert pairing.wait_s(10.0) == 20.0


def test_a_taken_target_whose_next_round_is_too_late_gives_way() -> None:
    pairing, live = Pairing(random.Random(3)), candidates(5)
    target = chosen(pairing, live, 0.0)
    pairing.refused(target, code=RefuseCode.TAKEN, retry_after_s=30.0, now_s=0.0)
    assert chosen(pairing, live, 0.0, latest_s=29.0) not in ("", target)


def test_a_target_that_leaves_the_directory_gives_way() -> None:
    pairing, live = Pairing(random.Random(3)), candidates(5)
    target = chosen(pairing, live, 0.0)
    others = [candidate for candidate in live if candidate.peer_id != target]
    assert chosen(pairing, others, 0.0) not in ("", target)


@pytest.mark.parametrize("code", sorted(PASSING))
def test_a_passing_refusal_is_waited_out_and_asked_again(code: RefuseCode) -> None:
    pairing, live = Pairing(random.Random(4)), candidates(1)
    pairing.refused("peer0", code=code, retry_after_s=0.1, now_s=0.0)
    assert chosen(pairing, live, 0.05) == ""
    assert pairing.hopeful(live, 0.05, latest_s=0.05)
    assert chosen(pairing, live, 0.25) == "peer0"


@pytest.mark.parametrize("code", sorted(PASSING))
def test_a_peer_that_only_puts_off_is_given_up_for_another(code: RefuseCode) -> None:
    """Otherwise a peer whose training hangs would cost everybody that draws it a whole round."""
    pairing, live, now_s = Pairing(random.Random(4)), candidates(2), 0.0
    target = chosen(pairing, live, now_s)
    for _ in range(PASSING_TRIES):
        pairing.refused(target, code=code, retry_after_s=0.1, now_s=now_s)
        now_s += 0.25
    assert chosen(pairing, live, now_s, latest_s=now_s + PASSED_OVER_S / 2) not in ("", target)
    assert not pairing.hopeful([Candidate(target, "host:0")], now_s, latest_s=now_s)


@pytest.mark.parametrize("code", sorted(LASTING))
def test_nobody_is_asked_without_a_pause_whatever_it_answers(code: RefuseCode) -> None:
    """A partner at its own boundary answers TAKEN with a retry after 0 s."""
    pairing, live, now_s, num_offers = Pairing(random.Random(9)), candidates(1), 0.0, 0
    while now_s < 60.0:
        if chosen(pairing, live, now_s):
            num_offers += 1
            pairing.refused("peer0", code=code, retry_after_s=0.0, now_s=now_s)
        now_s += 0.01
    assert num_offers < 100


@pytest.mark.parametrize("code", sorted(LASTING))
def test_a_lasting_refusal_ends_the_hope_for_this_round_only(code: RefuseCode) -> None:
    pairing, live = Pairing(random.Random(5)), candidates(1)
    pairing.refused("peer0", code=code, retry_after_s=5.0, now_s=0.0)
    assert not pairing.hopeful(live, 1.0, latest_s=1.0)
    assert chosen(pairing, live, 1.0, latest_s=2.0) == ""
    pairing.open_round([], num_live=10)
    assert chosen(pairing, live, 1.0) == "peer0"


@pytest.mark.parametrize("code", sorted(FINAL))
def test_a_peer_of_another_run_is_never_asked_again(code: RefuseCode) -> None:
    pairing, live = Pairing(random.Random(6)), candidates(1)
    pairing.refused("peer0", code=code, retry_after_s=0.0, now_s=0.0)
    for _ in range(3):
        pairing.open_round([], num_live=10)
        assert chosen(pairing, live, 1e6) == ""
        assert not pairing.hopeful(live, 1e6, latest_s=1e6)


def test_a_dead_peer_is_remembered_over_rounds_and_then_asked_again() -> None:
    pairing, live = Pairing(random.Random(7)), candidates(1)
    pairing.failed("peer0", now_s=0.0)
    pairing.open_round([], num_live=10)
    assert chosen(pairing, live, FAILED_RETRY_S - 0.1) == ""
    assert not pairing.hopeful(live, FAILED_RETRY_S - 0.1, latest_s=FAILED_RETRY_S - 0.1)
    assert chosen(pairing, live, FAILED_RETRY_S) == "peer0"


def test_dead_peers_are_not_remembered_without_end() -> None:
    pairing = Pairing(random.Random(0))
    for number in range(1000):
        pairing.failed(f"peer{number}", now_s=float(number))
    assert len(pairing._memory) <= FAILED_RETRY_S + 1


def test_hope_ends_when_the_last_of_many_has_said_no() -> None:
    pairing, live = Pairing(random.Random(8)), candidates(4)
    answers: list[Callable[[str], None]] = [
        lambda peer: pairing.refused(peer, code=RefuseCode.TAKEN, retry_after_s=9.0, now_s=0.0),
        lambda peer: pairing.refused(peer, code=RefuseCode.TOO_FAR, retry_after_s=9.0, now_s=0.0),
        lambda peer: pairing.refused(peer, code=RefuseCode.OTHER_SPEC, retry_after_s=0.0, now_s=0.0),
        lambda peer: pairing.failed(peer, now_s=0.0),
    ]
    for candidate, answer in zip(live, answers, strict=True):
        assert pairing.hopeful(live, 0.0, latest_s=0.0)
        answer(candidate.peer_id)
    assert not pairing.hopeful(live, 0.0, latest_s=0.0)


def test_same_seed_same_draws() -> None:
    def draws(seed: int) -> list[str]:
        pairing, live, names = Pairing(random.Random(seed)), candidates(8), []
        for _ in range(50):
            pairing.open_round([], num_live=10)
            names.append(chosen(pairing, live, 0.0))
        return names

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


@pytest.mark.parametrize(
    ("mine", "theirs", "far_s"),
    [
        (boundary(10.0, 20.0), boundary(15.0, 20.0), 0.0),
        (boundary(0.0, 20.0), boundary(15.0, 20.0), 3.0),
        (boundary(0.0, 200.0), boundary(15.0, 20.0), 3.0),  # the shorter round counts
        (boundary(None, None), boundary(1e6, 20.0), 0.0),  # nothing is measured yet, so nothing is refused
        (boundary(1e6, 20.0), boundary(None, None), 0.0),
        (boundary(0.0, -1.0), boundary(0.0, 20.0), 0.6),  # an invalid value from a stranger is refused
    ],
)
def test_boundaries_further_apart_than_a_part_of_the_shorter_round_do_not_fit(
    mine: Boundary, theirs: Boundary, far_s: float
) -> None:
    assert too_far_s(mine, theirs) == pytest.approx(far_s)
    assert too_far_s(theirs, mine) == too_far_s(mine, theirs)
    assert lateness_s(mine, theirs) == lateness_s(theirs, mine)


def test_the_last_partner_is_drawn_only_when_there_is_nobody_else() -> None:
    peers = [Candidate(name, address=name) for name in "abc"]
    pairing = Pairing(random.Random(0))
    pairing.met("a")
    drawn = set()
    for _ in range(50):
        pairing.open_round([], num_live=10)
        candidate = pairing.choose(peers, 0.0, latest_s=0.0)
        assert candidate is not None
        drawn.add(candidate.peer_id)
    assert drawn == {"b", "c"}
    pairing.open_round([], num_live=10)
    assert pairing.choose(peers[:1], 0.0, latest_s=0.0) == peers[0]


def test_in_a_patient_round_others_are_waited_for_and_the_last_partner_is_not_asked() -> None:
    pairing, peers = Pairing(random.Random(0)), candidates(3)
    pairing.met("peer0")
    pairing.open_round([], num_live=10, is_patient=True)
    for peer in ("peer1", "peer2"):
        pairing.refused(peer, code=RefuseCode.TOO_FAR, retry_after_s=5.0, now_s=0.0)
    assert chosen(pairing, peers, 1.0, latest_s=10.0) == ""
    assert pairing.hopeful(peers, 1.0, latest_s=10.0)
    assert chosen(pairing, peers, 5.0, latest_s=10.0) in ("peer1", "peer2")
    assert not pairing.hopeful(peers, 1.0, latest_s=4.0), "too late: to go to the same middle again is of no use"
    assert chosen(pairing, peers[:1], 1.0, latest_s=4.0) == "peer0", "nobody else is here"


def test_a_peer_that_cannot_be_called_is_not_drawn_and_not_waited_for() -> None:
    pairing = Pairing(random.Random(0))
    peers = [Candidate("closed", "", can_be_called=False), Candidate("open", "host:1")]
    assert {drawn.peer_id for _ in range(20) if (drawn := pairing.choose(peers, 0.0, latest_s=0.0))} == {"open"}
    assert not pairing.hopeful(peers[:1], 0.0, latest_s=0.0)


def test_offers_of_a_peer_that_has_had_its_share_are_refused_until_rounds_have_passed() -> None:
    pairing, live = Pairing(random.Random(0)), candidates(4)
    for _ in range(2):
        assert not pairing.has_had_its_share("peer0")
        pairing.began("peer0")
    assert pairing.has_had_its_share("peer0")
    assert not pairing.has_had_its_share("peer1")
    for _ in range(4):
        pairing.open_round(live, num_live=5)
    assert not pairing.has_had_its_share("peer0")


@pytest.mark.parametrize("can_be_called", [False, True])
def test_made_up_records_do_not_shrink_the_share_of_honest_peers(can_be_called: bool) -> None:
    """Three honest partners take turns; a stranger has 45 records of peers that do not answer or have no address."""
    pairing, honest = Pairing(random.Random(0)), candidates(3)
    invented = [Candidate(f"invented{number}", "host:9", can_be_called=can_be_called) for number in range(45)]
    num_refused = 0
    for index in range(60):
        now_s = 20.0 * index
        pairing.open_round([*honest, *invented], num_live=49)
        if can_be_called:
            for peer in invented:
                pairing.failed(peer.peer_id, now_s=now_s)
        partner = honest[index % 3].peer_id
        num_refused += pairing.has_had_its_share(partner)
        pairing.began(partner)
    assert num_refused <= 3, "before the first draws have failed"


def test_who_has_had_more_than_its_share_is_drawn_only_when_there_is_nobody_else() -> None:
    pairing, live = Pairing(random.Random(0)), candidates(4)
    for _ in range(3):
        pairing.began("peer0")
    drawn = set()
    for _ in range(50):
        pairing.open_round([], num_live=10**9)
        drawn.add(chosen(pairing, live, 0.0))
    assert drawn == {"peer1", "peer2", "peer3"}
    pairing.open_round([], num_live=10**9)
    assert chosen(pairing, live[:1], 0.0) == "peer0"


@pytest.mark.parametrize("code", [RefuseCode.OVER_SHARE, RefuseCode.UNLISTED])
def test_after_such_a_refusal_another_peer_is_drawn(code: RefuseCode) -> None:
    pairing, live = Pairing(random.Random(0)), candidates(2)
    first = chosen(pairing, live, 0.0)
    pairing.refused(first, code=code, retry_after_s=5.0, now_s=0.0)
    second = ""
    while not second:  # the first one may be drawn again, and is then waited for
        pairing.refused(first, code=code, retry_after_s=5.0, now_s=0.0)
        second = chosen(pairing, live, 1.0)
    assert second != first
