"""Why late corrections cost loss although they leave the mean where it was: experiments that separate the causes.

    python benchmarks/study/lateness.py quadratic|toy [--steps 200] [--seeds 0] [--json FILE]

A round ends with a swap: a replica has moved by its own outer gradient g_i, and the correction c = (g_j - g_i) / 2
takes it to the mean of the pair. Eager training adds c some steps L later. c is opposite for the two partners, so it
never moves their mean. Hypotheses, stated before the runs:

H1 Undone. Until c comes, a replica stands -c from the middle of its pair, and its own steps pull it back where the loss
   is curved. With curvature l and rate e they leave a share r = (1 - e l)^L of the distance. Then c overshoots: the
   replica ends (1 - r) c beyond the middle. So a late correction is worse than none at all where r < 1/2.
   It predicts: (a) in flat directions lateness costs nothing and in curved ones nearly all of the cost (`curved late`
   against `flat late`); (b) where r < 1/2 a dropped correction costs less than a late one (`quadratic`); (c) to add
   what is left of the distance instead of c takes the cost away (`what is left`); (d) the cost falls with the rate.
H2 Stale mixing. Slow weights travel during a round, so those that meet in the next swap lack the corrections that came
   meanwhile. It predicts that `mixes corrected weights` takes the cost away.
H3 Lonely rounds. On a link that carries late parts into the next round, offers queue, and 14 % of the rounds found no
   partner in the study that showed 9.5 %. It predicts that the same share of lonely rounds, all else waiting, costs
   as much (`lonely`).
H4 Noise of one partner. It predicts that a late mean of all replicas costs less than the late half of a pair (`late
   mean of all` against `mean of all`).

`quadratic`: independent directions with known curvature, noisy gradients, plain steps. What is left in each direction
follows from H1 without a fit. `toy`: the toy of the studies with AdamW at 4e-3, rounds of 5 steps, 0 1 1, all in one
loop. `undone` is what H1 is about, measured: of the distance between partners along c, the share that is gone when c
comes, over all elements, and over the tenth with the largest second moments of Adam (`curved`).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from study import TOY, averaging, machine
from torch import Tensor

from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.result import judge
from noloco_p2p.simulate.run import seeded
from noloco_p2p.simulate.swarm import peer_name
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.inner_step import InnerStep

REPLICAS, ROUND = 8, 5
CURVED = 0.1  # share of the elements, those with the largest second moments
RATE = 4e-3


@dataclass(frozen=True, slots=True)
class Variant:
    """late: steps between a boundary and its correction, at most a round; 0 = waiting.

    part: of the correction that is late; the rest comes at the boundary. adds: c itself, nothing, or what is left of
    the distance of the two along c. group: what is mixed, a pair or all replicas. mixes_corrected: a swap mixes slow
    weights with all corrections. lonely: share of the rounds of a replica without a partner.
    """

    name: str
    late: int = 0
    part: str = "all"  # all, curved, flat
    adds: str = "correction"  # correction, nothing, left
    group: str = "pair"  # pair, everybody
    mixes_corrected: bool = False
    lonely: float = 0.0
    rate: float = RATE


LATE = 2
VARIANTS = [
    Variant("waiting"),
    *(Variant(f"late by {late}", late) for late in (1, LATE, 4)),
    Variant("dropped", LATE, adds="nothing"),
    Variant("what is left", LATE, adds="left"),
    Variant("curved late", LATE, part="curved"),
    Variant("flat late", LATE, part="flat"),
    Variant("mixes corrected weights", LATE, mixes_corrected=True),
    Variant("mean of all", group="everybody"),
    Variant("late mean of all", LATE, group="everybody"),
    Variant("lonely", lonely=0.14),
    *(
        Variant(f"{name}, rate {rate:g}", late, rate=rate)
        for rate in (1e-3, 8e-3)
        for name, late in (("waiting", 0), ("late", LATE))
    ),
]


def pairs(rng: random.Random, present: Sequence[int]) -> Tensor:
    """Row i of the matrix is what the mean of i's pair is made of; a replica without a partner has its own."""
    order, matrix = rng.sample(present, len(present)), torch.eye(REPLICAS)
    for one, other in zip(order[::2], order[1::2], strict=False):
        matrix[[one, one, other, other], [one, other, one, other]] = 0.5
    return matrix


