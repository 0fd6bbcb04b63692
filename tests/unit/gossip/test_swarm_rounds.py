"""Rounds of many peers in memory: both sides agree on each pair, no peer waits in vain, strangers read the reason."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import NamedTuple

import pytest
from harness.patience import AT_ONCE_S, PATIENCE_S, PATIENT
from harness.rounds import Vectors, end_round, one_round, open_round, wait_until
from harness.specs import published

from noloco_p2p.gossip.deadlines import Deadlines
from noloco_p2p.gossip.frames import Chunk, Part, Ready, SectionName
from noloco_p2p.gossip.outcome import Alone, Half, Outcome, Swapped
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.faults import At, Cut, FaultPlan, Stall
from noloco_p2p.testing.peers import MemorySwarm

SPEC = RunSpec(name="rounds", outer=published())


@pytest.fixture
def swarm() -> Iterator[MemorySwarm]:
    with MemorySwarm(SPEC, deadlines=PATIENT) as swarm:
        yield swarm


def partner(outcome: Outcome) -> str:
    return "" if isinstance(outcome, Alone) else outcome.received.partner


def test_a_peer_without_a_swarm_steps_alone_at_once(swarm: MemorySwarm) -> None:
    began_s = time.monotonic()
    outcomes = one_round([swarm.peer("a")], [Vectors.random(1)], wait_s=PATIENCE_S)
    assert outcomes == [Alone("no other live peer")]
    assert time.monotonic() - began_s < AT_ONCE_S


def test_of_three_peers_two_swap_and_one_steps_alone_without_waiting(swarm: MemorySwarm) -> None:
    peers, vectors = [swarm.peer(name) for name in "abc"], [Vectors.random(seed) for seed in range(3)]
    for index in range(3):
        began_s = time.monotonic()
        outcomes = one_round(peers, vectors, wait_s=PATIENCE_S, round_index=index)
        assert time.monotonic() - began_s < AT_ONCE_S, "the odd one does not wait for outer.max_wait_s"
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Alone", "Swapped", "Swapped"]
        by_name = dict(zip("abc", outcomes, strict=True))
        for name, outcome in by_name.items():
            assert isinstance(outcome, Alone) or partner(by_name[partner(outcome)]) == name


def test_offers_in_a_ring_do_not_refuse_each_other_for_ever() -> None:
    """a asks c, c asks b and b asks a at one moment, so each is busy; their retries must not stay in step."""
    for names in (("a", "b", "c"), ("d", "e", "f")):
        with MemorySwarm(SPEC) as swarm:
            peers = [swarm.peer(name) for name in names]
            outcomes = one_round(peers, [Vectors.random(seed) for seed in range(3)], wait_s=PATIENCE_S)
        assert sum(isinstance(outcome, Swapped) for outcome in outcomes) == 2


def test_sixteen_peers_in_lock_step_pair_off_round_after_round() -> None:
    """All start at once and train at one speed. A swap may join rounds whose numbers differ by one."""
    num_peers, num_rounds, inner_steps, step_s = 16, 5, 5, 0.06
    names = [f"peer-{number:02}" for number in range(num_peers)]

    with MemorySwarm(RunSpec(name="rounds", outer=published(inner_steps=inner_steps))) as swarm:
        peers = {name: swarm.peer(name) for name in names}
        start = Barrier(num_peers)

        def train(name: str) -> list[Outcome]:
            outcomes, own = [], Vectors.random(1, num_elements=16)
            start.wait(PATIENCE_S)
            for index in range(num_rounds):
                open_round(peers[name], own, round_index=index)
                for _ in range(inner_steps):
                    time.sleep(step_s)  # stands in for training
                    peers[name].exchange.step_rate.step(time.monotonic())
                outcomes.append(end_round(peers[name], own, wait_s=PATIENCE_S))
            return outcomes

        began_s = time.monotonic()
        with ThreadPoolExecutor(num_peers) as threads:
            by_name = dict(zip(names, threads.map(train, names), strict=True))
        assert time.monotonic() - began_s < AT_ONCE_S, "nobody waits for the other who waits for him"

    swaps = {
        (name, index): (outcome.received.partner, outcome.received.partner_round)
        for name, outcomes in by_name.items()
        for index, outcome in enumerate(outcomes)
        if not isinstance(outcome, Alone)
    }
    assert all(swaps[theirs] == ours for ours, theirs in swaps.items()), "each swap is one of both sides"
    assert len(swaps) >= 0.9 * num_peers * num_rounds
    couples = {frozenset((name, partner)) for (name, _), (partner, _) in swaps.items()}
    assert len(couples) > 1.5 * num_peers, "not the same couples again and again"


def test_dead_peers_in_the_directory_are_passed_over_within_the_round(swarm: MemorySwarm) -> None:
    for number in range(5):
        swarm.network.listed[f"dead-{number}"] = None
    peers = [swarm.peer("a"), swarm.peer("b")]
    outcomes = one_round(peers, [Vectors.random(1), Vectors.random(2)], wait_s=PATIENCE_S)
    assert [partner(outcome) for outcome in outcomes] == ["b", "a"]


@pytest.mark.parametrize("at", [At(Chunk), At(Chunk, section=SectionName.OUTER_MOMENTUM), At(Ready, part=Part.EARLY)])
def test_a_partner_that_dies_before_the_early_part_is_replaced_in_the_same_round(at: At) -> None:
    """b and c are free for each other only after a has died during its swap with b."""
    with MemorySwarm(SPEC) as swarm:
        faults = FaultPlan().fail_at(at, send=Cut()).wrapper(on_fault=lambda: swarm.network.vanish("a"))
        a, b = swarm.peer("a", wrap=faults, wrap_accepted=faults), swarm.peer("b")
        open_round(a, Vectors.random(1))
        open_round(b, Vectors.random(2))
        wait_until(lambda: faults.fired > 0 and b.driver.phase is not RoundPhase.SWAPPING)
        c = swarm.peer("c")
        open_round(c, Vectors.random(3))
        wait_until(lambda: b.driver.phase is RoundPhase.EARLY and c.driver.phase is RoundPhase.EARLY)
        assert "..a" in b.driver.last_fault


def test_a_partner_that_freezes_before_the_early_part_is_replaced_too() -> None:
    short = Deadlines(offer_s=0.3, status_s=0.3, progress_s=0.3, farewell_s=0.05)
    with MemorySwarm(SPEC, deadlines=short) as swarm:
        faults = FaultPlan().fail_at(At(Chunk), send=Stall()).wrapper(on_fault=lambda: swarm.network.vanish("a"))
        a, b = swarm.peer("a", wrap=faults, wrap_accepted=faults), swarm.peer("b")
        open_round(a, Vectors.random(1))
        open_round(b, Vectors.random(2))
        wait_until(lambda: faults.fired > 0)
        assert (b.driver.phase, b.driver.partner) == (RoundPhase.SWAPPING, "a"), "nobody has told it"
        c = swarm.peer("c")
        open_round(c, Vectors.random(3))
        wait_until(lambda: b.driver.phase is RoundPhase.EARLY and c.driver.phase is RoundPhase.EARLY)
        assert "..a failed: no progress for 0.3 s" in b.driver.last_fault
        assert (b.driver.partner, c.driver.partner) == ("c", "b")


def test_a_partner_that_dies_after_the_early_part_leaves_a_half(swarm: MemorySwarm) -> None:
    a, b = swarm.peer("a"), swarm.peer("b")
    open_round(a, Vectors.random(1))
    open_round(b, Vectors.random(2))
    wait_until(lambda: a.driver.phase is RoundPhase.EARLY and b.driver.phase is RoundPhase.EARLY)
    swarm.kill(b)
    began_s = time.monotonic()
    outcome = end_round(a, Vectors.random(1), wait_s=PATIENCE_S)
    assert isinstance(outcome, Half)
    assert time.monotonic() - began_s < AT_ONCE_S
    outcomes = one_round([a, swarm.peer("c")], [Vectors.random(1), Vectors.random(3)], wait_s=PATIENCE_S, round_index=1)
    assert [type(outcome) for outcome in outcomes] == [Swapped, Swapped], "the next round finds another"


# peers of another kind


class Stranger(NamedTuple):
    words: tuple[str, ...]
    spec: RunSpec = SPEC
    protocol_version: str = "1.0"
    layout: str = "this-model"


@pytest.mark.parametrize(
    "stranger",
    [
        Stranger(("protocol version", "1.0", "2.0"), protocol_version="2.0"),
        Stranger(("run", "rounds", "another"), spec=RunSpec(name="another", outer=published())),
        Stranger(("spec digest", SPEC.digest()[:16]), spec=RunSpec(name="rounds", outer=published(alpha=0.3))),
        Stranger(("model layout", "this-model", "another-model"), layout="another-model"),
    ],
    ids=lambda stranger: stranger.words[0],
)
def test_a_peer_of_another_kind_is_refused_with_the_difference(swarm: MemorySwarm, stranger: Stranger) -> None:
    a = swarm.peer("a")
    b = swarm.peer("b", spec=stranger.spec, protocol_version=stranger.protocol_version)
    a.layout, b.layout = "this-model", stranger.layout
    began_s = time.monotonic()
    outcomes = one_round([a, b], [Vectors.random(1), Vectors.random(2)], wait_s=PATIENCE_S)
    assert [type(outcome) for outcome in outcomes] == [Alone, Alone]
    assert time.monotonic() - began_s < AT_ONCE_S
    told = a.driver.last_fault + b.driver.last_fault  # the peer that makes the first offer is refused
    assert "is not in this run" in told
    assert all(word in told for word in stranger.words)
    assert a.driver.traffic.bytes_received == b.driver.traffic.bytes_received == 0, "refused before any payload"


@pytest.mark.parametrize("state", ["paused", "leaving", "done"])
def test_a_peer_that_does_not_train_refuses(swarm: MemorySwarm, state: str) -> None:
    a, b = swarm.peer("a"), swarm.peer("b")
    b.driver.peer_state = state
    open_round(a, Vectors.random(1))
    outcome = end_round(a, Vectors.random(1), wait_s=PATIENCE_S)
    assert isinstance(outcome, Alone)
    assert f"I am {state}" in outcome.reason


def test_a_peer_that_meets_its_own_id_says_what_is_wrong(swarm: MemorySwarm) -> None:
    """The key was copied, so the offer reaches a peer with the caller's own id."""
    a = swarm.peer("a")
    open_round(a, Vectors.random(1))
    swarm.network.listed["twin"] = None
    swarm.network.add("twin", swarm.network.service("a"))
    outcome = end_round(a, Vectors.random(1), wait_s=PATIENCE_S)
    assert isinstance(outcome, Alone)
    assert "do not use one identity key on two machines" in outcome.reason


def test_who_cannot_be_reached_is_remembered_as_long_as_it_is_listed(swarm: MemorySwarm) -> None:
    a = swarm.peer("a")
    open_round(a, Vectors.random(1))
    for name in ("dead-1", "dead-2"):
        swarm.network.listed = {"a": None, name: None}
        wait_until(lambda name=name: name in a.driver.round.unreachable)
        assert a.driver.round.unreachable == {name}
