"""Check that a swap that breaks in any phase, or that has one flipped bit, changes nothing that it should not change.

    python benchmarks/kills_and_flips.py [--quick] [--json FILE]

Two peers run the driver, the swap and the codecs of the production code over streams in memory. A kill breaks all
connections of one peer at a frame of one of six phases. Both sides must then report the same outcome, and must have
applied all parts that the outcome names, and nothing else. After a solo round, each peer must have the state of a peer
without partners, bit for bit. Otherwise, the mean of both states must be the one that exact codecs would give. A flip
changes a random bit of a random chunk that one peer sends. Nothing of the part with this chunk may be applied.

The codecs are those of `noloco init`. Their grid results from the previous swap, which has no fault.
"""

from __future__ import annotations

import logging
import random

from claims import Claim, run
from harness.injector import Injector, Phase
from harness.replicas import Pair
from harness.rounds import one_round
from harness.specs import published

from noloco_p2p.codec import get_codec
from noloco_p2p.codec.modulo import FOUR_BITS
from noloco_p2p.gossip.deadlines import Deadlines
from noloco_p2p.gossip.frames import Chunk, SectionName
from noloco_p2p.gossip.outcome import Alone, Half, Swapped
from noloco_p2p.presets import BEST_CODEC
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.faults import At, Cut, Fault, FlipBit
from noloco_p2p.testing.peers import MemorySwarm

NUM_ELEMENTS = 100
SPEC = RunSpec(name="faults", codec=BEST_CODEC, outer=published())
DEADLINES = Deadlines(dial_s=5.0, offer_s=5.0, status_s=5.0, progress_s=5.0, farewell_s=0.05)  # a cut is seen at once
SIZES = {
    SectionName.SLOW_WEIGHTS: FOUR_BITS.num_bytes(NUM_ELEMENTS),
    SectionName.OUTER_MOMENTUM: FOUR_BITS.num_bytes(NUM_ELEMENTS),
    SectionName.OUTER_GRADIENT: get_codec(BEST_CODEC.outer_gradient).num_bytes(NUM_ELEMENTS),
}


def measure(quick: bool) -> list[Claim]:
    logging.getLogger("noloco_p2p").setLevel(logging.CRITICAL)
    num_kills, num_flips = (10, 200) if quick else (100, 10_000)
    whole = sum(is_whole_after_kill(phase) for phase in Phase for _ in range(num_kills))
    rng = random.Random(7)
    caught = sum(is_caught(rng) for _ in range(num_flips))
    kills = num_kills * len(Phase)
    return [
        Claim(
            f"kills in {len(Phase)} phases: parts applied whole or not at all, both sides alike",
            whole,
            f"of {kills}",
            "all",
            whole == kills,
        ),
        Claim("wrong bits: nothing of their part applied", caught, f"of {num_flips}", "all", caught == num_flips),
    ]


def is_whole_after_kill(phase: Phase) -> bool:
    kinds, is_whole = swap_with(phase, Cut())
    return is_whole and len(kinds) == 1


def is_caught(rng: random.Random) -> bool:
    section = rng.choice(list(SIZES))
    kinds, is_whole = swap_with(At(Chunk, section=section), FlipBit(rng.randrange(8 * SIZES[section])))
    return is_whole and kinds == {Half if section is SectionName.OUTER_GRADIENT else Alone}


def swap_with(at: Phase | At, fault: Fault) -> tuple[set[type], bool]:
    """Run a round in which `a` causes the fault.

    Returns the types of both outcomes, and whether each side applied exactly the parts that its outcome names.
    """
    pair, injector = Pair.make(SPEC.outer), Injector().fail_at(peer="a", round=1, phase=at, fault=fault)
    kinds, is_whole = set[type](), False
    with MemorySwarm(SPEC, deadlines=DEADLINES) as swarm:
        peers = [swarm.peer("a", **injector.of("a")), swarm.peer("b")]
        for round_index in range(2):
            vectors = pair.train()
            outcomes = one_round(peers, vectors, wait_s=20.0, round_index=round_index)
            kinds = {type(outcome) for outcome in outcomes}
            assert round_index or kinds == {Swapped}, outcomes
            is_whole = pair.is_whole(outcomes, vectors, codec=SPEC.codec)
            if not is_whole:
                break
    assert injector.fired, "the fault was not met"
    return kinds, is_whole


if __name__ == "__main__":
    run(measure, doc=__doc__)
