"""Find out why late corrections increase the loss although they do not move the mean, with one experiment per cause.

    python benchmarks/study/lateness.py quadratic|toy|curvature [--steps 200] [--seeds 0] [--json FILE]

A round ends with a swap: a replica has moved by its own outer gradient g_i, and the correction c = (g_j - g_i) / 2
moves it to the mean of the pair. Eager training adds c some steps L later. The corrections of two partners are
opposite, so they never move the mean. Hypotheses, stated before the runs:

H1 Undone. Until c arrives, a replica is at distance -c from the mean of its pair, and its own steps pull it back where
   the loss is curved. With curvature l and rate e they leave a share r = (1 - e l)^L of the distance. Then c
   overshoots: the replica ends (1 - r) c beyond the mean. So a late correction is worse than none where r < 1/2.
   It predicts: (a) lateness costs nothing in flat directions, and nearly all of the cost is in curved ones (`curved
   late` against `flat late`); (b) where r < 1/2 a dropped correction costs less than a late one (`quadratic`); (c)
   adding the remaining distance instead of c removes the cost (`what is left`); (d) the cost falls with the rate.
H2 Stale mixing. Slow weights travel during a round, so those that meet in the next swap lack the corrections that
   arrived meanwhile. It predicts that `mixes corrected weights` removes the cost.
H3 Solo rounds. On a link that carries late parts into the next round, offers queue, and 14 % of the rounds found no
   partner in the study that showed a cost of 9.5 %. It predicts that the same share of solo rounds costs as much when
   all other rounds wait (`solo`).
H4 Noise of one partner. It predicts that a late mean of all replicas costs less than the late half of a pair (`late
   mean of all` against `mean of all`).

One seed contradicted H1, H3 and H4, and supported a part of H2. Stated after that seed and before the others:

H5 Two halves of one swap that do not match. The early half mixes slow weights as they were when the round began,
   without the correction of the previous swap; the late half mixes outer gradients that also leave this correction out.
   So the next swap never averages the difference between partners that a correction makes. It predicts that (a) waiting
   for corrections, but mixing weights without them, costs about as much (`waiting, mixes stale weights`); (b) a late
   part relative to the weights that travelled (fast weights minus those, instead of minus the corrected slow weights)
   helps as much as `mixes corrected weights` and sends no more (`counted from what travelled`); (c) the number of steps
   by which a correction is late matters less than that it is late at all.
H6 The remaining cost is lateness itself: the steps between boundary and correction start from weights that are not
   mixed. It predicts that this cost grows with the number of these steps.
H7 The inner optimizer matters little: Muon, as `noloco init` writes it, also loses by H5.

Stated after the first seed of H5 and H6, in which late replicas stayed as close together as waiting ones, but had
smaller gradients and a higher loss:

H8 Stable steps. Averaging damps the steps of each replica in the steepest directions, where the rate is near the bound
   beyond which steps diverge. A late correction damps less or excites, so the swarm has to stay where the loss is less
   curved. It predicts that (a) the curvature relative to that bound is smaller when corrections are late, at the same
   distance between replicas (`curvature`); (b) waiting only in the last quarter of the run, while the rate falls,
   removes much of the cost (`late by 2, waiting at the end`), and being late only in that quarter costs little (`late
   by 2 at the end`).

Stated after one seed of `curvature` at half of the run, which was far below the bound in all cases:

H9 The warm-up. The curvature is at the bound only during the warm-up, while the rate grows. It predicts that curvature
   differs only there, and that waiting in the first quarter removes the cost (`late by 2, waiting at the start`), while
   being late only in that quarter causes most of it (`late by 2 at the start`).

`quadratic` has independent directions with known curvature, noisy gradients and plain steps; H1 determines the
remaining share of each direction without a fit. `toy` is the toy of the studies with AdamW at 4e-3, rounds of 5 steps,
0 1 1, all replicas in one loop. `undone` measures H1: the share of the distance between partners along c that has gone
when c arrives, over all elements, and over the tenth with the largest second moments of Adam (`curved`). `apart` is the
distance of the replicas from their mean as a share of its norm, at the first and at the last step of a round, in the
second half of the run; `gradient_norm` likewise, before clipping. `curvature` takes the same runs up to half of their
steps. Five times on the way it measures the largest eigenvalue of the Hessian in the units of Adam, times the learning
rate, over (2 + 2 b) / (1 - b), beyond which steps with a first moment of decay b diverge on a quadratic (Cohen et al.,
2207.14484); mean of two replicas.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from study import TOY, averaging, machine
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from noloco_p2p.optim.schedule import learning_rate
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.result import judge
from noloco_p2p.simulate.run import seeded
from noloco_p2p.simulate.swarm import peer_name
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.inner_step import InnerStep

REPLICAS, ROUND = 8, 5
MEASURED = ("apart", "gradient_norm")
CURVED = 0.1  # the share of elements with the largest second moments
RATE, MUON_RATE = 4e-3, 24e-3


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of the swap.

    `late` is the number of steps between a boundary and its correction, which is at most a round, or 0 for waiting.
    `part` is the part of the correction that is late; the rest is added at the boundary. `adds` says what is added
    late: c itself, nothing, or the remaining distance of the partners along c. `group` says which replicas mix: a pair
    or all of them. `mixes` says which slow weights mix: those at the start of the round, those with all corrections
    since then, or those without the last correction, even if it was not late. `counts_from` says to which weights the
    late part is relative: the slow weights with all corrections, or those that were sent. `solo` is the share of rounds
    in which a replica has no partner.
    """

    case: str
    late: int = 0
    part: str = "all"  # all, curved, flat
    adds: str = "correction"  # correction, nothing, left
    group: str = "pair"  # pair, everybody
    mixes: str = "travelled"  # travelled, corrected, stale
    counts_from: str = "slow"  # slow, travelled
    solo: float = 0.0
    waits_from: float = 1.0  # share of the run after which nothing is late
    late_from: float = 0.0  # share of the run before which nothing is late
    optimizer: str = "adamw"
    rate: float = RATE


