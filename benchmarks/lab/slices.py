"""Try slices of other lengths, and swaps at larger intervals, than the swaps of a peer have by default.

    python benchmarks/lab/slices.py run [--minutes 5]     adds cells to results/slices.jsonl
    python benchmarks/lab/slices.py table                 what is done, as in results/slices.txt

Each cell is the ladder's cell of swaps of slices at 0.1M and 100 Mbit/s with another value of `SLICE_STEPS`, the time
in which a slice should travel, or of `outer.min_inner_steps`. Shorter slices, which ended lowest with the first seed,
have as many seeds as the defaults.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import ladder
import swarm
import torch
from rows import cell_of, command

OUT = Path(__file__).resolve().parents[1] / "results" / "slices.jsonl"
BASE = ladder.Cell("0.1M", "muon", "ours", "100", seed=1, learning_rate=0.016)
SEEDS = (1, 2, 3)
SHORT = 0.2
SLICES = (SHORT, 3.2, 5.0)  # the last two carry half of the weights, which is the most that a peer offers
INTERVALS = (4, 16)


@dataclass(frozen=True, slots=True)
class Cell:
    slice_steps: float = swarm.SLICE_STEPS  # inner steps in which a slice travels
    min_inner_steps: int = 0  # from one swap to the next; 0: as soon as the link is free
    seed: int = 1


def cells() -> Iterator[Cell]:
    yield from (Cell(seed=seed) for seed in SEEDS)
    yield from (Cell(slice_steps=steps) for steps in SLICES)
    yield from (Cell(min_inner_steps=least) for least in INTERVALS)
    yield from (Cell(SHORT, seed=seed) for seed in SEEDS[1:])


def run(cell: Cell) -> dict[str, Any]:
    with patch.object(swarm, "SLICE_STEPS", cell.slice_steps):
        base = replace(BASE, seed=cell.seed)
        return asdict(cell) | ladder.run(base, torch.device("cpu"), min_inner_steps=cell.min_inner_steps)


def by_setting(found: list[dict[str, Any]]) -> dict[Cell, list[dict[str, Any]]]:
    """Return the rows of each setting, the lowest mean loss first."""
    groups: dict[Cell, list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        groups[replace(cell_of(Cell, row), seed=1)].append(row)
    return dict(sorted(groups.items(), key=lambda group: fmean(row["loss"] for row in group[1])))


def table(found: list[dict[str, Any]]) -> str:
    """Return a line for each setting, with means over the seeds."""
    lines = ["slice  interval    loss  swaps   age   use  seeds"]
    for cell, rows in by_setting(found).items():
        swaps, age, use = (fmean(row["swaps"][name] for row in rows) for name in ("committed", "age_steps", "link_use"))
        each = " ".join(f"{row['seed']}: {row['loss']:.4f}" for row in sorted(rows, key=lambda row: row["seed"]))
        loss = fmean(row["loss"] for row in rows)
        settings = f"{cell.slice_steps:5.1f}  {cell.min_inner_steps:8}"
        lines.append(f"{settings}  {loss:.4f}  {swaps:5.0f} {age:5.1f}  {use:4.2f}  {each}")
    return "\n".join(lines)


if __name__ == "__main__":
    command(__doc__, OUT, lambda found: cells(), run, table)
