"""Measure how much of their links peers use for small swaps, with the code of real peers on a virtual clock.

    python benchmarks/link_use.py [--seeds 2] > benchmarks/results/link_use.txt

Each link carries the same rate in both directions, and half of a round trip takes 20 ms. A whole vector of 4 million
numbers takes 16 inner steps of 1 s on a link of 2 Mbit/s (int8). The share is that of payload bytes in the upload of a
peer between the 5th and the 35th second. The age is the number of inner steps from a snapshot to its half-difference.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from statistics import fmean

from harness.swap_swarm import Swarm, profile

from noloco_p2p.simulate.clock import run_virtual

NUM_ELEMENTS = 4_000_000
FROM_S, UNTIL_S = 5.0, 35.0


async def measure(rates: Sequence[float], steps_s: Sequence[float], seed: int) -> tuple[list[float], float, int]:
    """Return the share of each peer's link, the mean age, and the number of failed swaps."""
    links = [profile(rate) for rate in rates]
    swarm = Swarm(links, num_elements=NUM_ELEMENTS, codec="int8", noise=0.0, step_s=list(steps_s), seed=seed)
    run = asyncio.create_task(swarm.run(round(UNTIL_S / max(steps_s)) + 2))
    await asyncio.sleep(FROM_S)
    before = [trainer.gossip.traffic.bytes_sent for trainer in swarm.trainers]
    await asyncio.sleep(UNTIL_S - FROM_S)
    sent = [trainer.gossip.traffic.bytes_sent - start for trainer, start in zip(swarm.trainers, before, strict=True)]
    await run
    ages = [age for trainer in swarm.trainers for age in trainer.ages]
    shares = [8 * num / (rate * 1e6 * (UNTIL_S - FROM_S)) for num, rate in zip(sent, rates, strict=True)]
    return shares, fmean(ages), sum(trainer.gossip.num_failed for trainer in swarm.trainers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=2)
    seeds = range(parser.parse_args().seeds)
    cases = {
        "2 peers": ([2.0] * 2, [1.0] * 2),
        "8 peers": ([2.0] * 8, [1.0] * 8),
        "16 peers": ([2.0] * 16, [1.0] * 16),
        "64 peers": ([2.0] * 64, [1.0] * 64),
        "8 peers, inner steps of 1, 1, 1, 1, 2, 2, 3, 3 s": ([2.0] * 8, [1.0] * 4 + [2.0, 2.0, 3.0, 3.0]),
        "4 peers with 8 Mbit/s": ([8.0] * 4 + [1.0] * 4, [1.0] * 8),
        "    and 4 with 1 Mbit/s": ([8.0] * 4 + [1.0] * 4, [1.0] * 8),
    }
    print(f"{'':50}  share of the link     age  failed")
    for name, (rates, steps_s) in cases.items():
        found = [run_virtual(measure(rates, steps_s, seed)) for seed in seeds]
        half = {"4 peers with 8 Mbit/s": slice(0, 4), "    and 4 with 1 Mbit/s": slice(4, 8)}.get(name, slice(None))
        shares = [share for each, _, _ in found for share in each[half]]
        print(
            f"{name:50}  {fmean(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})  "
            f"{fmean(age for _, age, _ in found):5.2f}  {sum(failed for _, _, failed in found)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
