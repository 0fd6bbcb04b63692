"""Measure the share of swaps that a greedy liar gets by making offers to all eight honest peers at once.

    python benchmarks/greedy.py [--quick] [--json FILE]

The peers use real gRPC on this machine. The liar makes offers on three calls per victim, pauses for 20 ms after each
answer, accepts every offer, sends random vectors, and does not announce when its rounds end. It has a live record in
the directory; without such a record, all of its offers are refused. An honest peer that finds no partner within 2 s has
a solo round. The figure is the liar's share of the swaps of honest peers, after 20, 40, 100 and 300 rounds.
"""

from __future__ import annotations

import logging

from claims import Claim, run
from harness.greedy import GreedyNode, count_swaps
from harness.loopback import LoopbackSwarm
from harness.patience import PATIENCE_S
from harness.specs import FP32, published

from noloco_p2p.spec import RunSpec

SPEC = RunSpec(name="greedy", codec=FP32, outer=published(inner_steps=1, max_wait_s=PATIENCE_S))
NUM_HONEST = 8
NUM_LIVE = NUM_HONEST + 1


def measure(quick: bool) -> list[Claim]:
    logging.disable(logging.ERROR)  # peers log an error for each call that the liar breaks off
    claims: list[Claim] = []
    marks = (10, 20) if quick else (20, 40, 100, 300)
    for is_listed in (True, False):
        with LoopbackSwarm(SPEC) as swarm:
            peers = [swarm.peer(f"honest-{number}") for number in range(NUM_HONEST)]
            with GreedyNode(swarm, SPEC, is_listed=is_listed):
                counts = list(count_swaps(peers, marks[-1] if is_listed else marks[0], wait_s=2.0))
        if not is_listed:
            swaps, bad = counts[-1]
            claims.append(Claim(f"no record: swaps with the liar, of {swaps}", bad, "swaps", "0", bad == 0))
            continue
        for mark in marks:
            swaps, bad = counts[mark - 1]
            share = bad / swaps * NUM_LIVE
            name = f"a live record: {bad} of {swaps} swaps in {mark} rounds"
            claims.append(Claim(name, share, "/ live", "<= 2 / live", share <= 2.0))
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
