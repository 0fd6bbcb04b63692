"""Swaps with slow weights and momentum in modulo coding: sizes, opposite halves, broken bounds, and corrections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from harness.patience import PATIENCE_S, PATIENT
from harness.rounds import Vectors, end_round, one_round, open_round, wait_until
from harness.specs import published

from noloco_p2p.codec import CHUNK_ELEMENTS, chunk_bounds, section_bytes
from noloco_p2p.codec.base import Sized
from noloco_p2p.codec.blocks import INT4, INT8
from noloco_p2p.codec.modulo import EIGHT_BITS, FOUR_BITS, MODULO4, MODULO8, SIX_BITS
from noloco_p2p.gossip.frames import Chunk, Grid, Header, SectionName
from noloco_p2p.gossip.outcome import Alone, Half, Received, Swapped
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.gossip.seams import FrameStream
from noloco_p2p.spec import CodecSpec, TrainerSpec
from noloco_p2p.testing.faults import Announce, At, FaultPlan, FlipBit, Replace
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm

NUM_ELEMENTS = 2 * CHUNK_ELEMENTS + 1000
CODECS = CodecSpec(slow_weights="modulo8", outer_momentum="modulo8", outer_gradient="int4")
SPEC = TrainerSpec(name="modulo", codec=CODECS, outer=published())
MODULO_BYTES = sum(MODULO8.num_bytes(stop - start) for start, stop in chunk_bounds(NUM_ELEMENTS))
INT8_BYTES = section_bytes(INT8, NUM_ELEMENTS)
INT4_BYTES = section_bytes(INT4, NUM_ELEMENTS)


@pytest.fixture
def swarm() -> Iterator[MemorySwarm]:
    with MemorySwarm(SPEC, deadlines=PATIENT) as swarm:
        yield swarm


def near(seed: int, *, apart: float = 1e-3) -> Vectors:
    """Return vectors that differ by about `apart` between seeds, and whose own values are much larger."""
    common, own = (Vectors.random(each, num_elements=NUM_ELEMENTS) for each in (99, seed))
    return Vectors(
        common.slow_weights + apart * own.slow_weights,
        1e-2 * common.outer_momentum + apart * own.outer_momentum,
        own.outer_gradient,
    )


def swapped(peers: list[MemoryPeer], vectors: list[Vectors], round_index: int) -> list[Received]:
    outcomes = one_round(peers, vectors, wait_s=PATIENCE_S, round_index=round_index)
    assert all(isinstance(outcome, Swapped) for outcome in outcomes), outcomes
    return [outcome.received for outcome in outcomes if isinstance(outcome, Swapped)]


def halves(received: Received, name: SectionName) -> torch.Tensor:
    pair = received.sections[name]
    return torch.cat([pair.half_difference(index) for index in range(len(chunk_bounds(NUM_ELEMENTS)))])


def test_the_first_swap_learns_the_bounds_and_the_next_ones_send_a_byte_a_number(swarm: MemorySwarm) -> None:
    peers, vectors = [swarm.peer("a"), swarm.peer("b")], [near(1), near(2)]
    first, second = (swapped(peers, vectors, index)[0] for index in range(2))
    assert first.bytes_sent == 2 * INT8_BYTES + INT4_BYTES
    assert second.bytes_sent == 2 * MODULO_BYTES + INT4_BYTES
    exact = (vectors[1].slow_weights - vectors[0].slow_weights) / 2
    error = (halves(second, SectionName.SLOW_WEIGHTS) - exact).abs().max()
    assert error < (halves(first, SectionName.SLOW_WEIGHTS) - exact).abs().max() / 20
    assert [peer.driver.traffic.modulo_chunks for peer in peers] == [6, 6]
    assert [peer.driver.traffic.broken_chunks for peer in peers] == [0, 0]


def test_modulo4_sends_half_a_byte_a_number() -> None:
    spec = SPEC.with_changes({"codec.slow_weights": "modulo4", "outer.alpha": 0.0})
    with MemorySwarm(spec, deadlines=PATIENT) as swarm:
        peers, vectors = [swarm.peer("a"), swarm.peer("b")], [near(1), near(2)]
        first, second = (swapped(peers, vectors, index)[0] for index in range(2))
        ours, theirs = (halves(received, SectionName.SLOW_WEIGHTS) for received in swapped(peers, vectors, 2))
    num_bytes = sum(MODULO4.num_bytes(stop - start) for start, stop in chunk_bounds(NUM_ELEMENTS))
    assert (first.bytes_sent, second.bytes_sent) == (INT8_BYTES + INT4_BYTES, num_bytes + INT4_BYTES)
    exact = (vectors[1].slow_weights - vectors[0].slow_weights) / 2
    assert (ours - exact).abs().max() < exact.abs().max()
    assert torch.equal(ours, -theirs)


@pytest.mark.parametrize("name", [SectionName.SLOW_WEIGHTS, SectionName.OUTER_MOMENTUM])
def test_the_two_half_differences_are_opposite_bit_for_bit(swarm: MemorySwarm, name: SectionName) -> None:
    peers, vectors = [swarm.peer("a"), swarm.peer("b")], [near(1), near(2)]
    for index in range(3):
        ours, theirs = (halves(received, name) for received in swapped(peers, vectors, index))
        assert torch.equal(ours, -theirs)
        assert ours.abs().max() > 0


def test_chunks_whose_bound_is_broken_are_sent_again_without_modulo(swarm: MemorySwarm) -> None:
    peers, vectors = [swarm.peer("a"), swarm.peer("b")], [near(1), near(2)]
    swapped(peers, vectors, 0)
    vectors[0].slow_weights[CHUNK_ELEMENTS + 5] += 3.0  # one number of the second chunk jumps
    broken = swapped(peers, vectors, 1)
    again = INT8.num_bytes(CHUNK_ELEMENTS)
    assert broken[0].bytes_sent == 2 * MODULO_BYTES + again + INT4_BYTES
    assert [peer.driver.traffic.broken_chunks for peer in peers] == [1, 1]
    ours, theirs = (halves(received, SectionName.SLOW_WEIGHTS) for received in broken)
    assert torch.equal(ours, -theirs)
    assert ours[CHUNK_ELEMENTS + 5] == pytest.approx(-1.5, abs=0.02)
    assert swapped(peers, vectors, 2)[0].bytes_sent == 2 * MODULO_BYTES + INT4_BYTES, "the bound has followed"


BY_NEED = SPEC.with_changes({"codec.slow_weights": "modulo", "codec.outer_momentum": "modulo"})


def run_away(vectors: list[Vectors], *, further: float) -> None:
    """Move one number of the second chunk of one side; the steps there are 1 to 2 thousandths."""
    vectors[0].slow_weights[CHUNK_ELEMENTS + 5] += further


def test_by_need_partners_whose_largest_distance_is_near_the_usual_one_send_half_a_byte_a_number() -> None:
    own = [torch.sin(1e4 * near(seed).slow_weights) for seed in (1, 2)]  # at most 2 apart, mostly 1
    vectors = [Vectors(each, each, near(1).outer_gradient) for each in own]
    with MemorySwarm(BY_NEED, deadlines=PATIENT) as swarm:
        peers = [swarm.peer("a"), swarm.peer("b")]
        sent = [swapped(peers, vectors, index)[0].bytes_sent for index in range(3)]
        assert [peer.driver.traffic.extended_chunks for peer in peers] == [0, 0]
    half_a_byte = 2 * section_bytes(FOUR_BITS, NUM_ELEMENTS) + INT4_BYTES
    assert sent == [2 * INT8_BYTES + INT4_BYTES, half_a_byte, half_a_byte]


@pytest.mark.parametrize(
    ("further", "codecs"),
    [(0.03, (SIX_BITS,)), (0.12, (SIX_BITS, EIGHT_BITS)), (3.0, (SIX_BITS, EIGHT_BITS, INT8))],
    ids=["6 bits", "8 bits", "int8"],
)
def test_by_need_more_bits_of_a_broken_chunk_follow(further: float, codecs: tuple[Sized, ...]) -> None:
    with MemorySwarm(BY_NEED, deadlines=PATIENT) as swarm:
        peers, vectors = [swarm.peer("a"), swarm.peer("b")], [near(1), near(2)]
        usual = [swapped(peers, vectors, index)[0].bytes_sent for index in range(3)][-1]
        num_before = peers[0].driver.traffic.extended_chunks
        run_away(vectors, further=further)
        received = swapped(peers, vectors, 3)
        assert [each.bytes_sent - usual for each in received] == [
            sum(each.num_bytes(CHUNK_ELEMENTS) for each in codecs)
        ] * 2
        assert peers[0].driver.traffic.extended_chunks - num_before == sum(codec is not INT8 for codec in codecs)
        assert [peer.driver.traffic.broken_chunks for peer in peers] == [int(INT8 in codecs)] * 2
    ours, theirs = (halves(each, SectionName.SLOW_WEIGHTS) for each in received)
    assert torch.equal(ours, -theirs)
    error = (ours - (vectors[1].slow_weights - vectors[0].slow_weights) / 2).abs()
    assert error[:CHUNK_ELEMENTS].max() < 1.1e-3, "half a step"
    assert error[CHUNK_ELEMENTS + 5] < (0.02 if INT8 in codecs else 1.1e-3)


@pytest.mark.parametrize(
    ("at", "send", "fault"),
    [
        (At(Chunk, section=SectionName.SLOW_WEIGHTS, index=1, nth=2), FlipBit(7), "damaged"),
        (At(Header, section=SectionName.SLOW_WEIGHTS, nth=2), Announce(num_bytes=1 << 40), "expected Header"),
        (At(Header, section=SectionName.SLOW_WEIGHTS, nth=2), Announce(num_chunks=2), "expected Header"),
        (At(Header, section=SectionName.SLOW_WEIGHTS, nth=2), Announce(codec="int8"), "expected Header"),
    ],
    ids=["damage", "more bytes", "more chunks", "another codec"],
)
def test_by_need_what_follows_is_checked_as_what_came_first(at: At, send: FlipBit | Announce, fault: str) -> None:
    faults = FaultPlan().fail_at(at, send=send).wrapper()
    rounds: list[int] = []

    def wrap(stream: FrameStream) -> FrameStream:
        return faults(stream) if len(rounds) == 3 else stream

    with MemorySwarm(BY_NEED, deadlines=PATIENT) as swarm:
        peers, vectors = [swarm.peer("a", wrap=wrap, wrap_accepted=wrap), swarm.peer("b")], [near(1), near(2)]
        for index in range(3):
            swapped(peers, vectors, index)
            rounds.append(index)
        run_away(vectors, further=0.03)
        outcomes = one_round(peers, vectors, wait_s=PATIENCE_S, round_index=3)
        assert faults.fired
        assert [type(outcome) for outcome in outcomes] == [Alone, Alone]
        assert fault in peers[1].driver.last_fault


def test_equal_vectors_stay_without_a_grid_until_they_differ(swarm: MemorySwarm) -> None:
    """At the start of a run, momentum is zero everywhere, which says nothing about the next round."""
    zero = Vectors(near(1).slow_weights, torch.zeros(NUM_ELEMENTS), near(1).outer_gradient)
    peers = [swarm.peer("a"), swarm.peer("b")]
    swapped(peers, [zero, zero], 0)
    received = swapped(peers, [zero, zero], 1)[0]
    assert received.bytes_sent == 2 * INT8_BYTES + INT4_BYTES
    assert not halves(received, SectionName.SLOW_WEIGHTS).any()


@pytest.mark.parametrize("digests", ["stale", "section"], ids=["damaged", "a lie"])
def test_a_chunk_that_only_one_side_sees_broken_ends_the_swap(digests: Literal["stale", "section"]) -> None:
    """Damage shows in the digest of the payload. A partner that lies must not make the two sides apply different h."""
    at = At(Chunk, section=SectionName.SLOW_WEIGHTS, index=1)
    faults = FaultPlan().fail_at(at, send=FlipBit(77, digests=digests)).wrapper()
    rounds: list[int] = []

    def wrap(stream: FrameStream) -> FrameStream:
        return faults(stream) if len(rounds) == 1 else stream

    with MemorySwarm(SPEC, deadlines=PATIENT) as swarm:
        peers, vectors = [swarm.peer("a", wrap=wrap, wrap_accepted=wrap), swarm.peer("b")], [near(1), near(2)]
        swapped(peers, vectors, 0)
        rounds.append(0)
        outcomes = one_round(peers, vectors, wait_s=PATIENCE_S, round_index=1)
        assert faults.fired
        assert [type(outcome) for outcome in outcomes] == [Alone, Alone]
        assert all(peer.driver.last_fault for peer in peers)


@pytest.mark.parametrize("exponents", [b"", bytes(1000), bytes([126]) * 9], ids=["none", "too many", "no exponent"])
def test_a_grid_that_no_peer_proposes_ends_the_swap(exponents: bytes) -> None:
    grid = Grid(SectionName.SLOW_WEIGHTS, exponents)
    faults = FaultPlan().fail_at(At(Grid), send=Replace(grid)).wrapper()
    with MemorySwarm(SPEC, deadlines=PATIENT) as swarm:
        peers = [swarm.peer("a", wrap=faults, wrap_accepted=faults), swarm.peer("b")]
        outcomes = one_round(peers, [near(1), near(2)], wait_s=PATIENCE_S)
        assert faults.fired
        assert [type(outcome) for outcome in outcomes] == [Alone, Alone]
        assert "it proposes" in peers[1].driver.last_fault


# a correction changes what is coded


def test_the_next_partner_waits_until_the_late_part_is_here_and_applied() -> None:
    spec = SPEC.model_copy(update={"outer": published(max_wait_s=0.0)})
    with MemorySwarm(spec, deadlines=PATIENT) as swarm:
        a, b = swarm.peer("a"), swarm.peer("b")
        vectors = near(1), near(2)
        open_round(a, vectors[0])
        open_round(b, vectors[1])
        wait_until(lambda: all(peer.driver.phase is RoundPhase.EARLY for peer in (a, b)))
        assert isinstance(end_round(a, vectors[0], wait_s=0.0), Half)
        open_round(a, vectors[0], round_index=1)
        c = swarm.peer("c")
        open_round(c, vectors[1])
        assert isinstance(end_round(b, vectors[1], wait_s=PATIENCE_S), Swapped)
        wait_until(lambda: bool(a.driver.corrections))
        assert a.driver.phase is not RoundPhase.SWAPPING
        assert a.exchange.late(0) is None, "of the round that is still open"
        assert a.exchange.late(1) is not None
        assert a.driver.phase is not RoundPhase.SWAPPING
        a.exchange.corrected()
        wait_until(lambda: a.driver.phase is RoundPhase.EARLY)
