"""Measure what the update filter costs an honest swarm, and what it prevents when peers lie.

    python benchmarks/attacks.py [--quick] [--json FILE] [--kept FILE] [--minutes M] [--jobs N]

The swarms are simulated on links of 0.6 Mbit/s, which carry the weights in about five inner steps, and a few on
"slow links" of 0.1 Mbit/s, which carry them in about thirty. They train the toy model (toy.toml) with the optimizer,
the codec and the closing swaps that `noloco init` writes; liars take part to the end. Losses are validation losses,
averaged over the honest replicas at the end, and compared with those of the same replicas without liars. The figures
of an attack are means over the seeds that are done, of two. "open" means that there is no filter. `harness/hostile.py`
describes the attacks. A greedy liar makes offers to everybody all the time, and accepts every offer. The share of a
liar is its share of the swaps of honest peers, in multiples of that of another peer.

With `--kept`, each case is added to a file of JSON lines (results/attacks.jsonl), and those that it holds for the same
limits are not simulated again. With `--minutes`, no case begins after this time, and the table has those that are done.
lab/liars.py measures most attacks in a larger run, in which half-differences and steps have other lengths.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from unittest.mock import patch

import torch
from claims import Claim, show
from harness.hostile import CLAIMS, Attack, simulate_hostile

from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.outer import update_filter
from noloco_p2p.presets import PRESETS
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan, parse_links, peer_name
from noloco_p2p.simulate.replica import SimulatedReplica, now_s
from noloco_p2p.spec import TrainerSpec

TOY = Path(__file__).parent / "toy.toml"
NUM_STEPS, QUICK_STEPS, SEEDS, HOSTILE_SEEDS, JOBS = 200, 40, (0, 1, 2, 3), (0, 1), 2
ADAPTIVE = (Attack.BACK, Attack.UPHILL, Attack.DRIFT)
OPEN = "open"
NO_LIMITS = dict.fromkeys(("RADIUS", "MOST", "FIRST", "PULL", "DRAG", "FIRST_DRAG"), 1e9)
ISLANDS, OWN_TEXTS = "two islands until the middle", "each with its own texts"
SLOW, LINKS = "slow links", {True: "0.1mbit-20ms", False: "0.6mbit-20ms"}
MOST_COST, MOST_HARM, MOST_HARM_OF_THREE, MOST_SHARE = 0.3, 3.0, 6.0, 1.5


@dataclass(frozen=True, slots=True)
class Case:
    """A swarm of `num_honest` peers and `num_liars` liars."""

    attack: Attack | None = None
    num_honest: int = 8
    num_liars: int = 0
    is_greedy: bool = False
    filter: str = ""  # OPEN, or empty for the filter's own limits
    seed: int = 0
    setting: str = ""  # ISLANDS, OWN_TEXTS or SLOW

    @property
    def name(self) -> str:
        ways = [f"{self.num_liars} of {self.num_honest + self.num_liars}", self.attack or "honest", self.setting]
        return ", ".join(filter(None, [*ways, "greedy" * self.is_greedy, self.filter]))

    @property
    def limits(self) -> dict[str, float]:
        """The constants of the filter."""
        own = {name: value for name, value in vars(update_filter).items() if name.isupper()}
        return own | (NO_LIMITS if self.filter == OPEN else {})

    def key(self, steps: int) -> str:
        return json.dumps(asdict(self) | {"steps": steps, "limits": self.limits}, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Found:
    loss: float
    clipped: float  # share of the pieces
    share: float  # of one liar in the swaps of the honest peers, relative to that of another peer
    swaps: float  # of an honest peer
    spread: float  # of the honest replicas at the end


def cases(*, quick: bool) -> list[Case]:
    honest = [Case(filter=name, seed=seed) for seed in (SEEDS[:1] if quick else SEEDS) for name in ("", OPEN)]
    if quick:
        return [*honest, *(Case(attack, num_liars=1) for attack in (Attack.SCALED, Attack.BACK))]
    hostile = [
        *(Case(filter=name, setting=setting) for setting in (OWN_TEXTS, SLOW) for name in ("", OPEN)),
        *(Case(attack, num_liars=1, setting=SLOW) for attack in (*ADAPTIVE, Attack.CONSTANT)),
        *(Case(attack, num_liars=1) for attack in dict.fromkeys((*ADAPTIVE, *Attack))),
        *(Case(attack, num_liars=1, is_greedy=True) for attack in (*ADAPTIVE, Attack.NOISE, Attack.STALLS)),
        Case(num_honest=14),
        *(Case(attack, num_honest=14, num_liars=3) for attack in ADAPTIVE),
        *(Case(attack, num_liars=1, filter=OPEN) for attack in (Attack.SCALED, Attack.FLIPPED, Attack.BACK)),
    ]
    both = (replace(case, seed=seed) for seed in HOSTILE_SEEDS for case in hostile)
    return sorted([*honest, Case(setting=ISLANDS), *both], key=lambda case: case.seed)  # --minutes leaves seeds out


def material_and_plan(steps: int, case: Case, folder: Path) -> tuple[Material, Plan]:
    init = PRESETS["tiny"]
    changes = {f"{name}.{field}": value for name in ("train", "outer", "codec") for field, value in getattr(init, name)}
    changes |= {"train.total_steps": steps, "train.warmup_steps": steps // 10, "outer.closing_mixings": "auto"}
    changes |= {"codec.weights": "int8"} if case.attack is Attack.NAN else {}
    changes |= {"data.source": "own"} if case.setting == OWN_TEXTS else {}
    links = parse_links([LINKS[case.setting == SLOW]])
    plan = Plan(case.num_honest + case.num_liars, seed=case.seed, links=links, evaluations=1)
    texts = own_texts(folder, case.num_honest) if case.setting == OWN_TEXTS else {}
    return Material.of(TrainerSpec.load(TOY).with_changes(changes), texts), plan


def own_texts(folder: Path, num_parts: int) -> dict[str, str]:
    """Give each replica other packages of the standard library. Every twentieth file is for the validation of all."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*/*.py"))
    for number, file in enumerate(files):
        part = folder / ("validation" if number % 20 == 0 else str(number * num_parts // len(files)))
        part.mkdir(exist_ok=True)
        (part / f"{number}.txt").symlink_to(file)
    return {"own": f"{folder}/{{replica}}/*.txt", "own.validation": f"{folder}/validation/*.txt"}


def simulate(case: Case, steps: int) -> Found:
    torch.set_num_threads(1)
    num_live = case.num_honest + case.num_liars
    attacks = {} if case.attack is None else dict.fromkeys(range(case.num_honest, num_live), case.attack)
    made: list[SimulatedReplica] = []

    def on_made(replicas: list[SimulatedReplica]) -> None:
        made.extend(replicas)
        if case.setting == ISLANDS:
            divide(replicas, until_s=steps / 2)

    with patch.dict(vars(update_filter), case.limits), tempfile.TemporaryDirectory() as folder:
        material, plan = material_and_plan(steps, case, Path(folder))
        result = simulate_hostile(material, plan, attacks, is_greedy=case.is_greedy, on_made=on_made)
    honest, liars = made[: case.num_honest], {peer_name(number) for number in attacks}
    swaps = [swap for replica in honest for swap in replica.swaps]
    share = sum(swap.partner in liars for swap in swaps) / len(swaps) * (num_live - 1) / max(1, len(liars))
    pieces, clipped = (
        sum(getattr(each.metrics, name) for each in honest) for name in ("judged_pieces", "clipped_pieces")
    )
    return Found(result.loss, clipped / max(1, pieces), share, len(swaps) / len(honest), result.spread)


def divide(made: Sequence[SimulatedReplica], *, until_s: float) -> None:
    """Hide the two halves of a swarm from each other."""

    def seen(live: Callable[[], Sequence[Candidate]], half: int) -> list[Candidate]:
        names = {peer_name(number) for number in range(half, len(made), 2)}
        return [peer for peer in live() if now_s() >= until_s or peer.peer_id in names]

    for replica in made:
        directory = replica._service._outside.directory
        directory.live = partial(seen, directory.live, replica.number % 2)


def simulate_all(wanted: Iterable[Case], steps: int, args: argparse.Namespace) -> dict[Case, Found]:
    """Return what was found in each case, or in those that `args.kept` holds and those that were done in time."""
    until_s = time.monotonic() + 60 * args.minutes
    lines = args.kept.read_text(encoding="utf-8").splitlines() if args.kept and args.kept.exists() else []
    kept: Mapping[str, Found] = {line["case"]: Found(**line["found"]) for line in map(json.loads, lines)}
    found = {case: kept[case.key(steps)] for case in wanted if case.key(steps) in kept}
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(simulate_until, until_s, case, steps): case for case in wanted if case not in found}
        for future in as_completed(futures):
            if (result := future.result()) is None:
                continue
            case = futures[future]
            found[case] = result
            if args.kept:
                with args.kept.open("a", encoding="utf-8") as file:
                    print(json.dumps({"case": case.key(steps), "found": asdict(result)}), file=file)
    return found


def simulate_until(until_s: float, case: Case, steps: int) -> Found | None:
    """Simulate a case that begins before this time, on the clock of all processes."""
    return simulate(case, steps) if time.monotonic() <= until_s else None


def claims_of(found: Mapping[Case, Found], *, quick: bool) -> list[Claim]:
    """Return the claims about all cases that were found."""
    wanted = [case for case in cases(quick=quick) if case in found]

    def change(case: Case, other: Case) -> float:
        return 100 * (found[case].loss / found[other].loss - 1)

    opened = [case for case in wanted if case == Case(filter=OPEN, seed=case.seed)]
    costs, losses = [change(Case(seed=case.seed), case) for case in opened], [found[case].loss for case in opened]
    met = None if quick else mean(costs) <= MOST_COST
    claims = [
        Claim(f"honest, seed {case.seed}: cost of the filter", cost, "%")
        for case, cost in zip(opened, costs, strict=True)
    ]
    claims.append(Claim("honest: cost of the filter, mean of the seeds", mean(costs), "%", f"<= {MOST_COST}", met))
    claims.append(Claim("honest: clipped", 100 * found[Case()].clipped, "% of pieces"))
    claims.append(Claim("honest: swaps", found[Case()].swaps, "a peer"))
    claims.append(Claim("honest: spread at the end", 100 * found[Case()].spread, "%"))
    if (islands := Case(setting=ISLANDS)) in found:
        claims.append(Claim(f"{ISLANDS}: spread at the end", 100 * found[islands].spread, "%"))
        claims.append(Claim(f"{ISLANDS}: loss", change(islands, Case()), "%"))
    for setting in (OWN_TEXTS, SLOW):
        some = [case for case in wanted if case == Case(setting=setting, seed=case.seed)]
        pairs = [(case, opened) for case in some if (opened := replace(case, filter=OPEN)) in found]
        if pairs:
            cost = mean(change(*pair) for pair in pairs)
            claims.append(Claim(f"honest, {setting}: cost of the filter", cost, "%"))
    if len(losses) > 1:
        claims.append(Claim("honest: noise from seed to seed", 100 * stdev(losses) / mean(losses), "%"))
    for case in (case for case in wanted if case.attack and not case.seed):
        seeds = [each for each in wanted if each.name == case.name]
        harm = mean(change(each, replace(each, attack=None, num_liars=0, is_greedy=False, filter="")) for each in seeds)
        most = MOST_HARM if case.num_liars == 1 else MOST_HARM_OF_THREE
        target = ("", None) if case.filter or case.setting or quick else (f"<= {most:g}", harm <= most)
        claims.append(Claim(f"{case.name}: loss", harm, "%", *target))
        if case.is_greedy and not case.filter:
            share = mean(found[each].share for each in seeds)
            claims.append(Claim(f"{case.name}: share", share, "of a peer's", f"<= {MOST_SHARE}", share <= MOST_SHARE))
        if case.attack in CLAIMS:
            claims.append(Claim(f"{case.name}: swaps", found[case].swaps, "a peer"))
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller run, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the claims as JSON")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="keep what each case gives, and do not repeat it")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after this time")
    parser.add_argument("--jobs", type=int, default=JOBS, help="cases at a time")
    args = parser.parse_args()
    wanted = cases(quick=args.quick)
    found = simulate_all(wanted, QUICK_STEPS if args.quick else NUM_STEPS, args)
    print(f"# {len(found)} of {len(wanted)} cases")
    if found:
        show(claims_of(found, quick=args.quick), args.json)


if __name__ == "__main__":
    main()
