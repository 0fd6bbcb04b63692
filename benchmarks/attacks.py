"""Measure what the update filter costs an honest swarm, and what it prevents when peers lie.

    python benchmarks/attacks.py [--quick] [--json FILE]

The swarms are simulated on links of 0.1 Mbit/s, which carry the weights in about five inner steps. They train the toy
model (toy.toml) with the optimizer and the codec that `noloco init` writes. Losses are validation losses, averaged over
the honest replicas at the end, and compared with those of the same replicas without liars. The figures of an attack are
means over two seeds. "open" means that nothing is clipped. `harness/hostile.py` describes the attacks. A greedy liar
makes offers to everybody all the time, and accepts every offer. The share of a liar is its share of the swaps of honest
peers, in multiples of that of another peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from unittest.mock import patch

import torch
from claims import Claim, run
from harness.hostile import CLAIMS, Attack, simulate_hostile

from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.outer import update_filter
from noloco_p2p.presets import PRESETS
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan, parse_links, peer_name
from noloco_p2p.simulate.replica import SimulatedReplica, now_s
from noloco_p2p.simulate.result import Result
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import TrainerSpec

TOY = Path(__file__).parent / "toy.toml"
NUM_STEPS, QUICK_STEPS, SEEDS, HOSTILE_SEEDS, JOBS = 260, 40, (0, 1, 2), (0, 1), 2
ADAPTIVE = (Attack.BACK, Attack.UPHILL, Attack.DRIFT)
# Limits in place of the filter's own. The last ones have no median.
FILTERS = {
    "open": {"RADIUS": 1e9, "LEAST": 1e9, "MOST": 1e9},
    "twice the limits": {"RADIUS": 2.0, "LEAST": 1.0, "MOST": 2.0},
    "own movement only": {"RADIUS": 1e9, "LEAST": 0.5, "MOST": 0.5},
}
MOST_COST, MOST_HARM, MOST_HARM_OF_THREE, MOST_SHARE = 0.3, 3.0, 6.0, 1.5


@dataclass(frozen=True, slots=True)
class Case:
    """A swarm of `num_honest` peers and `num_liars` liars."""

    attack: Attack | None = None
    num_honest: int = 8
    num_liars: int = 0
    is_greedy: bool = False
    filter: str = ""  # a name in FILTERS, or empty for the filter's own limits
    seed: int = 0

    @property
    def name(self) -> str:
        ways = [f"{self.num_liars} of {self.num_honest + self.num_liars}", self.attack or "honest"]
        return ", ".join(ways + ["greedy"] * self.is_greedy + [self.filter] * bool(self.filter))


@dataclass(frozen=True, slots=True)
class Found:
    loss: float
    clipped: float  # share of the pieces
    share: float  # of one liar in the swaps of the honest peers, relative to that of another peer
    swaps: float  # of an honest peer
    spread: float  # of the honest replicas at the end


def cases(*, quick: bool) -> list[Case]:
    honest = [Case(filter=name, seed=seed) for seed in (SEEDS[:1] if quick else SEEDS) for name in ("", "open")]
    if quick:
        return [*honest, *(Case(attack, num_liars=1) for attack in (Attack.SCALED, Attack.BACK))]
    hostile = [
        Case(num_honest=14),
        *(Case(attack, num_liars=1) for attack in Attack),
        *(Case(attack, num_liars=1, is_greedy=True) for attack in (Attack.NOISE, Attack.STALLS, *ADAPTIVE)),
        *(Case(attack, num_honest=14, num_liars=3) for attack in ADAPTIVE),
        *(Case(attack, num_liars=1, filter="open") for attack in (Attack.SCALED, Attack.FLIPPED, Attack.BACK)),
        Case(Attack.CONSTANT, num_liars=1, filter="twice the limits"),
        Case(Attack.UPHILL, num_liars=1, is_greedy=True, filter="own movement only"),
    ]
    return [*honest, *(replace(case, seed=seed) for case in hostile for seed in HOSTILE_SEEDS)]


def material_and_plan(steps: int, case: Case) -> tuple[Material, Plan]:
    init = PRESETS["tiny"]
    changes = {f"{name}.{field}": value for name in ("train", "outer", "codec") for field, value in getattr(init, name)}
    changes |= {"train.total_steps": steps, "train.warmup_steps": steps // 10, "outer.closing_mixings": 0}
    changes |= {"codec.weights": "int8"} if case.attack is Attack.NAN else {}
    links = parse_links(["0.1mbit-20ms"])
    plan = Plan(case.num_honest + case.num_liars, seed=case.seed, links=links, evaluations=1)
    return Material.of(TrainerSpec.load(TOY).with_changes(changes), {}), plan


def simulate(case: Case, steps: int) -> Found:
    torch.set_num_threads(1)
    num_live = case.num_honest + case.num_liars
    attacks = {} if case.attack is None else dict.fromkeys(range(case.num_honest, num_live), case.attack)
    made: list[SimulatedReplica] = []
    with patch.dict(vars(update_filter), FILTERS.get(case.filter, {})):
        material, plan = material_and_plan(steps, case)
        result = simulate_hostile(material, plan, attacks, is_greedy=case.is_greedy, on_made=made.extend)
    honest, liars = made[: case.num_honest], {peer_name(number) for number in attacks}
    swaps = [swap for replica in honest for swap in replica.swaps]
    share = sum(swap.partner in liars for swap in swaps) / len(swaps) * (num_live - 1) / max(1, len(liars))
    pieces, clipped = (
        sum(getattr(each.metrics, name) for each in honest) for name in ("judged_pieces", "clipped_pieces")
    )
    return Found(result.loss, clipped / max(1, pieces), share, len(swaps) / len(honest), result.spread)


def simulate_islands(steps: int) -> Result:
    """Train eight peers, whose two halves find each other in the middle of the run."""
    torch.set_num_threads(1)

    def divide(made: list[SimulatedReplica]) -> None:
        for replica in made:
            directory = replica._service._outside.directory
            directory.live = partial(seen, directory.live, replica.number % 2)

    def seen(live: Callable[[], Sequence[Candidate]], half: int) -> list[Candidate]:
        is_divided, names = now_s() < steps / 2, {peer_name(number) for number in range(half, 8, 2)}
        return [peer for peer in live() if not is_divided or peer.peer_id in names]

    return simulate_swarm(*material_and_plan(steps, Case()), on_made=divide)


def measure(quick: bool) -> list[Claim]:
    steps, wanted = QUICK_STEPS if quick else NUM_STEPS, cases(quick=quick)
    with ProcessPoolExecutor(JOBS, mp_context=get_context("spawn")) as pool:
        islands = pool.submit(simulate_islands, steps)
        found = dict(zip(wanted, pool.map(simulate, wanted, [steps] * len(wanted)), strict=True))

    def change(case: Case, other: Case) -> float:
        return 100 * (found[case].loss / found[other].loss - 1)

    honest = [case for case in wanted if not case.attack and case.num_honest == 8]
    opened = [case for case in honest if case.filter]
    costs = [change(Case(seed=case.seed), case) for case in opened]
    cost, losses = mean(costs), [found[case].loss for case in opened]
    met = None if quick else cost <= MOST_COST
    claims = [
        Claim(f"honest, seed {case.seed}: cost of the filter", cost, "%")
        for case, cost in zip(opened, costs, strict=True)
    ]
    claims.append(Claim("honest: cost of the filter, mean of the seeds", cost, "%", f"<= {MOST_COST}", met))
    claims.append(Claim("honest: clipped", 100 * found[Case()].clipped, "% of pieces"))
    claims.append(Claim("honest: swaps", found[Case()].swaps, "a peer"))
    claims.append(Claim("honest: spread at the end", 100 * found[Case()].spread, "%"))
    claims.append(Claim("two islands until the middle: spread at the end", 100 * islands.result().spread, "%"))
    claims.append(Claim("two islands until the middle: loss", 100 * (islands.result().loss / losses[0] - 1), "%"))
    if len(losses) > 1:
        claims.append(Claim("honest: noise from seed to seed", 100 * stdev(losses) / mean(losses), "%"))
    for case in (case for case in wanted if case.attack and not case.seed):
        seeds = [each for each in wanted if each.name == case.name]
        harm = mean(change(each, Case(num_honest=case.num_honest, seed=each.seed)) for each in seeds)
        most = MOST_HARM if case.num_liars == 1 else MOST_HARM_OF_THREE
        target = ("", None) if case.filter or quick else (f"<= {most:g}", harm <= most)
        claims.append(Claim(f"{case.name}: loss", harm, "%", *target))
        if case.is_greedy and not case.filter:
            share = mean(found[each].share for each in seeds)
            claims.append(Claim(f"{case.name}: share", share, "of a peer's", f"<= {MOST_SHARE}", share <= MOST_SHARE))
        if case.attack in CLAIMS:
            claims.append(Claim(f"{case.name}: swaps", found[case].swaps, "a peer"))
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