class Toy:
    """All replicas in one loop. Rows of the vectors are replicas."""

    def __init__(self, variant: Variant, *, steps: int, seed: int) -> None:
        changes = {"train.total_steps": steps, "train.learning_rate": variant.rate, **averaging(ROUND)}
        spec = seeded(TrainerSpec.load(TOY).with_changes(changes, origin=variant.name), seed)
        self.variant = variant
        self.steps = steps
        self.material = Material.of(spec, {})
        self.inner = [InnerStep(self.material.model(), spec.train) for _ in range(REPLICAS)]
        self.flat = [FlatParameters(inner.model) for inner in self.inner]
        self.batches = [self.material.batches(peer_name(number), replica=number) for number in range(REPLICAS)]
        self.rng = random.Random(f"lateness/{seed}")
        self.slow = self.fast()  # where the round began, with all corrections since
        self.travelling = self.slow.clone()  # what partners get: as it was when the round began
        self.correction = torch.zeros_like(self.slow)
        self.matrix = torch.eye(REPLICAS)  # as of `pairs`, in this round
        self.undone: dict[str, list[float]] = {"all": [], "curved": []}

    def run(self) -> dict[str, Any]:
        for step in range(self.steps):
            for inner, batches in zip(self.inner, self.batches, strict=True):
                inner(next(batches), progress=step / self.steps)
            in_round = step % ROUND + 1
            if in_round == self.variant.late:
                self.correct()
            if in_round == ROUND:
                self.swap()
        self.correct()
        judged = judge(self.material, list(self.slow))
        undone = {f"undone_{name}": fmean(each) if each else None for name, each in self.undone.items()}
        return {name: judged[name] for name in ("loss", "merged_loss", "spread")} | undone

    def swap(self) -> None:
        gradient = self.fast() - self.slow
        self.matrix = self.groups()
        mixed = self.slow if self.variant.mixes_corrected else self.travelling
        offset = self.matrix @ mixed - mixed
        correction = self.matrix @ gradient - gradient
        late = self.mask() if self.variant.late else torch.zeros_like(correction, dtype=torch.bool)
        self.correction = correction * late
        self.slow += gradient + offset + correction * ~late
        self.travelling = self.slow.clone()
        self.write(self.slow)

    def correct(self) -> None:
        if not self.correction.any():
            return
        fast = self.fast()
        left = self.matrix @ fast - fast  # to the mean of the group, now
        added = self.correction if self.variant.adds == "correction" else torch.zeros_like(left)
        curved = self.curved()
        for name, chosen in (("all", torch.ones_like(curved)), ("curved", curved)):
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
        """The component of `left` along the correction; both (replicas, elements of one parameter).

        All replicas use the same share, so that the mean stays where it is.
        """
        return correction * ((left * correction).sum() / correction.square().sum().clamp_min(1e-30))

    def split(self, rows: Tensor) -> list[Tensor]:
        return list(rows.split([parameter.numel() for _, parameter in self.flat[0].named], 1))

    def groups(self) -> Tensor:
        if self.variant.group == "everybody":
            return torch.full((REPLICAS, REPLICAS), 1 / REPLICAS)
        return pairs(self.rng, [number for number in range(REPLICAS) if self.rng.random() >= self.variant.lonely])

    def mask(self) -> Tensor:
        if self.variant.part == "all":
            return torch.ones_like(self.slow, dtype=torch.bool)
        return self.curved() if self.variant.part == "curved" else ~self.curved()

    def curved(self) -> Tensor:
        """The same elements for all replicas: those with the largest mean second moment."""
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


IN_QUADRATIC = ("waiting", f"late by {LATE}", "dropped", "what is left", "mixes corrected weights")
CURVATURES = (0.02, 0.1, 0.3, 0.6, 1.0)  # times the rate: the share that one step takes away


def quadratic() -> list[dict[str, Any]]:
    """For each curvature the mean square distance of replicas from their mean, over that of waiting.

    8 replicas, 4,000 copies of each direction, rate 1, gradients with unit noise, 40 rounds to forget the start and 40
    to measure, after each step. Beside it r = (1 - e l)^L, and which of the two H1 says is nearer to waiting.
    """
    rows = []
    for curvature in CURVATURES:
        found = {variant.name: spread(variant, curvature) for variant in VARIANTS if variant.name in IN_QUADRATIC}
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
            correction = matrix @ gradient - gradient
            mixed = slow if variant.mixes_corrected else travelling
            slow = slow + gradient + matrix @ mixed - mixed + (0 if variant.late else 1) * correction
            travelling, fast = slow.clone(), slow.clone()
        if step >= rounds * ROUND // 2:
            measured.append((fast - fast.mean(0)).square().mean().item())
    return fmean(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["quadratic", "toy"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.experiment == "quadratic":
        for row in quadratic():
            print(
                "  ".join(
                    f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in row.items()
                )
            )
        return
    report: dict[str, Any] = {"machine": machine(), "steps": args.steps, "rows": []}
    if args.json and args.json.exists():
        report = json.loads(args.json.read_text(encoding="utf-8"))
        assert report["steps"] == args.steps, "the file is of another length"
    done = {(row["name"], row["seed"]) for row in report["rows"]}
    missing = [
        (variant, seed)
        for seed in map(int, args.seeds.split(","))
        for variant in VARIANTS
        if (variant.name, seed) not in done
    ]
    print(f"{len(missing)} runs, about {len(missing) * args.steps * 0.08 / 60:.0f} minutes of a core", flush=True)
    for variant, seed in missing:
        began_s = time.process_time()
        result = Toy(variant, steps=args.steps, seed=seed).run()
        report["rows"].append({**asdict(variant), "seed": seed, **result, "cpu_s": time.process_time() - began_s})
        undone = " ".join(
            f"{name} {100 * result[f'undone_{name}']:.0f} %"
            for name in ("all", "curved")
            if result[f"undone_{name}"] is not None
        )
        print(
            f"{variant.name:<26} seed {seed}  loss {result['loss']:.4f}  merged {result['merged_loss']:.4f}  "
            f"spread {100 * result['spread']:.2f} %  undone {undone or '-'}",
            flush=True,
        )
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