LATE = 2
VARIANTS = [
    Variant("waiting"),
    *(Variant(f"late by {late}", late) for late in (1, LATE, 4)),
    Variant("dropped", LATE, adds="nothing"),
    Variant("what is left", LATE, adds="left"),
    Variant("curved late", LATE, part="curved"),
    Variant("flat late", LATE, part="flat"),
    Variant("mixes corrected weights", LATE, mixes="corrected"),
    Variant("late by 1, mixes corrected weights", 1, mixes="corrected"),
    Variant("waiting, mixes stale weights", mixes="stale"),
    Variant(f"late by {LATE}, waiting at the end", LATE, waits_from=0.75),
    Variant(f"late by {LATE} at the end", LATE, late_from=0.75),
    Variant(f"late by {LATE}, waiting at the start", LATE, late_from=0.25),
    Variant(f"late by {LATE} at the start", LATE, waits_from=0.25),
    *(Variant(f"late by {late}, counted from what travelled", late, counts_from="travelled") for late in (1, LATE, 4)),
    Variant("mean of all", group="everybody"),
    Variant("late mean of all", LATE, group="everybody"),
    Variant("solo", solo=0.14),
    Variant("Muon, waiting", optimizer="muon", rate=MUON_RATE),
    Variant(f"Muon, late by {LATE}", LATE, optimizer="muon", rate=MUON_RATE),
    Variant("Muon, counted from what travelled", LATE, counts_from="travelled", optimizer="muon", rate=MUON_RATE),
    *(
        Variant(f"{name}, rate {rate:g}", late, rate=rate)
        for rate in (1e-3, 8e-3)
        for name, late in (("waiting", 0), ("late", LATE))
    ),
]


def pairs(rng: random.Random, present: Sequence[int]) -> Tensor:
    """Draw pairs, and return the matrix whose row i averages the pair of replica i. A replica alone keeps its own."""
    order, matrix = rng.sample(present, len(present)), torch.eye(REPLICAS)
    for one, other in zip(order[::2], order[1::2], strict=False):
        matrix[[one, one, other, other], [one, other, one, other]] = 0.5
    return matrix


