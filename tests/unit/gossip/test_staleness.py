"""Partners some rounds apart: the weight of each side, the text of a refusal, and which peer has to catch up."""

from __future__ import annotations

import pytest
from harness.rounds import Vectors, end_round, open_round, together, wait_until
from harness.specs import published
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.gossip.frames import Boundary, RefuseCode
from noloco_p2p.gossip.outcome import Alone
from noloco_p2p.gossip.staleness import (
    FRESH_ROUNDS,
    STALE_ROUNDS,
    age_weight,
    is_left_behind,
    refuse_stale,
    rounds_apart,
)
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.peers import MemorySwarm

STEPS = 10_000


def at(progress: float, *, round_index: int = 0, inner_steps: int = 100) -> Boundary:
    return Boundary(round_index, None, None, progress, inner_steps)


places = st.floats(0.0, 1.0)
lengths = st.integers(1, 1000)


@given(places, places, lengths, lengths)
def test_both_sides_come_to_the_same_bits(one: float, other: float, steps: int, other_steps: int) -> None:
    mine, theirs = at(one, inner_steps=steps), at(other, inner_steps=other_steps)
    age = rounds_apart(mine, theirs, total_steps=STEPS)
    assert age == rounds_apart(theirs, mine, total_steps=STEPS)
    assert 0 < age_weight(age) <= 1
    refusals = [refuse_stale(*pair, total_steps=STEPS) is not None for pair in ((mine, theirs), (theirs, mine))]
    assert refusals == [age > STALE_ROUNDS] * 2


@pytest.mark.parametrize(
    ("rounds", "weight"), [(0, 1), (1, 1), (FRESH_ROUNDS, 1), (2 * FRESH_ROUNDS, 0.5), (STALE_ROUNDS, 0.125)]
)
def test_an_older_partner_counts_less(rounds: float, weight: float) -> None:
    age = rounds_apart(at(0.5), at(0.5 - rounds * 100 / STEPS), total_steps=STEPS)
    assert age == pytest.approx(rounds)
    assert age_weight(age) == pytest.approx(weight)


def test_who_tells_no_length_of_its_round_is_as_old_as_with_the_other_ones() -> None:
    silent, far = at(0.1, inner_steps=0), at(0.9)
    expected = rounds_apart(at(0.1), far, total_steps=STEPS)
    assert rounds_apart(silent, far, total_steps=STEPS) == rounds_apart(far, silent, total_steps=STEPS) == expected
    assert refuse_stale(far, silent, total_steps=STEPS) is not None
    assert rounds_apart(silent, at(0.9, inner_steps=0), total_steps=STEPS) == 0


def test_a_longer_round_than_this_peers_does_not_make_a_distant_partner_near() -> None:
    here, far = at(0.1, inner_steps=10), at(0.1 + 2 * STALE_ROUNDS * 10 / STEPS, inner_steps=1000)
    assert rounds_apart(here, far, total_steps=STEPS) == pytest.approx(2 * STALE_ROUNDS)
    assert refuse_stale(here, far, total_steps=STEPS) is not None


def test_the_refusal_names_both_rounds_and_who_has_to_move() -> None:
    ahead, behind = at(0.6, round_index=60), at(0.1, round_index=9)
    told = refuse_stale(ahead, behind, total_steps=STEPS)
    assert told is not None
    assert told.code is RefuseCode.STALE
    assert told.sentence == (
        "I am in round 60 (60.00 % of the run) and you are in round 9 (10.00 % of the run); "
        "you are too far behind and must fetch the state of a live peer"
    )
    told = refuse_stale(behind, ahead, total_steps=STEPS)
    assert told is not None
    assert told.sentence.endswith("I am too far behind and must catch up")


def test_most_peers_must_be_far_ahead_before_one_catches_up() -> None:
    far, near = 0.5 + 1.1 * STALE_ROUNDS * 0.01, 0.5 + 0.9 * STALE_ROUNDS * 0.01
    assert is_left_behind(0.5, [far, far, 0.5], round_progress=0.01)
    assert not is_left_behind(0.5, [1.0, 0.5, 0.5], round_progress=0.01), "one that says so is not the swarm"
    assert not is_left_behind(0.5, [near, near], round_progress=0.01)
    assert not is_left_behind(0.5, [0.1, 0.1], round_progress=0.01), "those ahead wait for nobody"
    assert not is_left_behind(0.5, [], round_progress=0.01)


def test_peers_too_far_apart_do_not_swap_and_read_why() -> None:
    spec = RunSpec(name="stale", outer=published(inner_steps=10, max_wait_s=0.5), total_steps=STEPS)
    with MemorySwarm(spec) as swarm:
        ahead, behind = swarm.peer("a"), swarm.peer("b")
        vectors = Vectors.random(1)
        open_round(ahead, vectors, round_index=500, progress=0.5)
        open_round(behind, vectors, round_index=3, progress=0.003)
        wait_until(lambda: any("round 500" in peer.driver.round.reason for peer in (ahead, behind)))
        outcomes = together(
            lambda: end_round(ahead, vectors, wait_s=0.5), lambda: end_round(behind, vectors, wait_s=0.5)
        )
    assert all(isinstance(outcome, Alone) for outcome in outcomes)
    told = " ".join(outcome.reason for outcome in outcomes if isinstance(outcome, Alone))
    assert "round 500" in told
    assert "round 3 " in told


def test_a_round_longer_than_the_run_allows_is_refused_by_either_side() -> None:
    """The declared length would give the longer round more weight."""
    spec = RunSpec(name="long", outer=published(inner_steps=10, max_wait_s=0.5), total_steps=STEPS)
    with MemorySwarm(spec) as swarm:
        honest, liar = swarm.peer("a"), swarm.peer("b")
        vectors = Vectors.random(1)
        liar.exchange.open(0, progress=0.0, state=vectors.state(), inner_steps=60_000)
        open_round(honest, vectors, progress=0.002)
        wait_until(lambda: "60000 inner steps" in honest.driver.last_fault + liar.driver.round.reason)
        alone = together(lambda: end_round(honest, vectors, wait_s=0.5), lambda: end_round(liar, vectors, wait_s=0.5))
    assert all(isinstance(outcome, Alone) for outcome in alone)
