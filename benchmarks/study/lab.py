"""Compare all rules fairly, each with its published settings and with the best settings that the same search finds.

    python benchmarks/study/lab.py search|tokens|bytes|time|target|churn [--jobs 2] [--steps 400] [--results FILE]

Run `search` first. Every other command makes one table of docs/results.md: it does the missing runs and prints the
table. Each run is appended to the results at once, and a command that is repeated continues where it stopped. At the
start, a command prints the number of missing runs and how many core hours they take. For experiments, --steps sets
another length for all schedules.

**The search** uses the toy model with 8 replicas, seed 0 and 400 steps. A rule has BUDGET = 40 runs. Rules are compared
under two caps on the bytes that a replica sends, which are about a tenth and a hundredth of ddp's bf16 gradients (0.36
and 0.036 bytes per parameter and inner step, without closing rounds). Each setting has the shortest rounds that its
codec allows under the cap. The 40 runs are divided into 16 for Muon under the first cap, 8 for Muon under the second
cap, and 8 for AdamW under each cap; ddp and `local`, which have no cap, have 20 runs for each optimizer. A search
descends coordinate by coordinate from the published settings. It moves to the next value of a coordinate as long as the
loss falls, first up and then down. It ends when no coordinate moves or the runs are used up. The search under the
second cap starts where the first one ended, and AdamW starts from the outer settings of Muon. The loss is the
validation loss of the slow weights at the end of the schedule, averaged over the replicas.

**The winners** and all published settings then run with the three seeds in SEEDS, none of which is used in the search.
The finalists, which are the better one of Muon and AdamW for each rule and cap, also run with 4 and 16 replicas and,
with one seed, with a model of 0.9M parameters.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product, repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from lab_clock import LINKS, SIZES, Clock, Size, clock_of, coding, round_bytes
from runs import RESULTS
from study import SMALL, TOY, Case, machine, run_case

from noloco_p2p.optim.rules import NOLOCO
from noloco_p2p.simulate.plan import Churn
from noloco_p2p.spec import TrainerSpec

BUDGET = 40  # runs of a rule in the search
STEPS = 400
REPLICAS, SEARCH_SEED, SEEDS = 8, 0, (1, 2, 3)
PEERS = (4, 8, 16)
CAPS = {"tenth": 0.36, "hundredth": 0.036}  # bytes per parameter and inner step; ddp sends 3.5
ROUND_LENGTHS = (
    1,
    2,
    3,
    5,
    6,
    10,
    12,
    20,
    50,
    60,
    100,
)  # of which `time` and `target` choose one, by the loss with the search's seed
LONG = 15  # rounds of at least this many steps have the outer settings of the second cap
SCHEDULES = (100, 140, 200, 280, 400, 560, 800)  # of `target`
ABSENCES = (0.2, 0.5)
SECONDS_A_STEP = {"toy": 0.008, "small": 0.09}  # of one replica on one core, used until a run has been measured
FAILED = math.inf  # the loss of a run that diverged


@dataclass(frozen=True, slots=True)
class Setting:
    """A rule with its settings. `codec` names the codec of a ring, or both codecs of a swap ("modulo8+int4")."""

    rule: str
    optimizer: str
    learning_rate: float
    inner_steps: int = 1
    alpha: float = 0.0
    beta: float = 1.0
    gamma: float = 1.0
    codec: str = "bf16"
    closes: bool = False  # with closing rounds

    def changes(self, steps: int) -> dict[str, Any]:
        """Return the changes to the toy's spec. The warm-up is a tenth of the schedule, as in the toy."""
        slow_weights, _, outer_gradient = self.codec.rpartition("+")
        swapped = {"codec.slow_weights": slow_weights, "codec.outer_momentum": slow_weights} if slow_weights else {}
        return {
            "train.total_steps": steps,
            "train.warmup_steps": max(1, steps // 10),
            "train.inner_optimizer": self.optimizer,
            "train.learning_rate": self.learning_rate,
            "outer.inner_steps": self.inner_steps,
            "outer.alpha": self.alpha,
            "outer.beta": self.beta,
            "outer.gamma": self.gamma,
            "outer.swap_momentum": self.rule != NOLOCO,  # others need the wide bound of gamma
            "codec.outer_gradient": outer_gradient,
            **swapped,
            "outer.closing_rounds": "auto" if self.closes else 0,
        }

    def spec(self, steps: int = STEPS) -> TrainerSpec:
        return TrainerSpec.load(TOY).with_changes(self.changes(steps), origin=self.rule)

    def round_bytes(self) -> float:
        return bytes_of(self)

    def words(self) -> str:
        """Describe everything that differs between the settings of a family."""
        outer = f"{self.inner_steps} steps, {self.alpha:g} {self.beta:g}"
        gamma = f" {self.gamma:g}" if self.rule == NOLOCO else ""
        nesterov = " Nesterov" if self.rule == "diloco-nesterov" else ""
        mixing = f"{outer}{gamma}{nesterov}, {self.codec}, " if self.round_bytes() and self.rule != "ddp" else ""
        return f"{mixing}{self.optimizer} {self.learning_rate:g}"


@cache
def bytes_of(setting: Setting) -> float:
    """Return the bytes per parameter that a replica sends in a round."""
    return round_bytes(setting.rule, setting.spec(), num_replicas=REPLICAS)


RATES = (1e-3, 1.5e-3, 2e-3, 3e-3, 4e-3, 6e-3, 8e-3, 12e-3, 16e-3, 24e-3, 32e-3, 48e-3, 64e-3)
START_RATES = {"muon": 16e-3, "adamw": 4e-3}  # from earlier studies


@dataclass(frozen=True, slots=True)
class Family:
    """A rule as the tables name it.

    `published` has the settings of its authors, with learning rates for the toy. `starts` has the settings from which
    the search starts, with Muon. `coordinates` maps each field to its values in order; `beta` of NoLoCo also sets
    gamma.
    """

    published: Mapping[str, Setting]
    starts: Sequence[Setting]
    coordinates: Mapping[str, Sequence[Any]]

    @property
    def is_capped(self) -> bool:
        return self.starts[0].rule not in ("ddp", "local")

    def moved(self, setting: Setting, name: str, value: Any) -> Setting:
        gamma = {"gamma": value} if name == "beta" and setting.rule == NOLOCO else {}
        return replace(setting, **{name: value}, **gamma)


RATE = {"learning_rate": RATES}
SWAP_CODECS = (
    "fp32+fp32",
    "bf16+int8",
    "modulo8+int4",
    "modulo4+int4",
    "modulo4+int2",
    "modulo4+sign1",
    "modulo4+none",
)
FAMILIES: dict[str, Family] = {
    "ddp": Family(
        {"ddp": Setting("ddp", "adamw", 4e-3)},
        [Setting("ddp", "muon", 16e-3)],
        RATE,
    ),
    "DiLoCo": Family(
        {  # rounds as in Streaming DiLoCo and in NoLoCo's baseline; DiLoCo's own 500 steps do not fit
            "DiLoCo, Nesterov 0.9 0.7": Setting("diloco-nesterov", "adamw", 4e-3, 100, 0.9, 0.7, 0.1, "fp32"),
            "DiLoCo, 0.3 0.7": Setting("diloco", "adamw", 4e-3, 100, 0.3, 0.7, 0.1, "fp32"),
        },
        [
            Setting("diloco-nesterov", "muon", 16e-3, 1, 0.9, 0.7, 0.1, "int8"),
            Setting("diloco", "muon", 16e-3, 1, 0.3, 0.7, 0.1, "int8"),
        ],
        {
            **RATE,
            "alpha": (0.0, 0.3, 0.5, 0.7, 0.8, 0.9),
            "beta": (0.3, 0.5, 0.7, 1.0, 1.3),
            "codec": ("int8", "int4"),
            "rule": ("diloco", "diloco-nesterov"),
        },
    ),
    "NoLoCo, the paper's momentum": Family(
        {"NoLoCo, as published": Setting(NOLOCO, "adamw", 4e-3, 50, 0.5, 0.7, 0.7, "fp32+fp32")},
        [Setting(NOLOCO, "muon", 16e-3, 1, 0.5, 0.7, 0.7, "modulo8+int4")],
        {**RATE, "alpha": (0.1, 0.2, 0.3, 0.5, 0.6), "beta": (0.5, 0.7, 0.85, 1.0), "codec": SWAP_CODECS},
    ),
    "NoLoCo, no outer momentum": Family(
        {
            "NoLoCo, as `noloco init` writes it": Setting(NOLOCO, "muon", 16e-3, 5, 0.0, 1.0, 1.0, "modulo+int2", True),
            "NoLoCo, as `noloco init` wrote it before": Setting(
                NOLOCO, "muon", 16e-3, 5, 0.0, 1.0, 1.0, "modulo8+int4", True
            ),
        },
        [Setting(NOLOCO, "muon", 16e-3, 1, 0.0, 1.0, 1.0, "modulo8+int4", True)],
        {**RATE, "beta": (0.5, 0.7, 0.85, 1.0, 1.2), "codec": SWAP_CODECS},
    ),
    "local": Family(
        {"local": Setting("local", "adamw", 4e-3)},
        [Setting("local", "muon", 16e-3)],
        RATE,
    ),
}
OURS = "NoLoCo, no outer momentum"


Winners = dict[tuple[str, str | None], Setting]  # (optimizer, cap) -> the best setting


@dataclass(frozen=True, slots=True)
class Run:
    setting: Setting
    seed: int
    replicas: int = REPLICAS
    steps: int = STEPS
    absent: float = 0.0
    model: str = "toy"

    def cost(self) -> float:
        """Estimate how many core seconds the inner steps of all replicas take."""
        return self.replicas * self.steps * SECONDS_A_STEP[self.model]


class Lab:
    """The finished runs, in a file with one JSON object per line. Further runs can be added."""

    def __init__(self, path: Path, *, jobs: int = 1, steps: int = STEPS, may_run: bool = True) -> None:
        self.path = path
        self.may_run = may_run
        self.jobs = jobs
        self.steps = steps
        self.rows: dict[Run, dict[str, Any]] = {}
        self.winners: dict[str, Winners] = {}  # of each family whose search has finished
        self.num_tried: dict[str, int] = {}  # runs that the search of a family took
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for row in map(json.loads, lines):
            self.rows[Run(Setting(**row["setting"]), **{name: row[name] for name in RUN_FIELDS})] = row

    def loss(self, run: Run) -> float:
        """Return the loss of a run. If the run is missing, do it first."""
        self.complete([run])
        return self.rows[run]["loss"] or FAILED

    def complete(self, runs: Iterable[Run]) -> None:
        """Do the runs that are missing."""
        missing = [run for run in dict.fromkeys(runs) if run not in self.rows]
        if missing and not self.may_run:
            raise RuntimeError(f"{self.path} lacks {len(missing)} runs; do them with lab.py")
        if len(missing) > 1:
            print(f"{len(missing)} runs, about {self.hours(missing):.1f} hours of a core", flush=True)
        if self.jobs == 1 or len(missing) == 1:
            for run in missing:
                self._keep(*perform(run))
            return
        with ProcessPoolExecutor(self.jobs, mp_context=get_context("spawn")) as pool:
            for done in as_completed([pool.submit(perform, run) for run in missing]):
                self._keep(*done.result())

    def hours(self, runs: Iterable[Run]) -> float:
        """Estimate the core hours of runs from the finished runs, or from SECONDS_A_STEP if there are none."""
        measured = [row["cpu_s"] / run.cost() for run, row in self.rows.items()]
        return (median(measured) if measured else 1.0) * sum(run.cost() for run in runs) / 3600

    def _keep(self, run: Run, result: dict[str, Any]) -> None:
        row = {"setting": asdict(run.setting), **{name: getattr(run, name) for name in RUN_FIELDS}, **result}
        self.rows[run] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = "diverged" if row["loss"] is None else f"loss {row['loss']:.4f}"
        print(f"{run.setting.words():<60} {run.replicas} x {run.steps}  seed {run.seed}  {shown}  {row['cpu_s']:.0f} s")


@cache
def of_results() -> Lab:
    """Return the lab of the committed results, which does no runs."""
    return Lab(RESULTS / "lab.jsonl", may_run=False)


RUN_FIELDS = ("seed", "replicas", "steps", "absent", "model")
KEPT = ("loss", "worst_loss", "merged_loss", "spread", "sent_per_parameter_step", "swapped", "half", "alone")


def perform(run: Run) -> tuple[Run, dict[str, Any]]:
    """Do a run, and return its result. A loss of None means that the run diverged."""
    torch.set_num_threads(1)
    sized = SMALL if run.model == "small" else {}
    case = Case(
        "lab", {**sized, **run.setting.changes(run.steps)}, {"churn": Churn(absent=run.absent)}, run.setting.rule
    )
    row = run_case(case, steps=run.steps, replicas=run.replicas, seed=run.seed)
    result = {name: row[name] for name in KEPT}
    if not math.isfinite(result["loss"]):
        result |= dict.fromkeys(("loss", "worst_loss", "merged_loss", "spread"))
    return run, {**result, "cpu_s": row["cpu_s"], "machine": machine()}


# the search


def capped(setting: Setting, cap: str | None) -> Setting:
    """Return the setting with the shortest rounds that the cap allows."""
    return replace(setting, inner_steps=math.ceil(setting.round_bytes() / CAPS[cap])) if cap else setting


def descend(
    family: Family, starts: Sequence[Setting], *, cap: str | None, budget: int, loss_of: Callable[[Setting], float]
) -> Setting:
    """Return the best setting that coordinate descent finds when it tries at most `budget` settings."""
    tried: dict[Setting, float] = {}

    def value_of(setting: Setting) -> float:
        if setting not in tried:
            tried[setting] = loss_of(setting) if len(tried) < budget else FAILED
        return tried[setting]

    best = min((capped(start, cap) for start in starts), key=value_of)
    has_moved = True
    while has_moved and len(tried) < budget:
        has_moved = False
        for name, values in family.coordinates.items():
            line = [capped(family.moved(best, name, value), cap) for value in values]
            moved = climb(line, line.index(best), value_of)
            has_moved |= moved != best
            best = moved
    return best


def climb(line: Sequence[Setting], start: int, value_of: Callable[[Setting], float]) -> Setting:
    """Move along the line as long as the loss falls, upwards or else downwards, and return the best setting."""
    for ahead in (line[start + 1 :], line[:start][::-1]):
        best = line[start]
        for candidate in ahead:
            if not value_of(candidate) < value_of(best):
                break
            best = candidate
        if best != line[start]:
            return best
    return line[start]


def winners(lab: Lab, name: str) -> Winners:
    """Return the winners of one family, after the missing runs are done."""
    if name not in lab.winners:
        tried: set[Setting] = set()
        lab.winners[name] = searched(lab, FAMILIES[name], tried)
        lab.num_tried[name] = len(tried)
    return lab.winners[name]


def searched(lab: Lab, family: Family, tried: set[Setting]) -> Winners:
    """Return the winners of one family, and add the settings that the search tried to `tried`."""

    def loss_of(setting: Setting) -> float:
        tried.add(setting)
        return lab.loss(Run(setting, SEARCH_SEED, steps=lab.steps))

    found: Winners = {}
    if not family.is_capped:
        for optimizer, rate in START_RATES.items():
            starts = [replace(start, optimizer=optimizer, learning_rate=rate) for start in family.starts]
            found[optimizer, None] = descend(family, starts, cap=None, budget=BUDGET // 2, loss_of=loss_of)
        return found
    starts: Sequence[Setting] = family.starts
    for (optimizer, rate), (cap, budget) in product(START_RATES.items(), (("tenth", 16), ("hundredth", 8))):
        if optimizer == "adamw":
            starts = [replace(found["muon", cap], optimizer=optimizer, learning_rate=rate)]
        found[optimizer, cap] = descend(
            family, starts, cap=cap, budget=budget if optimizer == "muon" else 8, loss_of=loss_of
        )
        starts = [found[optimizer, cap]]
    return found


def search(name: str, results: Path, steps: int) -> list[str]:
    """Search one family in a separate process, and describe its winners."""
    found = winners(Lab(results, steps=steps), name)
    return [f"best {name}, {optimizer}, {cap}: {setting.words()}" for (optimizer, cap), setting in found.items()]


# the runs that each table needs


def entrants(lab: Lab) -> dict[str, Setting]:
    """Return all published settings and all winners, by the name of their row."""
    rows = {f"{name}; published": setting for family in FAMILIES.values() for name, setting in family.published.items()}
    for name in FAMILIES:
        for (optimizer, cap), setting in winners(lab, name).items():
            rows[f"{name}; best, {optimizer}{f', a {cap}' if cap else ''}"] = setting
    return rows


def finalists(lab: Lab) -> dict[tuple[str, str | None], Setting]:
    """Return, for each (family, cap), the winner with the optimizer that did better in the search."""

    def searched_loss(setting: Setting) -> float:
        return lab.loss(Run(setting, SEARCH_SEED, steps=lab.steps))

    return {
        (name, cap): min((winners(lab, name)[optimizer, cap] for optimizer in START_RATES), key=searched_loss)
        for name, family in FAMILIES.items()
        for cap in (CAPS if family.is_capped else (None,))
    }


def fitting(steps: float, inner_steps: int) -> int:
    """Return the longest schedule of at most `steps` with whole rounds, and with a multiple of 10 steps."""
    unit = math.lcm(inner_steps, 10)
    return int(steps + 1e-6) // unit * unit


def best_at(lab: Lab, name: str, inner_steps: int) -> Setting:
    """Return the best setting with Muon for a round length. Families without a cap have no round length.

    It has no closing rounds, which would take up to half of such a short schedule, but little of one of 25,000 steps.
    """
    found = winners(lab, name)
    if not FAMILIES[name].is_capped:
        return found["muon", None]
    cap = "tenth" if inner_steps < LONG else "hundredth"
    return replace(found["muon", cap], inner_steps=inner_steps, closes=False)


@dataclass(frozen=True, slots=True)
class Place:
    size: Size
    link: str

    def clock(self, setting: Setting) -> Clock:
        return clock_at(self, setting)

    def candidates(self, lab: Lab, name: str) -> Iterator[tuple[Setting, Clock]]:
        """Yield the settings of a family that this link can carry, with their clocks."""
        lengths = ROUND_LENGTHS if FAMILIES[name].is_capped else (1,)
        for setting in dict.fromkeys(best_at(lab, name, length) for length in lengths):
            if (clock := self.clock(setting)).is_hidden:
                yield setting, clock

    def steps_in_time(self, lab: Lab, clock: Clock) -> float:
        """Return how many inner steps fit into the time in which a single card takes `lab.steps` steps."""
        return (lab.steps * self.size.step_s - clock.closing_s) / clock.step_s

    def schedules(self, lab: Lab, name: str) -> dict[Setting, int]:
        """Return, for each setting, the number of steps of the longest whole schedule that fits."""
        fits = {
            setting: fitting(self.steps_in_time(lab, clock), setting.inner_steps)
            for setting, clock in self.candidates(lab, name)
        }
        return {setting: steps for setting, steps in fits.items() if steps >= 10}

    def choice(self, lab: Lab, name: str) -> tuple[Setting, int] | None:
        """Return the setting and schedule with the lowest loss on the seed of the search, or None if none fits."""
        schedules = self.schedules(lab, name)
        losses = {setting: lab.loss(Run(setting, SEARCH_SEED, steps=steps)) for setting, steps in schedules.items()}
        best = min(losses, key=losses.__getitem__, default=None)
        return None if best is None else (best, schedules[best])

    def setting(self, lab: Lab, name: str) -> Setting | None:
        """Return the setting whose schedules are compared with a target, or None if no setting can run on this link."""
        chosen = self.choice(lab, name)
        return chosen[0] if chosen else next((setting for setting, _ in self.candidates(lab, name)), None)


@cache
def clock_at(place: Place, setting: Setting) -> Clock:
    link = LINKS[place.link]
    return clock_of(setting.rule, setting.spec(), place.size, link, num_replicas=REPLICAS, coding_s=coding())


PLACES = [Place(size, link) for size in SIZES for link in LINKS]


def seeds_of(setting: Setting, **options: Any) -> list[Run]:
    return [Run(setting, seed, **options) for seed in SEEDS]


def need_tokens(lab: Lab) -> Iterator[Run]:
    yield from need_bytes(lab)
    for setting, replicas in product(finalists(lab).values(), PEERS):
        yield from seeds_of(setting, replicas=replicas, steps=lab.steps)
    for setting in finalists(lab).values():
        yield Run(setting, SEEDS[0], steps=lab.steps, model="small")


def need_bytes(lab: Lab) -> Iterator[Run]:
    for setting in entrants(lab).values():
        yield from seeds_of(setting, steps=lab.steps)


def need_time(lab: Lab) -> Iterator[Run]:
    searched = [
        Run(setting, SEARCH_SEED, steps=steps)
        for place, name in product(PLACES, FAMILIES)
        for setting, steps in place.schedules(lab, name).items()
    ]
    lab.complete(searched)
    for place, name in product(PLACES, FAMILIES):
        if chosen := place.choice(lab, name):
            yield from seeds_of(chosen[0], steps=chosen[1])


def schedules_of(lab: Lab, setting: Setting) -> list[int]:
    """Return the lengths of the schedules of `target` in ascending order."""
    fits = (fitting(steps * lab.steps / STEPS, setting.inner_steps) for steps in SCHEDULES)
    return [steps for steps in dict.fromkeys(fits) if steps >= 10]


def need_target(lab: Lab) -> Iterator[Run]:
    for setting in target_settings(lab).values():
        yield from seeds_of(setting, steps=lab.steps)
    lowest = min(mean_loss(lab, setting, steps=lab.steps) for setting in target_settings(lab).values())
    chosen = [place.setting(lab, name) for place, name in product(PLACES, FAMILIES)]
    for setting in dict.fromkeys(each for each in chosen if each):
        for steps in schedules_of(lab, setting):  # the shortest first, up to one that reaches the targets
            lab.complete(seeds_of(setting, steps=steps))
            if mean_loss(lab, setting, steps=steps) <= lowest:
                break


def target_settings(lab: Lab) -> dict[str, Setting]:
    """Return the settings that set the targets with a schedule of the usual length.

    They are the best ddp, and the best DiLoCo at a tenth of its bytes, both with Muon.
    """
    return {"ddp": winners(lab, "ddp")["muon", None], "DiLoCo": winners(lab, "DiLoCo")["muon", "tenth"]}


def mean_loss(lab: Lab, setting: Setting, **options: Any) -> float:
    return fmean(lab.loss(run) for run in seeds_of(setting, **options))


def churned(lab: Lab) -> dict[str, Setting]:
    """Return the best setting with Muon of each family, at a tenth of the bytes."""
    return {name: winners(lab, name)["muon", "tenth" if FAMILIES[name].is_capped else None] for name in FAMILIES}


def need_churn(lab: Lab) -> Iterator[Run]:
    for setting, absent in product(churned(lab).values(), (0.0, *ABSENCES)):
        yield from seeds_of(setting, steps=lab.steps, absent=absent)


NEEDS: Mapping[str, Callable[[Lab], Iterator[Run]]] = {
    "tokens": need_tokens,
    "bytes": need_bytes,
    "time": need_time,
    "target": need_target,
    "churn": need_churn,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["search", *NEEDS])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--results", type=Path, default=RESULTS / "lab.jsonl")
    args = parser.parse_args()
    lab = Lab(args.results, jobs=args.jobs, steps=args.steps)
    if args.command == "search":
        at_most = [Run(FAMILIES["ddp"].starts[0], seed, steps=args.steps) for seed in range(BUDGET * len(FAMILIES))]
        print(f"at most {BUDGET} runs for each of {len(FAMILIES)} rules, {lab.hours(at_most):.1f} hours of a core")
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            for lines in pool.map(search, FAMILIES, repeat(args.results), repeat(args.steps)):
                print("\n".join(lines), flush=True)
        return
    lab.complete(NEEDS[args.command](lab))
    from lab_tables import LAB_TABLES

    print("\n".join(LAB_TABLES[f"lab_{args.command}"](lab)))


if __name__ == "__main__":
    from lab import main as run  # the tables import this module by its name: a run must be of one class

    run()