class Toy:
    """All replicas of a variant in one loop. Each replica is a row of the matrices."""

    def __init__(self, variant: Variant, *, steps: int, seed: int) -> None:
        train = {"total_steps": steps, "learning_rate": variant.rate, "inner_optimizer": variant.optimizer}
        changes = {**{f"train.{name}": value for name, value in train.items()}, **averaging(ROUND)}
        spec = seeded(TrainerSpec.load(TOY).with_changes(changes, origin=variant.case), seed)
        self.variant = variant
        self.steps = steps
        self.material = Material.of(spec, {})
        self.inner = [InnerStep(self.material.model(), spec.train) for _ in range(REPLICAS)]
        self.flat = [FlatParameters(inner.model) for inner in self.inner]
        self.batches = [self.material.batches(peer_name(number), replica=number) for number in range(REPLICAS)]
        self.rng = random.Random(f"lateness/{seed}")
        self.slow = self.fast()  # at the start of the round, with all corrections since
        self.travelling = self.slow.clone()  # what partners receive: as at the start of the round
        self.correction = torch.zeros_like(self.slow)
        self.matrix = torch.eye(REPLICAS)  # of this round, see `pairs`
        self.is_late = False  # whether the correction of this round is
        self.undone: dict[str, list[float]] = {"all": [], "curved": []}
        self.measured: dict[str, list[float]] = {f"{what}_{at}": [] for what in MEASURED for at in ("first", "last")}

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            for inner, batches in zip(self.inner, self.batches, strict=True):
                inner(next(batches), progress=step / self.steps)
            in_round = step % ROUND + 1
            if step >= self.steps // 2 and in_round in (1, ROUND):
                self.measure("first" if in_round == 1 else "last")
            if in_round == self.variant.late and self.is_late:
                self.correct()
            if in_round == ROUND:
                share = (step + 1) / self.steps
                self.is_late = self.variant.late > 0 and self.variant.late_from <= share < self.variant.waits_from
                self.swap()

    def run(self) -> dict[str, Any]:
        self.train(0, self.steps)
        self.correct()
        judged = judge(self.material, list(self.slow))
        undone = {f"undone_{name}": fmean(each) if each else None for name, each in self.undone.items()}
        measured = {name: fmean(each) for name, each in self.measured.items()}
        return {name: judged[name] for name in ("loss", "merged_loss", "spread")} | undone | measured

    def measure(self, at: str) -> None:
        fast = self.fast()
        mean = fast.mean(0)
        self.measured[f"apart_{at}"].append(((fast - mean).norm(dim=1).mean() / mean.norm()).item())
        norms = [inner.gradient_norm.item() for inner in self.inner if inner.gradient_norm is not None]
        self.measured[f"gradient_norm_{at}"].append(fmean(norms))

    def swap(self) -> None:
        gradient = self.fast() - self.slow
        self.matrix = self.groups()
        mixed = self.slow if self.variant.mixes == "corrected" else self.travelling
        offset = self.matrix @ mixed - mixed
        counted = self.fast() - self.travelling if self.variant.counts_from == "travelled" else gradient
        correction = self.matrix @ counted - counted
        late = self.mask() if self.is_late else torch.zeros_like(correction, dtype=torch.bool)
        self.correction = correction * late
        self.slow += gradient + offset + correction * ~late
        self.travelling = self.slow - correction if self.variant.mixes == "stale" else self.slow.clone()
        self.write(self.slow)

    def correct(self) -> None:
        if not self.correction.any():
            return
        fast = self.fast()
        left = self.matrix @ fast - fast  # the distance to the mean of the group now
        added = self.correction if self.variant.adds == "correction" else torch.zeros_like(left)
        parts = {"all": torch.ones_like(fast)}
        if self.variant.optimizer == "adamw":
            parts["curved"] = self.curved()
        for name, chosen in parts.items():
            size = (self.correction.square() * chosen).sum()
            if size:
                self.undone[name].append(1 - ((left * self.correction * chosen).sum() / size).item())
        if self.variant.adds == "left":
            added = torch.cat(
                [self.along(*pair) for pair in zip(self.split(left), self.split(self.correction), strict=True)], 1
            )
        self.slow += added
        self.write(fast + added)
        self.correction = torch.zeros_like(added)

    @staticmethod
    def along(left: Tensor, correction: Tensor) -> Tensor:
        """Return the component of `left` along the correction. Both have shape (replicas, elements of one parameter).

        All replicas use the same share, so the mean does not move.
        """
        return correction * ((left * correction).sum() / correction.square().sum().clamp_min(1e-30))

    def split(self, rows: Tensor) -> list[Tensor]:
        return list(rows.split([parameter.numel() for _, parameter in self.flat[0].named], 1))

    def groups(self) -> Tensor:
        if self.variant.group == "everybody":
            return torch.full((REPLICAS, REPLICAS), 1 / REPLICAS)
        return pairs(self.rng, [number for number in range(REPLICAS) if self.rng.random() >= self.variant.solo])

    def mask(self) -> Tensor:
        if self.variant.part == "all":
            return torch.ones_like(self.slow, dtype=torch.bool)
        return self.curved() if self.variant.part == "curved" else ~self.curved()

    def curved(self) -> Tensor:
        """Return a mask of the elements with the largest mean second moments, the same for all replicas."""
        moments = torch.stack([self.second_moments(inner) for inner in self.inner]).mean(0)
        threshold = moments.kthvalue(int((1 - CURVED) * moments.numel())).values
        return (moments > threshold).expand(REPLICAS, -1)

    @staticmethod
    def second_moments(inner: InnerStep) -> Tensor:
        (adam,) = inner.optimizers
        return torch.cat([adam.state[parameter]["exp_avg_sq"].flatten() for parameter in inner.trainable.values()])

    def fast(self) -> Tensor:
        return torch.stack([flat.read(0, flat.num_elements) for flat in self.flat])

    def write(self, rows: Tensor) -> None:
        for flat, row in zip(self.flat, rows, strict=True):
            flat.write(0, row)


