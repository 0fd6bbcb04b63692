"""Swaps that are cut in every phase, and swaps with one wrong bit: is anything left of them that should not be?

    python benchmarks/kills_and_flips.py [--quick] [--json FILE]

Two peers with the production driver, swap and codecs over streams in memory. A kill breaks every connection of one peer
at the frame of a phase (six phases); afterwards all vectors must be as before and both sides must tell of the same end.
A flip is of a random bit of a random chunk of what one peer sends; none may be committed.
"""

from __future__ import annotations

import logging
import random

import torch
from claims import Claim, run
from harness.rounds import Vectors, one_round
from harness.specs import published

from noloco_p2p.codec import get_codec
from noloco_p2p.gossip.deadlines import Deadlines
from noloco_p2p.gossip.frames import Chunk, SectionName
from noloco_p2p.gossip.outcome import Alone, Half, Outcome
from noloco_p2p.spec import CodecSpec, RunSpec
from noloco_p2p.testing.faults import At, Cut, Fault, FaultPlan, FlipBit
from noloco_p2p.testing.injector import Phase
from noloco_p2p.testing.peers import MemorySwarm

NUM_ELEMENTS = 100
CODECS = CodecSpec(slow_weights="int8", outer_momentum="int8", outer_gradient="int4", inner_momentum="int8")
SPEC = RunSpec(name="faults", codec=CODECS, outer=published(inner_momentum="swap"))
DEADLINES = Deadlines(dial_s=5.0, offer_s=5.0, status_s=5.0, progress_s=5.0, farewell_s=0.05)  # a cut shows at once
SIZES = {
    SectionName.SLOW_WEIGHTS: get_codec(CODECS.slow_weights).num_bytes(NUM_ELEMENTS),
    SectionName.OUTER_MOMENTUM: get_codec(CODECS.outer_momentum).num_bytes(NUM_ELEMENTS),
    SectionName.INNER_MOMENTUM: get_codec(CODECS.inner_momentum).num_bytes(NUM_ELEMENTS),
    SectionName.OUTER_GRADIENT: get_codec(CODECS.outer_gradient).num_bytes(NUM_ELEMENTS),
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
            f"kills in {len(Phase)} phases: vectors as before, both sides alike",
            whole,
            f"of {kills}",
            "all",
            whole == kills,
        ),
        Claim("wrong bits: nothing of their part committed", caught, f"of {num_flips}", "all", caught == num_flips),
    ]


def is_whole_after_kill(phase: Phase) -> bool:
    outcomes, untouched = swap_with(phase.value, Cut())
    return untouched and len({type(outcome) for outcome in outcomes}) == 1


def is_caught(rng: random.Random) -> bool:
    section = rng.choice(list(SIZES))
    outcomes, untouched = swap_with(At(Chunk, section=section), FlipBit(rng.randrange(8 * SIZES[section])))
    allowed = Half if section is SectionName.OUTER_GRADIENT else Alone
    return untouched and all(isinstance(outcome, allowed) for outcome in outcomes)


def swap_with(at: At, fault: Fault) -> tuple[list[Outcome], bool]:
    """What both sides have when `a` sends the fault, and whether no vector was touched."""
    vectors = [Vectors.random(seed, num_elements=NUM_ELEMENTS) for seed in (1, 2)]
    before = [tensor.clone() for own in vectors for tensor in flat(own)]
    faults = FaultPlan().fail_at(at, send=fault).wrapper()
    with MemorySwarm(SPEC, deadlines=DEADLINES) as swarm:
        peers = [swarm.peer("a", wrap=faults, wrap_accepted=faults), swarm.peer("b")]
        outcomes = one_round(peers, vectors, wait_s=20.0)
    assert faults.fired, "the fault was not met"
    after = [tensor for own in vectors for tensor in flat(own)]
    return outcomes, all(map(torch.equal, before, after))


def flat(own: Vectors) -> tuple[torch.Tensor, ...]:
    return (*own.state().values(), own.outer_gradient)


if __name__ == "__main__":
    run(measure, doc=__doc__)
