"""Measure how much of their links peers use for small swaps, with the code of real peers on a virtual clock.

    python benchmarks/link_use.py [--quick] [--json FILE]

Each link carries the same rate in both directions, and half of a round trip takes 20 ms. A whole vector of 4 million
numbers takes 16 inner steps of 1 s on a link of 2 Mbit/s (int8). With longer steps, the vector is longer, too, and the
times below are multiplied. The share is that of payload bytes in the upload of a peer between the 5th and the 35th
second. The age is the number of inner steps from a snapshot to its half-difference.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from statistics import fmean

from claims import Claim, run
from harness.swap_swarm import Swarm, profile

from noloco_p2p.simulate.clock import run_virtual

NUM_ELEMENTS = 4_000_000
FROM_S, UNTIL_S = 5.0, 35.0
SEEDS = (0, 1)


@dataclass(frozen=True, slots=True)
class Case:
    """Peers with these links (Mbit/s) and inner steps (seconds). At least `least` % of the link must be used."""

    name: str
    rates: tuple[float, ...]
    steps_s: tuple[float, ...]
    least: float = 0.0


EIGHT = Case("8 peers", (2.0,) * 8, (1.0,) * 8, least=85.0)
CASES = (
    EIGHT,
    Case("8 peers, steps of 1, 1, 1, 1, 2, 2, 3, 3 s", (2.0,) * 8, (1.0,) * 4 + (2.0, 2.0, 3.0, 3.0)),
    Case("8 peers, links of 8 and 1 Mbit/s", (8.0,) * 4 + (1.0,) * 4, (1.0,) * 8),
    Case("8 peers, steps of 3 s", (2.0,) * 8, (3.0,) * 8),
    Case("8 peers, steps of 10 s", (2.0,) * 8, (10.0,) * 8),
    Case("64 peers", (2.0,) * 64, (1.0,) * 64, least=95.0),
)


async def measure_once(case: Case, seed: int) -> tuple[list[float], float, int]:
    """Return the share of each peer's link, the mean age, and the number of failed swaps."""
    links, rates, times = [profile(rate) for rate in case.rates], case.rates, case.steps_s[0]
    from_s, until_s = times * FROM_S, times * UNTIL_S
    swarm = Swarm(
        links, num_elements=round(times * NUM_ELEMENTS), codec="int8", noise=0.0, step_s=list(case.steps_s), seed=seed
    )
    running = asyncio.create_task(swarm.run(round(until_s / max(case.steps_s)) + 2))
    await _sleep(from_s, swarm)
    before = [trainer.counts.bytes_sent for trainer in swarm.trainers]
    await _sleep(until_s - from_s, swarm)
    sent = [trainer.counts.bytes_sent - start for trainer, start in zip(swarm.trainers, before, strict=True)]
    await running
    ages = [age for trainer in swarm.trainers for age in trainer.ages]
    shares = [8 * num / (rate * 1e6 * (until_s - from_s)) for num, rate in zip(sent, rates, strict=True)]
    return shares, fmean(ages), sum(trainer.counts.failures.total() for trainer in swarm.trainers)


async def _sleep(seconds: float, swarm: Swarm) -> None:
    for _ in range(round(seconds)):
        await asyncio.sleep(1.0)
        for trainer in swarm.trainers:
            trainer.swaps.clear()  # they hold gigabytes


def measure(quick: bool) -> list[Claim]:
    claims: list[Claim] = []
    for case in (EIGHT,) if quick else CASES:
        found = [run_virtual(measure_once(case, seed)) for seed in (SEEDS[:1] if quick else SEEDS)]
        shares = [100 * share for each, _, _ in found for share in each]
        target = (f">= {case.least:g}", fmean(shares) >= case.least) if case.least else ("", None)
        claims.append(Claim(f"{case.name}: use of a link", fmean(shares), "%", *target))
        if case.rates[0] != case.rates[-1]:
            claims += [
                Claim(f"{case.name}: {rate:g} Mbit/s", fmean(_of(rate, case, found)), "%")
                for rate in sorted({*case.rates}, reverse=True)
            ]
        claims += [
            Claim(f"{case.name}: least used link", min(shares), "%"),
            Claim(f"{case.name}: age", fmean(age for _, age, _ in found), "inner steps"),
            Claim(f"{case.name}: failed swaps", sum(failed for _, _, failed in found), ""),
        ]
    return claims


def _of(rate: float, case: Case, found: list[tuple[list[float], float, int]]) -> list[float]:
    return [100 * share for each, _, _ in found for share, own in zip(each, case.rates, strict=True) if own == rate]


if __name__ == "__main__":
    run(measure, doc=__doc__)
