"""Measure what the update filter costs an honest swarm, and what it prevents when one peer of eight lies.

    python benchmarks/attacks.py [--quick] [--seeds 0,1,2] [--steps 200] [--jobs 2] [--json FILE]

The swarms are simulated on links of 0.1 Mbit/s, which carry the weights in about five inner steps, and train the toy
model (toy.toml). Losses are validation losses, averaged over the honest replicas at the end. "open" means that nothing
is clipped. The noise is the difference in loss between seeds of the same honest swarm. `harness/hostile.py` describes
the attacks. With --json, the file is written after every case, and cases that it already contains are skipped.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from claims import machine
from harness.hostile import Attack, simulate_hostile

from noloco_p2p.outer.update_filter import LIMITS, OPEN
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan, parse_links
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.spec import TrainerSpec

TOY = Path(__file__).parent / "toy.toml"
HONEST = "honest"
NUM_PEERS, LIAR = 8, 7
MOST_COST, MOST_HARM = 0.003, 0.03
Case = tuple[str, str, int]  # attack, filter ("on" or "open") and seed


def cases(seeds: list[int], *, quick: bool) -> list[Case]:
    """Return the cases, the most important ones first."""
    honest: list[Case] = [(HONEST, is_on, seed) for seed in seeds for is_on in ("open", "on")]
    if quick:
        return honest
    bare = (Attack.SCALED, Attack.FLIPPED, Attack.NOISE)
    return [*honest, *((attack, "on", seeds[0]) for attack in Attack), *((attack, "open", seeds[0]) for attack in bare)]


def run_case(case: Case, *, steps: int) -> dict[str, Any]:
    attack, is_on, seed = case
    torch.set_num_threads(1)
    changes = {"train.total_steps": steps, "train.warmup_steps": steps // 10, "outer.closing_mixings": 0}
    spec = TrainerSpec.load(TOY).with_changes(changes, origin="attacks.py")
    limits = LIMITS if is_on == "on" else OPEN
    plan = Plan(NUM_PEERS, seed=seed, links=parse_links(["0.1mbit-20ms"]), limits=limits, evaluations=1)
    made: list[SimulatedReplica] = []
    attacks = {} if attack == HONEST else {LIAR: Attack(attack)}
    result = simulate_hostile(Material.of(spec, {}), plan, attacks, on_made=made.extend)
    trained = [replica.steps for replica in made[:LIAR]]
    row = {"attack": attack, "filter": is_on, "seed": seed, "steps": steps, "trained": [min(trained), max(trained)]}
    pieces = sum(replica.metrics.judged_pieces for replica in made[:LIAR])
    clipped = sum(replica.metrics.clipped_pieces for replica in made[:LIAR]) / max(1, pieces)
    return row | {"loss": result.loss, "spread": result.spread, "clipped": clipped}


def report(rows: list[dict[str, Any]]) -> list[str]:
    honest = {row["seed"]: row["loss"] for row in rows if (row["attack"], row["filter"]) == (HONEST, "open")}
    lines = [
        f"{'peer 7':<14} {'filter':<6} {'seed':>4} {'loss':>8} {'against honest':>15} {'clipped':>8} {'steps':>12}"
    ]
    changes: dict[tuple[str, str, int], float] = {}
    for row in rows:
        change = changes[row["attack"], row["filter"], row["seed"]] = row["loss"] / honest[row["seed"]] - 1
        trained = "{} to {}".format(*row["trained"])
        lines.append(
            f"{row['attack']:<14} {row['filter']:<6} {row['seed']:>4} {row['loss']:>8.4f} {100 * change:>13.2f} % "
            f"{100 * row['clipped']:>6.1f} % {trained:>10}"
        )
    if len(honest) > 1:
        cost = mean(change for (attack, is_on, _), change in changes.items() if (attack, is_on) == (HONEST, "on"))
        noise = stdev(honest.values()) / mean(honest.values())
        verdict = "met" if cost <= MOST_COST else "NOT met"
        lines.append(f"cost to an honest swarm: {100 * cost:+.2f} % (asked <= 0.3 %: {verdict})")
        lines.append(f"noise from seed to seed: {100 * noise:.2f} %")
    harms = {attack: change for (attack, is_on, _), change in changes.items() if is_on == "on" and attack != HONEST}
    if harms:
        worst = max(harms, key=lambda attack: harms[attack])
        verdict = "met" if harms[worst] <= MOST_HARM else "NOT met"
        lines.append(f"worst attack: {worst}, {100 * harms[worst]:+.2f} % (asked <= 3 %: {verdict})")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="40 steps and no attack")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    done = {(row["attack"], row["filter"], row["seed"]) for row in rows}
    wanted = cases([int(seed) for seed in args.seeds.split(",")], quick=args.quick)
    steps = 40 if args.quick else args.steps
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run_case, case, steps=steps) for case in wanted if case not in done]):
            rows.append(future.result())
            rows.sort(key=lambda row: (row["attack"] != HONEST, row["filter"] != "open"))
            if args.json:
                text = json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n"
                args.json.write_text(text, encoding="utf-8")
    print(machine())
    print(*report(rows), sep="\n")


if __name__ == "__main__":
    main()