def largest_eigenvalue(inner: InnerStep, batch: Tensor, num_iterations: int = 20) -> float:
    """Return the largest eigenvalue of the loss's Hessian, preconditioned by Adam's scales, by power iteration."""
    (adam,) = inner.optimizers
    decay, eps = adam.param_groups[0]["betas"][1], adam.param_groups[0]["eps"]
    parameters = [*inner.trainable.values()]
    scales = []
    for state in (adam.state[parameter] for parameter in parameters):
        moment = state["exp_avg_sq"] / (1 - decay ** float(state["step"]))
        scales.append((moment.sqrt() + eps).rsqrt())
    generator = torch.Generator().manual_seed(0)
    vector = [torch.randn(scale.shape, generator=generator) for scale in scales]
    length = 0.0
    with sdpa_kernel(SDPBackend.MATH):  # other backends have no second derivatives
        gradients = torch.autograd.grad(inner.loss(batch), parameters, create_graph=True)
        for _ in range(num_iterations):
            norm = math.sqrt(sum(float(part.square().sum()) for part in vector))
            scaled = [part / norm * scale for part, scale in zip(vector, scales, strict=True)]
            products = torch.autograd.grad(gradients, parameters, scaled, retain_graph=True)
            vector = [product * scale for product, scale in zip(products, scales, strict=True)]
            length = math.sqrt(sum(float(part.square().sum()) for part in vector))
    return length


AT = (0.1, 0.15, 0.2, 0.3, 0.5)  # of the run; the warm-up ends at 0.2
IN_CURVATURE = ("waiting", "late by 1", f"late by {LATE}")
IN_QUADRATIC = (
    *("waiting", "late by 1", f"late by {LATE}", "late by 4", "dropped", "what is left", "mixes corrected weights"),
    *("waiting, mixes stale weights", f"late by {LATE}, counted from what travelled"),
)
CURVATURES = (
    0.02,
    0.1,
    0.3,
    0.6,
    1.0,
    1.4,
    1.8,
)  # times the rate: the share that one step removes; beyond 2 steps diverge


def quadratic() -> list[dict[str, Any]]:
    """Return, for each curvature, the mean square distance of replicas from their mean, relative to that when waiting.

    There are 8 replicas and 4,000 copies of each direction. The rate is 1, and gradients have unit noise. After 40
    rounds, in which the start is forgotten, 40 rounds are measured after each step. `rest` is r = (1 - e l)^L, and
    `predicted` is the variant that H1 expects to be nearer to waiting.
    """
    rows = []
    for curvature in CURVATURES:
        found = {variant.case: spread(variant, curvature) for variant in VARIANTS if variant.case in IN_QUADRATIC}
        rest = (1 - curvature) ** LATE
        rows.append(
            {
                "curvature": curvature,
                "rest": rest,
                "predicted": "late" if rest > 0.5 else "dropped",
                **{name: value / found["waiting"] for name, value in found.items()},
            }
        )
    return rows


