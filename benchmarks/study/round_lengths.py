"""Compare round lengths at equal time: the length at which "auto" settles on each link, and fixed lengths.

    python benchmarks/study/round_lengths.py time|loss|curve|codecs|table [--seeds 0] [--link home-fibre] [--lengths 8]

A swarm of 8 replicas is simulated with its links; "auto" is a value of `outer.inner_steps`. The model is the toy. Its
links are slower than those of a 125M model by the ratio of the numbers of parameters, so that each transfer takes as
long as with 125M parameters. An inner step takes as long as on the card of lab_clock.py.

    time    without training: measure how long an inner step takes, waits included, and the share of solo rounds
    loss    after `time`: train the toy for as many inner steps as fit into the time of 400 steps without any swap
    curve   train the toy with links that take no time: schedules and rounds of many lengths
    codecs  as `time` and `loss` with other codecs, each in rounds of the length at which "auto" settles with it
    table   print the results, and fit the curve whose constants are in gossip/round_length.py

"auto" starts far from the length at which it settles, and a schedule of the toy is short, so its loss is that of fixed
rounds with the length at which it settled. A schedule has whole rounds, so its virtual time differs slightly from that
of the others. The table uses the exponent of the curve to correct this. The time of the closing rounds does not count,
because it hardly matters in a run of 25,000 steps. Each run is appended to results/round_lengths.jsonl, and a repeated
command continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from statistics import fmean
from typing import Any

import torch
from lab import REPLICAS, Setting
from lab_clock import LINKS, SIZES, coding, swap_bytes
from runs import RESULTS
from study import Case, machine, run_case
from torch import Tensor

from noloco_p2p.gossip.round_length import CURVE_START, FILL, LENGTH_EXPONENT, STEPS_EXPONENT
from noloco_p2p.optim.rules import NOLOCO
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.run import seeded
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.testing.links import LinkProfile
from noloco_p2p.trainer.inner_step import InnerStep

PATH = RESULTS / "round_lengths.jsonl"
SIZE = SIZES[0]
LENGTHS = (2, 3, 5, 8, 12, 20, 30, 50)
STEPS = 400
MUON_RATE, CODEC = 24e-3, "modulo8+int4"  # as `noloco init` wrote it, with the best rate of the toy
TIMED_ROUNDS = 16
AUTO_ROUNDS = 30  # of the expected length; "auto" settles within the first half
CODECS = (CODEC, "modulo8+int2", "modulo8+sign1", "modulo+int4", "modulo+int2", "modulo+sign1", "modulo4+sign1")
BOUNDS = (2, 200)  # of "auto"
FEWEST_ROUNDS = 3  # a schedule with fewer is not informative
CURVE = (  # (round length, steps)
    *((length, STEPS) for length in (2, 3, 5, 8, 20, 50)),
    *((12, 396), (5, 200), (5, 280), (5, 560), (20, 200)),
)
STARTS = [step / 2 for step in range(17)]  # starts of the curve to try


@dataclass(frozen=True, slots=True)
class Key:
    """The settings of one run. `codec` is that of slow weights and outer gradients. `steps` is the schedule's length.

    If `link` is "", transfers take no time. If `inner_steps` is 0, the length is "auto". If `seed` is -1, nothing is
    trained.
    """

    link: str
    inner_steps: int
    steps: int
    seed: int
    codec: str = CODEC


class Rows:
    """The finished runs, by key."""

    def __init__(self) -> None:
        lines = PATH.read_text(encoding="utf-8").splitlines() if PATH.exists() else []
        self.by_key = {
            Key(**{name: row[name] for name in row.keys() & Key.__slots__}): row for row in map(json.loads, lines)
        }

    def keep(self, key: Key, found: dict[str, Any]) -> None:
        row = {**asdict(key), **found, "machine": machine()}
        self.by_key[key] = row
        with PATH.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    def timed(self, link: str, codec: str = CODEC) -> dict[int, dict[str, Any]]:
        """Return the runs without training, by round length (0 = "auto")."""
        runs = (key for key in self.by_key if (key.link, key.seed, key.codec) == (link, -1, codec))
        return {key.inner_steps: self.by_key[key] for key in sorted(runs, key=lambda key: key.inner_steps)}

    def lost(self, link: str, codec: str = CODEC) -> dict[int, dict[int, dict[str, Any]]]:
        """Return the runs with training, by round length and then by seed."""
        found: dict[int, dict[int, dict[str, Any]]] = {}
        for key, row in self.by_key.items():
            if (key.link, key.codec) == (link, codec) and key.seed >= 0:
                found.setdefault(key.inner_steps, {})[key.seed] = row
        return dict(sorted(found.items()))


def spec_of(key: Key) -> TrainerSpec:
    setting = Setting(NOLOCO, "muon", MUON_RATE, key.inner_steps or 1, codec=key.codec, closes=key.seed >= 0)
    spec = setting.spec(key.steps)
    if key.inner_steps:
        return spec
    auto = {"inner_steps": "auto", "min_inner_steps": BOUNDS[0], "max_inner_steps": BOUNDS[1]}
    return spec.with_changes({f"outer.{name}": value for name, value in auto.items()}, origin="auto")


def slowed(link: LinkProfile, spec: TrainerSpec) -> LinkProfile:
    """Return a link for the toy whose early part takes as long as that of SIZE does by the clock of the lab.

    Its rate is that of the slower direction, or that of the codec if the codec is slower. The other direction is
    unlimited, because the toy's only chunk passes the two directions one after the other.
    """
    bytes_per_s = min(link.up_mbit_s, link.down_mbit_s) * 1e6 / 8
    early_bytes, _ = swap_bytes(spec, SIZE.num_parameters)
    early_s = max(early_bytes / bytes_per_s, coding() * SIZE.num_parameters)
    rate = swap_bytes(spec, spec.model.num_parameters())[0] / early_s * 8 / 1e6
    return LinkProfile(link.name, float("inf"), rate, link.delay_ms, link.jitter_ms)


class Untrained(InnerStep):
    """An inner step that does nothing. Do not use it with codecs whose payload sizes depend on the weights."""

    def __call__(self, batch: Tensor, *, progress: float, seed: int | None = None) -> Tensor:
        return torch.zeros(())


def run(key: Key) -> dict[str, Any]:
    spec, replicas = spec_of(key), list[SimulatedReplica]()
    plan = Plan(
        REPLICAS, seed=max(0, key.seed), step_s=SIZE.step_s, links=(slowed(LINKS[key.link], spec),), evaluations=1
    )

    def made(swarm: list[SimulatedReplica]) -> None:
        replicas.extend(swarm)
        for replica in swarm if key.seed < 0 and key.codec.startswith("modulo8") else ():
            replica.inner = Untrained(replica.model, spec.train)

    result = simulate_swarm(Material.of(seeded(spec, plan.seed), {}), plan, on_made=made)
    rounds = result.swapped + result.half + result.alone
    found = {"alone": result.alone / rounds, "half": result.half / rounds}
    if key.seed >= 0:
        return {**found, "loss": result.loss, "spread": result.spread, "virtual_s": last_s(replicas)}
    lengths = [replica.driver.step_rate.inner_steps for replica in replicas]
    late = [fmean(replica.rounds_s[len(replica.rounds_s) // 2 :]) for replica in replicas]
    return {**found, "lengths": lengths, "step_s": fmean(late) / fmean(lengths)}


def last_s(replicas: Iterable[SimulatedReplica]) -> float:
    """Return the mean virtual time at which the replicas finished the schedule, before closing rounds."""
    return fmean(point.virtual_s for replica in replicas for point in replica.curve)


def expected_length(link: str, codec: str = CODEC) -> int:
    """Estimate the length at which "auto" settles, which determines how many steps it needs."""
    spec = Setting(NOLOCO, "muon", MUON_RATE, codec=codec).spec()
    early_s = swap_bytes(spec, SIZE.num_parameters)[0] * 8 / 1e6 / LINKS[link].up_mbit_s
    return max(BOUNDS[0], math.ceil(early_s / 0.4 / SIZE.step_s))


def time_runs(rows: Rows, links: Iterable[str]) -> None:
    for link, length in product(links, (0, *LENGTHS)):
        key = Key(link, length, TIMED_ROUNDS * length, -1) if length else auto_key(link)
        if key not in rows.by_key:
            rows.keep(key, run(key))


def auto_key(link: str, codec: str = CODEC) -> Key:
    return Key(link, 0, AUTO_ROUNDS * max(20, expected_length(link, codec)), -1, codec)


def schedules(rows: Rows, link: str) -> dict[int, int]:
    """Return, by round length, how many inner steps fit into the time of STEPS steps without swaps."""
    found = dict(schedule(row, length) for length, row in rows.timed(link).items())
    return {length: steps for length, steps in sorted(found.items()) if steps >= FEWEST_ROUNDS * length}


def schedule(row: dict[str, Any], length: int) -> tuple[int, int]:
    """Return the inner steps of (a round, the schedule). If `length` is 0, use the length at which "auto" settled."""
    own = length or round(fmean(row["lengths"]))
    return own, own * round(exact_steps(row) / own)


def exact_steps(row: dict[str, Any]) -> float:
    """Return how many inner steps fit into the time of STEPS in a run without training, even in partial rounds."""
    return STEPS * SIZE.step_s / row["step_s"]


def loss_runs(rows: Rows, links: Iterable[str], seeds: Iterable[int], lengths: Iterable[int]) -> None:
    wanted = set(lengths)
    for seed, link in product(seeds, links):
        for length, steps in schedules(rows, link).items():
            key = Key(link, length, steps, seed)
            if key not in rows.by_key and (not wanted or length in wanted):
                rows.keep(key, run(key))


def codec_runs(rows: Rows, links: Iterable[str], seeds: Iterable[int]) -> None:
    for link, codec in product(links, CODECS):
        auto = auto_key(link, codec)
        if auto not in rows.by_key:
            rows.keep(auto, run(auto))
        length, steps = schedule(rows.timed(link, codec)[0], 0)
        for seed in seeds:
            key = Key(link, length, steps, seed, codec)
            if key not in rows.by_key:
                rows.keep(key, run(key))


def curve_runs(rows: Rows, seeds: Iterable[int]) -> None:
    for seed, (length, steps) in product(seeds, CURVE):
        key = Key("", length, steps, seed)
        if key not in rows.by_key:
            setting = Setting(NOLOCO, "muon", MUON_RATE, length, codec=CODEC, closes=True)
            row = run_case(Case("curve", setting.changes(steps)), steps=steps, replicas=REPLICAS, seed=seed)
            rows.keep(key, {"loss": row["loss"]})


@dataclass(frozen=True, slots=True)
class Fit:
    """The curve loss = scale n^-steps (start + H)^length. `error` is the root mean square of the relative errors."""

    start: float
    scale: float
    steps: float
    length: float
    error: float

    def loss(self, inner_steps: float, steps: float) -> float:
        return self.scale * steps**-self.steps * (self.start + inner_steps) ** self.length


def fit(rows: Rows) -> Fit:
    """Fit the curve to the logarithms of the losses of `curve` by least squares."""
    runs = [(key.inner_steps, key.steps, row["loss"]) for key, row in rows.by_key.items() if not key.link]
    losses = torch.tensor([loss for *_, loss in runs], dtype=torch.float64).log()
    found = []
    for start in STARTS:
        sides = [[1.0, -math.log(steps), math.log(start + length)] for length, steps, _ in runs]
        matrix = torch.tensor(sides, dtype=torch.float64)
        best = torch.linalg.lstsq(matrix, losses).solution
        error = float((matrix @ best - losses).square().mean().sqrt())
        found.append(Fit(start, math.exp(best[0]), float(best[1]), float(best[2]), error))
    return min(found, key=lambda each: each.error)


def table(rows: Rows) -> Iterator[str]:
    """Yield the lines of the tables. Both losses are at equal time.

    "curve" is the loss according to the curve, where solo rounds count as longer rounds. "toy" is the loss of trained
    runs.
    """
    curve, time_s = fit(rows), STEPS * SIZE.step_s
    num_runs = sum(not key.link for key in rows.by_key)
    yield f"loss = {curve.scale:.3f} n^-{curve.steps:.3f} ({curve.start:g} + H)^{curve.length:.3f}, {num_runs} runs"
    yield f"root mean square error {100 * curve.error:.1f} %"
    yield f"in gossip/round_length.py: {STEPS_EXPONENT:g}, {CURVE_START:g}, {LENGTH_EXPONENT:g}; fill {FILL:g}"
    for link in LINKS:
        timed, lost = rows.timed(link), rows.lost(link)
        yield ""
        yield f"{link}: {SIZE.name}, {CODEC}, {SIZE.step_s:.2f} s an inner step, {time_s:.0f} s"
        yield f"{'H':>10}  {'s a step':>8}  {'alone':>5}  {'steps':>5}  {'curve':>6}  {'toy, seeds':<24}"
        for length, row in timed.items():
            own = length or fmean(row["lengths"])
            told = f"{own:g}" if length else f"auto = {own:g}"
            steps = exact_steps(row)
            by_curve = curve.loss(own / (1 - row["alone"]), steps)
            runs = sorted(lost.get(round(own), {}).items())
            toy = [f"{run['loss'] * (run['virtual_s'] / time_s) ** curve.steps:.4f} ({seed})" for seed, run in runs]
            found = f"{told:>10}  {row['step_s']:8.2f}  {row['alone']:5.2f}  {steps:5.0f}"
            yield f"{found}  {by_curve:6.3f}  {', '.join(toy)}".rstrip()


def codec_losses(rows: Rows, link: str) -> dict[str, tuple[int, dict[int, float]]]:
    """Return (round length of "auto", loss at equal time by seed) for each codec, corrected as in `table`."""
    curve, time_s, found = fit(rows), STEPS * SIZE.step_s, {}
    for codec in CODECS:
        auto = rows.timed(link, codec).get(0)
        length = schedule(auto, 0)[0] if auto else 0
        runs = sorted(rows.lost(link, codec).get(length, {}).items())
        if runs:
            found[codec] = (
                length,
                {seed: run["loss"] * (run["virtual_s"] / time_s) ** curve.steps for seed, run in runs},
            )
    return found


def codec_table() -> list[str]:
    """Return the table of docs/results.md with the loss at equal time, its range, and the difference from CODEC."""
    rows = Rows()
    lines = [
        "| codec | link | inner steps per round | loss | lowest-highest | against modulo8+int4 |",
        f"|{'---|' * 6}",
    ]
    for link in LINKS:
        found = codec_losses(rows, link)
        for codec, (length, losses) in found.items() if len(found) > 1 else ():
            seeds = losses.keys() & found[CODEC][1].keys()
            ratio = fmean(losses[seed] for seed in seeds) / fmean(found[CODEC][1][seed] for seed in seeds)
            against = "" if codec == CODEC else f"{100 * (ratio - 1):+.1f} %"
            extent = f"{min(losses.values()):.3f}-{max(losses.values()):.3f}" if len(losses) > 1 else "one seed"
            lines.append(f"| {codec} | {link} | {length} | {fmean(losses.values()):.3f} | {extent} | {against} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("time", "loss", "curve", "codecs", "table"))
    parser.add_argument("--link", choices=LINKS, help="one of them; default: all")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--lengths", default="", help="of `loss`; empty = all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, links = Rows(), [args.link] if args.link else list(LINKS)
    seeds, lengths = ([int(each) for each in text.split(",") if each] for text in (args.seeds, args.lengths))
    match args.command:
        case "time":
            time_runs(rows, links)
        case "loss":
            loss_runs(rows, links, seeds, lengths)
        case "curve":
            curve_runs(rows, seeds)
        case "codecs":
            codec_runs(rows, links, seeds)
        case _:
            print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
