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
from noloco_p2p.codec.modulo import EIGHT_BITS, FOUR_BITS, SIX_BITS
from noloco_p2p.gossip.frames import Chunk, Grid, Header, SectionName
from noloco_p2p.gossip.outcome import Alone, Half, Received, Swapped
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.gossip.seams import FrameStream
from noloco_p2p.spec import CodecSpec, TrainerSpec
from noloco_p2p.testing.faults import Announce, At, FaultPlan, FlipBit, Replace
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm

NUM_ELEMENTS = 2 * CHUNK_ELEMENTS + 1000
CODECS = CodecSpec(slow_weights="modulo", outer_momentum="modulo", outer_gradient="int4")
SPEC = TrainerSpec(name="modulo", codec=CODECS, outer=published())
HALF_A_BYTE = section_bytes(FOUR_BITS, NUM_ELEMENTS)
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


@pytest.mark.parametrize("name", [SectionName.SLOW_WEIGHTS, SectionName.OUTER_MOMENTUM])
def test_the_two_half_differences_are_opposite_bit_for_bit(swarm: MemorySwarm, name: SectionName) -> None:
    peers, vectors = [swarm.peer("a"), swarm.peer("b")], [near(1), near(2)]
    for index in range(3):
        ours, theirs = (halves(received, name) for received in swapped(peers, vectors, index))
        assert torch.equal(ours, -theirs)
        assert ours.abs().max() > 0


def run_away(vectors: list[Vectors], *, further: float) -> None:
    """Move one number of the second chunk of one side; the steps there are 1 to 2 thousandths."""
    vectors[0].slow_weights[CHUNK_ELEMENTS + 5] += further


def test_the_first_swap_learns_the_grid_and_the_next_ones_send_half_a_byte_a_number(swarm: MemorySwarm) -> None:
    """The largest distance between the partners is near the usual one."""
    own = [torch.sin(1e4 * near(seed).slow_weights) for seed in (1, 2)]  # at most 2 apart, mostly 1
    vectors = [Vectors(each, each, near(1).outer_gradient) for each in own]
    peers = [swarm.peer("a"), swarm.peer("b")]
    sent = [swapped(peers, vectors, index)[0].bytes_sent for index in range(3)]
    assert sent == [2 * INT8_BYTES + INT4_BYTES, *[2 * HALF_A_BYTE + INT4_BYTES] * 2]
    assert [peer.driver.traffic.modulo_chunks for peer in peers] == [12, 12]
    assert [peer.driver.traffic.extended_chunks for peer in peers] == [0, 0]
    assert [peer.driver.traffic.broken_chunks for peer in peers] == [0, 0]


@pytest.mark.parametrize(
    ("further", "codecs"),
    [(0.03, (SIX_BITS,)), (0.12, (SIX_BITS, EIGHT_BITS)), (3.0, (SIX_BITS, EIGHT_BITS, INT8))],
    ids=["6 bits", "8 bits", "int8"],
)
def test_more_bits_of_a_broken_chunk_follow(further: float, codecs: tuple[Sized, ...]) -> None:
    with MemorySwarm(SPEC, deadlines=PATIENT) as swarm:
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
def test_what_follows_is_checked_as_what_came_first(at: At, send: FlipBit | Announce, fault: str) -> None:
    faults = FaultPlan().fail_at(at, send=send).wrapper()
    rounds: list[int] = []

    def wrap(stream: FrameStream) -> FrameStream:
        return faults(stream) if len(rounds) == 3 else stream

    with MemorySwarm(SPEC, deadlines=PATIENT) as swarm:
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
