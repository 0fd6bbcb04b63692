"""Try slices of other lengths, and swaps at larger intervals, than the swaps of a peer have by default.

    python benchmarks/lab/slices.py run [--minutes 5]     adds cells to results/slices.jsonl
    python benchmarks/lab/slices.py table                 what is done, as in results/slices.txt

Each cell is the ladder's cell of swaps of slices at 0.1M and 100 Mbit/s with another value of `SLICE_STEPS`, the time
in which a slice should travel, or of `outer.min_inner_steps`. The row of the defaults is that of the ladder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ladder
import swarm
import torch
from rows import cell_of, command, read

OUT = Path(__file__).resolve().parents[1] / "results" / "slices.jsonl"
BASE = ladder.Cell("0.1M", "muon", "ours", "100", seed=1, learning_rate=0.016)
WHOLE = 1e9  # inner steps: one swap carries all weights
SLICES = (0.2, 3.2, WHOLE)
INTERVALS = (4, 16)


@dataclass(frozen=True, slots=True)
class Cell:
    slice_steps: float = swarm.SLICE_STEPS  # inner steps in which a slice travels
    min_inner_steps: int = 0  # from one swap to the next; 0: as soon as the link is free


def cells() -> Iterator[Cell]:
    yield from (Cell(slice_steps=steps) for steps in SLICES)
    yield from (Cell(min_inner_steps=least) for least in INTERVALS)


def run(cell: Cell) -> dict[str, Any]:
    with patch.object(swarm, "SLICE_STEPS", cell.slice_steps):
        return asdict(cell) | ladder.run(BASE, torch.device("cpu"), min_inner_steps=cell.min_inner_steps)


def table(found: list[dict[str, Any]]) -> str:
    """Return a line for each cell and for that of the defaults, which is the ladder's, the lowest loss first."""
    default = [asdict(Cell()) | row for row in read(ladder.OUT) if cell_of(ladder.Cell, row) == BASE]
    lines = ["slice         interval    loss  swaps   age   use"]
    for row in sorted([*found, *default], key=ladder.score):
        steps, least = row["slice_steps"], row["min_inner_steps"]
        length = "all weights" if steps == WHOLE else f"{steps:g} steps"
        interval = f"{least} steps" if least else "none"
        swaps, age, use = (row["swaps"][name] for name in ("committed", "age_steps", "link_use"))
        lines.append(f"{length:12}  {interval:8}  {row['loss']:.4f}  {swaps:5.0f} {age:5.1f}  {use:4.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    command(__doc__, OUT, lambda found: cells(), run, table)
