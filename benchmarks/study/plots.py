"""The pictures of docs/results.md, from benchmarks/results/study_*.json.

    python benchmarks/study/plots.py [--results DIR] [--to docs]

A point is the mean over the seeds that a study has, a bar reaches from the lowest to the highest of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

RESULTS, DOCS = Path(__file__).parent.parent / "results", Path(__file__).parent.parent.parent / "docs"
PEERS = (4, 8, 16)
BEST = {
    "ddp": "synchronous, Muon",
    "ddp, adamw": "synchronous, AdamW",
    "diloco 20": "DiLoCo, 20 steps, Muon",
    "5: 0 1 1": "NoLoCo, 5 steps, Muon",
    "8: 0 1 1": "NoLoCo, 8 steps, Muon",
    "20: 0 1 1": "NoLoCo, 20 steps, Muon",
    "5: 0 1 1, modulo4": "NoLoCo, 5 steps, modulo4, Muon",
}


class Study:
    """Rows of one file by case; without the file there are none."""

    def __init__(self, path: Path) -> None:
        self.cases: dict[str, list[dict[str, Any]]] = {}
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []:
            self.cases.setdefault(row["case"], []).append(row)

    def losses(self, name: str) -> list[float]:
        """One a seed; of a case that was tried at several rates ("name, 0.016") those at the best. [] = not tried."""
        tried = [
            [row["loss"] for row in rows]
            for case, rows in self.cases.items()
            if case == name or case.startswith(f"{name}, 0.")
        ]
        return min(tried, key=fmean, default=[])

    def mean(self, name: str, field: str) -> float:
        return fmean(row[field] for row in self.cases[name])


def figure(columns: int, width: float = 5.0) -> tuple[Figure, list[Any]]:
    made = Figure(figsize=(width * columns, 4.0), layout="constrained")
    FigureCanvasAgg(made)
    return made, [made.add_subplot(1, columns, index + 1) for index in range(columns)]


def line(axes: Any, places: Sequence[float], samples: Sequence[Sequence[float]], label: str | None = None) -> None:
    means = [fmean(each) for each in samples]
    low = [mean - min(each) for mean, each in zip(means, samples, strict=True)]
    high = [max(each) - mean for mean, each in zip(means, samples, strict=True)]
    axes.errorbar(places, means, yerr=[low, high], marker="o", capsize=3, label=label)


def peers(results: Path, to: Path) -> None:
    """Loss at 4, 8 and 16 replicas of what `noloco init` writes, beside its peers."""
    made, (axes,) = figure(1, 6.5)
    found = {size: Study(results / f"study_best_{size}.json") for size in PEERS}
    for name, label in BEST.items():
        samples = {size: each.losses(name) for size, each in found.items() if each.losses(name)}
        if samples:
            line(axes, [*samples], [*samples.values()], label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(PEERS, [str(size) for size in PEERS])
    axes.set_xlabel("replicas, each with the same batch")
    axes.set_ylabel("validation loss, nats a token")
    axes.legend(fontsize=8)
    made.savefig(to / "peers.png", dpi=110)


def ablations(results: Path, to: Path) -> None:
    """gamma, alpha, size of the group, inner steps; each beside the published setting of the others."""
    made, (gamma, alpha, group, steps) = figure(4, 3.6)
    for axes, study, prefix in ((gamma, "gamma", "gamma "), (alpha, "alpha", "alpha ")):
        found = Study(results / f"study_{study}.json")
        places = [float(case.removeprefix(prefix)) for case in found.cases]
        line(axes, places, [found.losses(case) for case in found.cases])
        axes.set_xlabel(study)
    found = Study(results / "study_groups.json")
    line(group, range(len(found.cases)), [found.losses(case) for case in found.cases])
    group.set_xticks(range(len(found.cases)), ["1", "2", "4", "all"])
    group.set_xlabel("n, replicas that mix at once")
    found = Study(results / "study_rounds.json")
    for strengths in ("0.5 0.7 0.7", "0 1 1"):
        cases = [case for case in found.cases if case.endswith(f": {strengths}")]
        places = [int(case.partition(":")[0]) for case in cases]
        line(steps, places, [found.losses(case) for case in cases], strengths)
    steps.set_xlabel("inner steps a round")
    steps.legend(title="alpha beta gamma", fontsize=8)
    gamma.set_ylabel("validation loss, nats a token")
    made.savefig(to / "ablations.png", dpi=110)


def spread(results: Path, to: Path) -> None:
    """Distance of the replicas from their mean against the learning rate."""
    made, (axes,) = figure(1)
    found = Study(results / "study_learning_rate.json")
    places = [float(case) for case in found.cases]
    axes.plot(places, [100 * found.mean(case, "spread") for case in found.cases], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{rate:g}" for rate in places])
    axes.set_xlabel("inner learning rate (AdamW)")
    axes.set_ylabel("spread, % of the norm")
    made.savefig(to / "spread.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--to", type=Path, default=DOCS)
    args = parser.parse_args()
    for draw in (peers, ablations, spread):
        draw(args.results, args.to)


if __name__ == "__main__":
    main()
