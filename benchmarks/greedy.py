"""Measure the share of swaps that a greedy liar gets by making offers to all eight honest peers at once.

    python benchmarks/greedy.py [--quick] [--json FILE]

Swaps and pairing are those of real peers, over simulated links. The liar makes offers on three calls per victim, pauses
for 20 ms after each answer, and accepts every offer. It has a live record in the directory; without such a record, all
of its offers are refused. The figure is the liar's share of the swaps of honest peers after 20, 40, 100 and 300 swaps
of each of them.
"""

from __future__ import annotations

from claims import Claim, run
from harness.greedy import NAME, meet_greedy

from noloco_p2p.simulate.clock import run_virtual

NUM_HONEST = 8
NUM_LIVE = NUM_HONEST + 1
SWAPS_PER_STEP = 3  # at least


def measure(quick: bool) -> list[Claim]:
    marks = (10, 20) if quick else (20, 40, 100, 300)
    unlisted, _ = run_virtual(meet_greedy(NUM_HONEST, marks[0], is_listed=False))
    partners = [swap.partner for trainer in unlisted.trainers for swap in trainer.swaps]
    bad = partners.count(NAME)
    claims = [Claim(f"no record: swaps with the liar, of {len(partners)}", bad, "swaps", "0", bad == 0)]
    swarm, _ = run_virtual(meet_greedy(NUM_HONEST, marks[-1] // SWAPS_PER_STEP, is_listed=True))
    for mark in marks:
        assert all(len(trainer.swaps) >= mark for trainer in swarm.trainers)
        bad = sum(swap.partner == NAME for trainer in swarm.trainers for swap in trainer.swaps[:mark])
        share = bad / (mark * NUM_HONEST) * NUM_LIVE
        claims.append(Claim(f"a live record: after {mark} swaps", share, "/ live", "<= 2 / live", share <= 2.0))
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
