"""A swap in memory without faults, or with a late part after the boundary: what each side commits, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from harness.patience import AT_ONCE_S, PATIENCE_S, PATIENT
from harness.rounds import Vectors, end_round, one_round, open_round, together, wait_until
from harness.specs import FP32, published

from noloco_p2p.codec import CHUNK_ELEMENTS, CODEC_NAMES, chunk_bounds
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Alone, Half, Outcome, Received, Swapped
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.spec import CodecName, CodecSpec, RunSpec
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm

SPEC = RunSpec(name="swap", codec=FP32, outer=published())
A, B = Vectors.random(1), Vectors.random(2)
SECTIONS = {
    SectionName.SLOW_WEIGHTS: "slow_weights",
    SectionName.OUTER_MOMENTUM: "outer_momentum",
    SectionName.OUTER_GRADIENT: "outer_gradient",
}


@pytest.fixture
def swarm() -> Iterator[MemorySwarm]:
    with MemorySwarm(SPEC, deadlines=PATIENT) as swarm:
        yield swarm


def received(outcome: Outcome) -> Received:
    assert isinstance(outcome, Swapped | Half), outcome
    return outcome.received


def early_committed(*peers: MemoryPeer) -> None:
    wait_until(lambda: all(peer.driver.phase is RoundPhase.EARLY for peer in peers))


@pytest.mark.parametrize("num_elements", [1, 100, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1])
def test_both_sides_commit_everything_of_the_other(swarm: MemorySwarm, num_elements: int) -> None:
    vectors = [Vectors.random(seed, num_elements=num_elements) for seed in (1, 2)]
    before = [[getattr(own, name).clone() for name in SECTIONS.values()] for own in vectors]
    outcomes = one_round([swarm.peer("a"), swarm.peer("b")], vectors, wait_s=PATIENCE_S)
    assert [type(outcome) for outcome in outcomes] == [Swapped, Swapped]
    for outcome, own, theirs in zip(outcomes, vectors, reversed(vectors), strict=True):
        for section, name in SECTIONS.items():
            pair = received(outcome).sections[section]
            for index, (start, stop) in enumerate(chunk_bounds(num_elements)):
                expected = getattr(theirs, name)[start:stop] * 0.5 - getattr(own, name)[start:stop] * 0.5
                assert torch.equal(pair.half_difference(index), expected)
    for own, kept in zip(vectors, before, strict=True):
        assert all(torch.equal(getattr(own, name), old) for name, old in zip(SECTIONS.values(), kept, strict=True))


@pytest.mark.parametrize("codec", [name for name in CODEC_NAMES if name != "fp32"])
def test_the_two_half_differences_are_opposite_bit_for_bit(codec: str) -> None:
    momentum = codec if codec in get_args(CodecName) else "int8"
    weights = "int8" if codec == "int4" else momentum
    coded = CodecSpec.model_validate({"slow_weights": weights, "outer_momentum": momentum, "outer_gradient": codec})
    with MemorySwarm(SPEC.model_copy(update={"codec": coded})) as swarm:
        one, other = one_round([swarm.peer("a"), swarm.peer("b")], [A, B], wait_s=PATIENCE_S)
    for section in SECTIONS:
        ours, theirs = (received(outcome).sections[section].half_difference(0) for outcome in (one, other))
        assert torch.equal(ours, -theirs)
        assert ours.abs().max() > 0


def test_momentum_stays_at_home_when_the_spec_says_so() -> None:
    with MemorySwarm(RunSpec(name="swap", outer=published(swap_momentum=False), codec=FP32)) as swarm:
        outcomes = one_round([swarm.peer("a"), swarm.peer("b")], [A, B], wait_s=PATIENCE_S)
    for outcome in outcomes:
        assert set(received(outcome).sections) == {SectionName.SLOW_WEIGHTS, SectionName.OUTER_GRADIENT}


def test_without_a_late_part_the_early_part_is_a_whole_swap_and_no_boundary_waits() -> None:
    spec = SPEC.with_changes({"codec.outer_gradient": "none"})
    with MemorySwarm(spec, deadlines=PATIENT) as swarm:
        a, b = swarm.peer("a"), swarm.peer("b")
        for index in range(3):
            for peer, own in ((a, A), (b, B)):
                open_round(peer, own, round_index=index)
            wait_until(lambda: all(peer.driver.phase is RoundPhase.DONE for peer in (a, b)))
            outcomes = []
            for peer in (a, b):  # in one thread, so that the other peer is not at its boundary
                peer.exchange.stage(lambda: pytest.fail("nothing codes a gradient that does not travel"))
                outcomes.append(peer.exchange.collect(0.0))
            assert [type(outcome) for outcome in outcomes] == [Swapped, Swapped]
            ours, theirs = (received(outcome).sections for outcome in outcomes)
            assert set(ours) == set(theirs) == {SectionName.SLOW_WEIGHTS, SectionName.OUTER_MOMENTUM}
            for name in ours:
                assert torch.equal(ours[name].half_difference(0), -theirs[name].half_difference(0))
            assert (received(outcomes[0]).bytes_sent, received(outcomes[0]).bytes_received) == (800, 800)
            assert a.exchange.late(index + 1) is None


def test_what_was_sent_and_received_is_counted(swarm: MemorySwarm) -> None:
    peers = [swarm.peer("a"), swarm.peer("b")]
    for outcome in one_round(peers, [A, B], wait_s=PATIENCE_S):
        assert (received(outcome).bytes_sent, received(outcome).bytes_received) == (1200, 1200)
    for peer in peers:
        assert (peer.driver.traffic.bytes_sent, peer.driver.traffic.bytes_received) == (1200, 1200)


def test_rounds_follow_each_other(swarm: MemorySwarm) -> None:
    peers = [swarm.peer("a"), swarm.peer("b")]
    for index in range(5):
        outcomes = one_round(peers, [A, B], wait_s=PATIENCE_S, round_index=index)
        assert [received(outcome).partner_round for outcome in outcomes] == [index, index]


# a late part after the boundary


def test_an_eager_peer_takes_half_now_and_the_rest_once_as_a_correction(swarm: MemorySwarm) -> None:
    a, b = swarm.peer("a"), swarm.peer("b")
    open_round(a, A)
    open_round(b, B)
    early_committed(a, b)
    half = end_round(a, A, wait_s=0.0)
    assert isinstance(half, Half)
    assert set(half.received.sections) == {SectionName.SLOW_WEIGHTS, SectionName.OUTER_MOMENTUM}
    assert a.exchange.late(1) is None

    open_round(a, A, round_index=1)
    whole = end_round(b, B, wait_s=PATIENCE_S)
    assert isinstance(whole, Swapped)
    wait_until(lambda: bool(a.driver.corrections))
    correction = a.exchange.late(1)
    assert correction is not None
    assert correction.partner == "b"
    theirs = received(whole).sections[SectionName.OUTER_GRADIENT]
    assert torch.equal(correction.gradient.half_difference(0), -theirs.half_difference(0))
    assert a.exchange.late(1) is None


def test_a_late_part_that_misses_the_next_boundary_is_dropped_on_both_sides(swarm: MemorySwarm) -> None:
    a, b = swarm.peer("a"), swarm.peer("b")
    open_round(a, A)
    open_round(b, B)
    early_committed(a, b)
    assert isinstance(end_round(a, A, wait_s=0.0), Half)
    open_round(a, A, round_index=1)
    end_round(a, A, wait_s=0.0)  # reaches the next boundary
    began_s = time.monotonic()
    assert isinstance(end_round(b, B, wait_s=PATIENCE_S), Half)
    assert time.monotonic() - began_s < AT_ONCE_S, "b learned of it, and did not wait in vain"
    assert a.exchange.late(1) is None
    assert b.exchange.late(1) is None


def test_rounds_that_do_not_overlap_find_nobody(swarm: MemorySwarm) -> None:
    b = swarm.peer("b")
    open_round(b, B)
    assert isinstance(end_round(b, B, wait_s=0.0), Alone)
    a = swarm.peer("a")
    open_round(a, A)
    assert isinstance(end_round(a, A, wait_s=0.0), Alone)


# faults of this peer itself


def test_a_gradient_that_is_not_finite_leaves_the_swap_half_at_once(swarm: MemorySwarm) -> None:
    a, b = swarm.peer("a"), swarm.peer("b")
    broken = Vectors(A.slow_weights, A.outer_momentum, torch.full((100,), torch.nan))
    open_round(a, broken)
    open_round(b, B)
    early_committed(a, b)
    began_s = time.monotonic()
    outcomes = together(lambda: end_round(a, broken, wait_s=PATIENCE_S), lambda: end_round(b, B, wait_s=PATIENCE_S))
    assert [type(outcome) for outcome in outcomes] == [Half, Half]
    assert isinstance(outcomes[0], Half)
    assert "gradient" in outcomes[0].reason
    assert time.monotonic() - began_s < AT_ONCE_S, "nobody waits for a gradient that cannot be sent"


def test_weights_that_are_not_finite_are_not_sent_and_are_no_fault_of_the_partner(swarm: MemorySwarm) -> None:
    broken = Vectors(torch.full((100,), torch.inf), A.outer_momentum, A.outer_gradient)
    a, b = swarm.peer("a"), swarm.peer("b")
    struck: list[str] = []
    for peer in (a, b):
        peer.driver.on_corrupt = lambda peer_id, reason: struck.append(peer_id)
    outcomes = one_round([a, b], [broken, B], wait_s=PATIENCE_S)
    assert [type(outcome) for outcome in outcomes] == [Alone, Alone]
    assert "this peer's slow_weights cannot be sent" in a.driver.last_fault
    assert not struck


def test_an_outcome_that_nobody_collected_does_not_stop_the_next_round(swarm: MemorySwarm) -> None:
    """This happens after a suspend: the training thread gave up waiting for the network thread, and continued."""
    a, b = swarm.peer("a"), swarm.peer("b")
    open_round(a, A)
    open_round(b, B)
    early_committed(a, b)
    open_round(a, A, round_index=1)
    assert isinstance(end_round(b, B, wait_s=PATIENCE_S), Half)
    outcomes = one_round([swarm.peer("c"), a], [B, A], wait_s=PATIENCE_S, round_index=2)
    assert [type(outcome) for outcome in outcomes] == [Swapped, Swapped]
    assert a.exchange.late(1) is None


def test_training_goes_on_when_the_network_thread_is_gone() -> None:
    with MemorySwarm(SPEC) as swarm:
        a = swarm.peer("a")
        open_round(a, A)
    open_round(a, A, round_index=1)
    assert isinstance(end_round(a, A, wait_s=PATIENCE_S), Alone)
