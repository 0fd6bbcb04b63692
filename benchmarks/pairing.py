"""Measure matchmaking without a coordinator: the share of paired rounds, the offers per round, and the speed of mixing.

    python benchmarks/pairing.py [--quick] [--json FILE]

The round drivers, swaps and bucket draws of the production code run on a virtual clock (`harness/walk.py`). The one-way
delay is 40 ms, a round takes 20 s, the duration of a step varies by 2 %, and a peer waits at most 20 s at a boundary.
"In lock step" means that all peers start together. In "1x-4x", a quarter of the peers run at each of the speeds 1 to 4.
The first round is left out. If the number of peers is odd, one of them cannot be paired, and the shares take this into
account. Mixing is the ratio of the variance between peers after a round to that before it; it is 0.5 for an ideal
random matching. If only one side has committed a swap, the round counts as paired for that side.
"""

from __future__ import annotations

import logging

import torch
from claims import Claim, run
from harness.walk import Walk, WalkResult, walk

SPEEDS = (1.0, 2.0, 3.0, 4.0)


def spread_factor(result: WalkResult) -> float:
    """Return the mean ratio of the variances after and before a round at speed 1, without the first round."""
    spreads = [float(vectors.var(0).mean()) for _, vectors in result.vectors]
    if spreads[-1] <= 1e-12 * spreads[0]:
        return 0.0
    return (spreads[-1] / spreads[1]) ** (1 / (len(spreads) - 2))


def compare(name: str, plan: Walk) -> list[Claim]:
    result = walk(plan)
    rounds = [each for each in result.rounds if each.round > 0]
    can_be_paired = plan.num_peers // 2 * 2 / plan.num_peers
    paired = [each for each in rounds if each.partner]
    share = min(1.0, len(paired) / len(rounds) / can_be_paired)
    within = sum(each.num_offers <= 5 for each in paired) / len(rounds) / can_be_paired
    is_mixed = len(set(plan.speeds)) > 1
    twice = len(result.in_two_swaps())
    claims = [
        Claim(f"{name}: paired", share, "share", ">= 0.95", share >= 0.95),
        Claim(f"{name}: paired within 5 offers", min(1.0, within), "share", ">= 0.95", within >= 0.95),
        Claim(f"{name}: offers a round", sum(each.num_offers for each in rounds) / len(rounds), "offers"),
        Claim(f"{name}: rounds with a partner that tells of another", twice, "rounds", "0", twice == 0),
    ]
    if plan.num_peers > 3:
        per = "20 s" if is_mixed else "round"
        claims.append(Claim(f"{name}: variance left after a {per} (ideal 0.5 a round)", spread_factor(result), "times"))
    for claim in claims:
        print(f"{claim.claim}: {claim.value:.3f}", flush=True)
    return claims


def measure(quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # a run that ends in the middle of a swap logs errors
    claims: list[Claim] = []
    for num_peers, num_rounds in [(2, 8), (3, 8), (8, 8)] if quick else [(2, 12), (3, 12), (8, 12), (64, 8), (1024, 4)]:
        plan = Walk(num_peers, num_rounds, max_wait_s=20.0)
        claims += compare(f"{num_peers} peers in lock step", plan)
        if num_peers >= 8 and num_peers < 1024:
            mixed = Walk(num_peers, num_rounds, max_wait_s=20.0, speeds=SPEEDS, is_in_step=False)
            claims += compare(f"{num_peers} peers at 1x-4x", mixed)
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
