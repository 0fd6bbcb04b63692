"""Draw the plots of docs/results.md, from benchmarks/results/study_*.json.

    python benchmarks/study/plots.py

A point is the mean over the seeds of a study, and a bar spans their range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from runs import DOCS, Runs, study

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


def losses(cases: Mapping[str, Runs], name: str) -> list[float]:
    """Return the losses of a case by seed, or [] if it was not run. Of rates ("name, 0.016"), the best counts."""
    tried = [runs.losses for case, runs in cases.items() if case == name or case.startswith(f"{name}, 0.")]
    return min(tried, key=fmean, default=[])


def figure(columns: int, width: float = 5.0) -> tuple[Figure, list[Any]]:
    made = Figure(figsize=(width * columns, 4.0), layout="constrained")
    FigureCanvasAgg(made)
    return made, [made.add_subplot(1, columns, index + 1) for index in range(columns)]


def line(axes: Any, places: Sequence[float], samples: Sequence[Sequence[float]], label: str | None = None) -> None:
    means = [fmean(each) for each in samples]
    low = [mean - min(each) for mean, each in zip(means, samples, strict=True)]
    high = [max(each) - mean for mean, each in zip(means, samples, strict=True)]
    axes.errorbar(places, means, yerr=[low, high], marker="o", capsize=3, label=label)


def peers() -> None:
    """Plot the losses of NoLoCo and of other rules with 4, 8 and 16 replicas."""
    made, (axes,) = figure(1, 6.5)
    found = {size: study(f"best_{size}") for size in PEERS}
    for name, label in BEST.items():
        samples = {size: losses(cases, name) for size, cases in found.items() if losses(cases, name)}
        if samples:
            line(axes, [*samples], [*samples.values()], label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(PEERS, [str(size) for size in PEERS])
    axes.set_xlabel("replicas, each with the same batch")
    axes.set_ylabel("validation loss, nats a token")
    axes.legend(fontsize=8)
    made.savefig(DOCS / "peers.png", dpi=110)


def ablations() -> None:
    """Plot the loss against gamma, alpha, group size and inner steps, each with the published values of the others."""
    made, (gamma, alpha, group, steps) = figure(4, 3.6)
    for axes, name in ((gamma, "gamma"), (alpha, "alpha")):
        cases = study(name)
        line(axes, [float(case.removeprefix(f"{name} ")) for case in cases], [runs.losses for runs in cases.values()])
        axes.set_xlabel(name)
    cases = study("groups")
    line(group, range(len(cases)), [runs.losses for runs in cases.values()])
    group.set_xticks(range(len(cases)), ["1", "2", "4", "all"])
    group.set_xlabel("n, replicas that mix at once")
    cases = study("rounds")
    for strengths in ("0.5 0.7 0.7", "0 1 1"):
        found = {case: runs for case, runs in cases.items() if case.endswith(f": {strengths}")}
        places = [int(case.partition(":")[0]) for case in found]
        line(steps, places, [runs.losses for runs in found.values()], strengths)
    steps.set_xlabel("inner steps a round")
    steps.legend(title="alpha beta gamma", fontsize=8)
    gamma.set_ylabel("validation loss, nats a token")
    made.savefig(DOCS / "ablations.png", dpi=110)


def spread() -> None:
    """Plot the distance of the replicas from their mean against the learning rate."""
    made, (axes,) = figure(1)
    cases = study("learning_rate")
    places = [float(case) for case in cases]
    axes.plot(places, [100 * runs.spread for runs in cases.values()], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{rate:g}" for rate in places])
    axes.set_xlabel("inner learning rate (AdamW)")
    axes.set_ylabel("spread, % of the norm")
    made.savefig(DOCS / "spread.png", dpi=110)


if __name__ == "__main__":
    for draw in (peers, ablations, spread):
        draw()
