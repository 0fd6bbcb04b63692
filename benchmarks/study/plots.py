"""Pictures of docs/results.md, from the JSON files that study.py has written.

    python benchmarks/study/plots.py [--results benchmarks/results] [--out docs]

Each point is the mean of the seeds, each bar from the lowest to the highest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Rows = dict[str, list[dict[str, Any]]]


def rows_of(file: Path) -> Rows:
    """By case, in the order of the file."""
    found: Rows = {}
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        found.setdefault(row["case"], []).append(row)
    return found


def points(
    axes: Axes, places: list[float], cases: list[list[dict[str, Any]]], field: str = "loss", **style: Any
) -> None:
    means = [fmean(row[field] for row in rows) for rows in cases]
    down = [mean - min(row[field] for row in rows) for mean, rows in zip(means, cases, strict=True)]
    up = [max(row[field] for row in rows) - mean for mean, rows in zip(means, cases, strict=True)]
    axes.errorbar(places, means, yerr=[down, up], capsize=3, **style)


def draw_rules(results: Path, out: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    sizes = [4, 8, 16]
    files = {size: results / f"study_rules_{size}.json" for size in sizes}
    by_size = {size: rows_of(file) for size, file in files.items() if file.exists()}
    for case in by_size[8]:
        here = [size for size, cases in by_size.items() if case in cases]
        points(axes, [float(size) for size in here], [by_size[size][case] for size in here], marker="o", label=case)
    axes.set(xscale="log", xlabel="replicas", ylabel="validation loss, nats a token", xticks=sizes, xticklabels=sizes)
    axes.minorticks_off()
    save(figure, axes, out / "rules.png")


def draw_cost(results: Path, out: Path) -> None:
    """Loss against bytes, for every rule and optimizer that was tried."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, marker in (("rules_8", "o"), ("rounds", "^"), ("adamw", "s"), ("muon", "D")):
        file = results / f"study_{name}.json"
        if not file.exists():
            continue
        for number, (case, rows) in enumerate(rows_of(file).items()):
            sent = fmean(row["sent_per_parameter_step"] for row in rows)
            loss = fmean(row["loss"] for row in rows)
            axes.plot([max(sent, 1e-2)], [loss], marker, color=f"C{number % 10}", markersize=5)
            axes.annotate(
                f"{name}: {case}", (max(sent, 1e-2), loss), fontsize=5, xytext=(4, 2), textcoords="offset points"
            )
    axes.axvline(0.21, color="grey", linestyle=":", label="3 % of what synchronous training sends")
    axes.set(xscale="log", xlabel="bytes sent a parameter and inner step", ylabel="validation loss, nats a token")
    save(figure, axes, out / "loss_and_bytes.png")


def draw_ablations(results: Path, out: Path) -> None:
    figure, grid = plt.subplots(1, 3, figsize=(11, 3.5), sharey=True)
    for axes, study in zip(grid, ("gamma", "alpha", "learning_rate"), strict=True):
        cases = rows_of(results / f"study_{study}.json")
        places = [float(case.split()[-1]) for case in cases]
        points(axes, places, list(cases.values()), marker="o", label="loss of a replica")
        points(axes, places, list(cases.values()), "merged_loss", marker="x", label="loss of the mean")
        axes.set(xlabel=study.replace("_", " "))
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    grid[0].set(ylabel="validation loss, nats a token")
    figure.tight_layout()
    figure.savefig(out / "ablations.png", dpi=120)


def draw_spread(results: Path, out: Path) -> None:
    figure, axes = plt.subplots(figsize=(5, 3.5))
    cases = rows_of(results / "study_learning_rate.json")
    points(axes, [float(case) for case in cases], list(cases.values()), "spread", marker="o", label="at the end")
    axes.set(xscale="log", yscale="log", xlabel="inner learning rate", ylabel="spread of the weights over their norm")
    save(figure, axes, out / "spread.png")


def save(figure: plt.Figure, axes: Axes, file: Path) -> None:
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    args = parser.parse_args()
    for draw in (draw_rules, draw_cost, draw_ablations, draw_spread):
        draw(args.results, args.out)


if __name__ == "__main__":
    main()
