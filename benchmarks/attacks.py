"""Measure what the gates cost an honest swarm, and what they prevent when one peer of eight lies.

    python benchmarks/attacks.py [--quick] [--greedy | --claims] [--late CODEC] [--seeds 0,1,2] [--jobs 2] [--json FILE]

The swarms are simulated and train the toy model (toy.toml). Losses are validation losses, averaged over the honest
replicas at the end. "open" means that no gate is active except the finite check. The noise is the difference in loss
between seeds of the same honest swarm. With --greedy, the liar is a ninth peer, which makes offers to all peers at once
over several calls. Swarms of sixteen peers with two or three such liars are measured, too. These swarms train the same
model, but with the optimizer, outer step and codecs that `noloco init` writes. An adaptive liar knows the vectors and
the gates of its partner, and sends the most harmful vectors that still pass. "share" is the share of one liar in the
swaps of the honest replicas, in multiples of 1 / live. With --claims, the greedy liar sends its partner's own weights
and no gradient, and claims to be far ahead of its partner in the schedule, or far behind. With --json, the file is
written after every case, and cases that it already contains are skipped.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from claims import machine
from harness.hostile import ADAPTIVE, CLAIMS, Attack, GreedyReplica
from harness.hostile_swarm import simulate_hostile

from noloco_p2p.optim.gates import OPEN
from noloco_p2p.presets import PRESETS
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.spec import TrainerSpec

TOY = Path(__file__).parent / "toy.toml"
HONEST = "honest"
LIAR = 7
NUM_ROUNDS = 20
MOST_COST, MOST_HARM = 0.003, 0.03


@dataclass(frozen=True, slots=True)
class Case:
    attack: str
    gates: str  # "on" or "open"
    seed: int
    num_peers: int = 8
    num_liars: int = 1
    is_greedy: bool = False
    settings: str = "toy"  # of optimizer, outer step and codecs: those of the toy, or those that `noloco init` writes
    late: str = ""  # codec of the outer gradient; "" = that of the settings
    is_auto: bool = False  # rounds of 5 to 100 inner steps instead of NUM_ROUNDS rounds


def greedy_cases(seeds: list[int]) -> list[Case]:
    honest, greedy = partial(Case, HONEST, settings="init"), partial(Case, is_greedy=True, settings="init")
    attacks = (Attack.FLIPPED_GRADIENT, Attack.NOISE, Attack.STALE, Attack.FLIPPED, *ADAPTIVE)
    cases = [honest("on", seed) for seed in seeds]
    cases += [greedy(attack, "on", seed, 9) for seed in seeds for attack in attacks]
    cases.append(honest("on", seeds[0], 16))
    return cases + [greedy(Attack.FLIPPED_GRADIENT, "on", seeds[0], 16, num) for num in (2, 3)]


def claim_cases(seeds: list[int]) -> list[Case]:
    liars = [(HONEST, 8, False), *((attack, 9, True) for attack in CLAIMS)]
    return [
        Case(attack, "on", seed, num_peers, is_greedy=is_greedy, settings="init", is_auto=is_auto)
        for is_auto in (True, False)
        for seed in seeds
        for attack, num_peers, is_greedy in liars
    ]


def cases(seeds: list[int], *, quick: bool) -> list[Case]:
    """Return the cases, the most important ones first."""
    honest = [Case(HONEST, gates, seed) for seed in seeds for gates in ("open", "on")]
    attacks = [] if quick else [Case(attack, "on", seeds[0]) for attack in Attack]
    bare = [] if quick else [Case(attack, "open", seeds[0]) for attack in (Attack.SCALED, Attack.FLIPPED, Attack.NOISE)]
    return [*honest[:2], *attacks, *honest[2:], *bare]


def settings_of_init() -> dict[str, Any]:
    spec = PRESETS["tiny"]
    sections = {"train": spec.train, "outer": spec.outer, "codec": spec.codec}
    return {f"{name}.{field}": value for name, section in sections.items() for field, value in section}


def run_case(case: Case, *, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    changes: dict[str, Any] = {
        "train.total_steps": steps,
        "train.warmup_steps": steps // 10,
        "outer.inner_steps": max(1, steps // NUM_ROUNDS),
    }
    if case.settings == "init":
        changes = settings_of_init() | changes
    if case.is_auto:
        changes |= {"outer.inner_steps": "auto", "outer.min_inner_steps": 5, "outer.max_inner_steps": 100}
    if case.late:
        changes["codec.outer_gradient"] = case.late
    spec = TrainerSpec.load(TOY).with_changes(changes, origin="attacks.py")
    liars = range(case.num_peers - case.num_liars, case.num_peers)
    plan = Plan(
        case.num_peers,
        seed=case.seed,
        evaluations=1,
        gates=None if case.gates == "on" else OPEN,
    )
    attacks = {} if case.attack == HONEST else {liar: Attack(case.attack) for liar in liars}
    row: dict[str, Any] = asdict(case) | {"steps": steps}
    made: list[SimulatedReplica] = []
    try:
        result = simulate_hostile(Material.of(spec, {}), plan, attacks, are_greedy=case.is_greedy, on_made=made.extend)
    except ValueError as error:  # the weights have grown too large to be coded
        return row | {"loss": None, "failed": str(error)}
    honest = [replica for replica in made if not isinstance(replica, GreedyReplica)]
    row["trained"] = [min(replica.steps for replica in honest), max(replica.steps for replica in honest)]
    if case.is_greedy:
        greedy = [replica for replica in made if isinstance(replica, GreedyReplica)]
        taken = sum(liar.greedy.swaps[replica.peer_id] for liar in greedy for replica in honest)
        swaps = sum(replica.swapped + replica.half + replica.refused for replica in honest)
        row["share"] = taken / case.num_liars / max(1, swaps) * case.num_peers
    fields = ("loss", "worst_loss", "merged_loss", "spread", "swapped", "alone", "refused", "clipped", "cut_share")
    return row | {name: getattr(result, name) for name in fields}


def report(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{'peer 7':<20} {'gates':<5} {'seed':>4} {'loss':>8} {'against honest':>15} {'refused':>8} {'clipped':>8}"
    ]
    honest = {row["seed"]: row["loss"] for row in rows if (row["attack"], row["gates"]) == (HONEST, "open")}
    for row in rows:
        base, loss = honest.get(row["seed"]), row["loss"]
        change = f"{100 * (loss / base - 1):+.2f} %" if base and loss else "-"
        said = f"{loss:.4f}" if loss else "broken"
        counts = f"{row.get('refused', '-'):>8} {row.get('clipped', '-'):>8}"
        lines.append(f"{row['attack']:<20} {row['gates']:<5} {row['seed']:>4} {said:>8} {change:>15} {counts}")
    gated = [row for row in rows if (row["attack"], row["gates"]) == (HONEST, "on") and row["seed"] in honest]
    if len(honest) > 1 and gated:
        cost = mean(row["loss"] / honest[row["seed"]] - 1 for row in gated)
        noise = stdev(honest.values()) / mean(honest.values())
        cut = mean(row["cut_share"] for row in gated)
        verdict = "met" if cost <= MOST_COST else "NOT met"
        lines.append(
            f"cost to an honest swarm, mean of {len(gated)} seeds: {100 * cost:+.2f} % (asked <= 0.3 %: {verdict})"
        )
        lines.append(
            f"noise from seed to seed: {100 * noise:.2f} %; cut off honest offsets: {100 * cut:.1f} % of length"
        )
    harms = {
        row["attack"]: row["loss"] / honest[row["seed"]] - 1
        for row in rows
        if row["attack"] != HONEST and row["gates"] == "on" and row["seed"] in honest and row["loss"]
    }
    if harms:
        worst = max(harms, key=lambda attack: harms[attack])
        verdict = "met" if harms[worst] <= MOST_HARM else "NOT met"
        lines.append(f"worst attack: {worst}, {100 * harms[worst]:+.2f} % (asked <= 3 %: {verdict})")
    return lines


def report_greedy(rows: list[dict[str, Any]]) -> list[str]:
    honest = {(row["seed"], row["num_peers"]): row["loss"] for row in rows if row["attack"] == HONEST}
    lines = [
        f"{'liars of live':<14} {'attack':<20} {'seed':>4} {'loss':>8} {'against honest':>15} {'swaps of one liar':>20}"
    ]
    for row in rows:
        if row["attack"] == HONEST:
            continue
        base = honest.get((row["seed"], 16 if row["num_peers"] == 16 else 8))
        change = f"{100 * (row['loss'] / base - 1):+.2f} %" if base and row["loss"] else "-"
        said, share = f"{row['loss']:.4f}" if row["loss"] else "broken", f"{row.get('share', 0):.2f} / live"
        who = f"{row['num_liars']} of {row['num_peers']}"
        lines.append(f"{who:<14} {row['attack']:<20} {row['seed']:>4} {said:>8} {change:>15} {share:>20}")
    return lines


def report_claims(rows: list[dict[str, Any]]) -> list[str]:
    honest = {(row["is_auto"], row["seed"]): row["loss"] for row in rows if row["attack"] == HONEST}
    lines = [f"{'rounds':<7} {'attack':<11} {'seed':>4} {'inner steps':>12} {'loss':>8} {'against honest':>15}"]
    for row in rows:
        rounds, trained = "auto" if row["is_auto"] else "fixed", "{} to {}".format(*row["trained"])
        change = f"{100 * (row['loss'] / honest[row['is_auto'], row['seed']] - 1):+.2f} %"
        lines.append(f"{rounds:<7} {row['attack']:<11} {row['seed']:>4} {trained:>12} {row['loss']:>8.4f} {change:>15}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="40 steps and no attack")
    parser.add_argument("--greedy", action="store_true", help="liars that make offers to everybody at once")
    parser.add_argument("--claims", action="store_true", help="greedy liars with false claims about the schedule")
    parser.add_argument("--late", default="", metavar="CODEC", help="of the outer gradient, none included")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    steps = 40 if args.quick else args.steps
    rows: list[dict[str, Any]] = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    keys = ("attack", "gates", "seed", "num_peers", "num_liars", "settings", "late", "is_auto")
    done = {tuple((asdict(Case("", "", 0)) | row)[key] for key in keys) for row in rows}
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if args.claims:
        plain = claim_cases(seeds)
    else:
        plain = greedy_cases(seeds) if args.greedy else cases(seeds, quick=args.quick)
    wanted = [replace(case, late=args.late) for case in plain]
    todo = [case for case in wanted if tuple(asdict(case)[key] for key in keys) not in done]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run_case, case, steps=steps) for case in todo]):
            rows.append(future.result())
            rows.sort(key=lambda row: (row["gates"] != "open" or row["attack"] != HONEST, row["attack"] != HONEST))
            if args.json:
                args.json.write_text(
                    json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
                )
    print(machine())
    reported = report_claims if args.claims else report_greedy if args.greedy else report
    print(*reported(rows), sep="\n")


if __name__ == "__main__":
    main()