def spread(variant: Variant, curvature: float, copies: int = 4000, rounds: int = 80) -> float:
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)
    slow = torch.zeros(REPLICAS, copies)
    travelling, fast, correction = slow.clone(), slow.clone(), torch.zeros_like(slow)
    matrix, measured = torch.eye(REPLICAS), []
    for step in range(rounds * ROUND):
        noise = torch.randn(fast.shape, generator=generator)
        fast = fast - curvature * fast - noise
        in_round = step % ROUND + 1
        if in_round == variant.late:
            left = matrix @ fast - fast
            share = (left * correction).sum() / correction.square().sum().clamp_min(1e-30)
            added = {"correction": correction, "nothing": 0 * correction, "left": share * correction}[variant.adds]
            slow, fast = slow + added, fast + added
        if in_round == ROUND:
            matrix, gradient = pairs(rng, range(REPLICAS)), fast - slow
            counted = fast - travelling if variant.counts_from == "travelled" else gradient
            correction = matrix @ counted - counted
            mixed = slow if variant.mixes == "corrected" else travelling
            slow = slow + gradient + matrix @ mixed - mixed + (0 if variant.late else 1) * correction
            travelling, fast = slow - (variant.mixes == "stale") * correction, slow.clone()
        if step >= rounds * ROUND // 2:
            measured.append((fast - fast.mean(0)).square().mean().item())
    return fmean(measured)


def trained(variant: Variant, steps: int, seed: int) -> dict[str, Any]:
    return Toy(variant, steps=steps, seed=seed).run()


def curvature(variant: Variant, steps: int, seed: int) -> dict[str, Any]:
    """Measure the curvature during a run, always on the same batch, which is the first data that a replica saw."""
    toy, found, before = Toy(variant, steps=steps, seed=seed), {}, 0
    data = [toy.material.batches(peer_name(number), replica=number) for number in range(2)]
    batches = [torch.cat([next(each) for _ in range(4)]) for each in data]
    train = toy.inner[0].train
    for share in AT:
        step = round(share * steps)
        toy.train(before, step)
        values = [largest_eigenvalue(*pair) for pair in zip(toy.inner[:2], batches, strict=True)]
        scale = learning_rate(train, share) * (1 - train.adam_beta1) / (2 + 2 * train.adam_beta1)
        found[f"curvature_{share:g}"], before = scale * fmean(values), step
    return found


EXPERIMENTS = {
    "toy": (VARIANTS, trained),
    "curvature": ([one for one in VARIANTS if one.case in IN_CURVATURE], curvature),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["quadratic", *EXPERIMENTS])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": machine(), "steps": args.steps, "rows": []}
    if args.experiment == "quadratic":
        report = {"rows": quadratic()}
        for row in report["rows"]:
            print(described(row))
        save(report, args.json)
        return
    if args.json and args.json.exists():
        report = json.loads(args.json.read_text(encoding="utf-8"))
        assert report["steps"] == args.steps, "the file is of another length"
    done = {(row["case"], row["seed"]) for row in report["rows"]}
    variants, experiment = EXPERIMENTS[args.experiment]
    missing = [
        (variant, seed)
        for seed in map(int, args.seeds.split(","))
        for variant in variants
        if (variant.case, seed) not in done
    ]
    print(f"{len(missing)} runs, at most {len(missing) * args.steps * 0.08 / 60:.0f} minutes of a core", flush=True)
    for variant, seed in missing:
        began_s = time.process_time()
        found = experiment(variant, args.steps, seed)
        print(f"{variant.case}, seed {seed}: {described(found)}", flush=True)
        cpu_s = round(time.process_time() - began_s, 1)
        report["rows"].append({**asdict(variant), "seed": seed, **found, "cpu_s": cpu_s})
        save(report, args.json)


def described(row: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
    )


def save(report: Mapping[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
