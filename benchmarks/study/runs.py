"""Read the results of the studies by case, from benchmarks/results/study_*.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from noloco_p2p.codec.blocks import INT8
from noloco_p2p.codec.modulo import MODULO_CODECS, SIX_BITS

RESULTS = Path(__file__).parent.parent / "results"
DOCS = Path(__file__).parent.parent.parent / "docs"


@dataclass(frozen=True, slots=True)
class Runs:
    """All runs of one case of one study."""

    by_seed: Mapping[int, float]  # loss
    spread: float
    num_bytes: float  # per parameter and step
    num_replicas: int

    @property
    def losses(self) -> list[float]:
        return [*self.by_seed.values()]

    @property
    def loss(self) -> float:
        return fmean(self.losses)

    @property
    def range(self) -> str:
        return f"{min(self.losses):.4f}-{max(self.losses):.4f}" if len(self.losses) > 1 else "one seed"


def early_bytes(row: Mapping[str, Any]) -> float:
    """Return the bytes of the early part per parameter and swap, from the counts of received chunks.

    The early part has one section with one chunk, which a modulo codec encodes. The name of the case begins with the
    codec.
    """
    codec, num_elements = MODULO_CODECS[row["case"].split(",")[0]][0], row["num_parameters"]
    num_bytes = (
        row["modulo_chunks"] * codec.num_bytes(num_elements)
        + row["extended_chunks"] * SIX_BITS.num_bytes(num_elements)
        + (row["plain_chunks"] + row["broken_chunks"]) * INT8.num_bytes(num_elements)
    )
    return num_bytes / (row["modulo_chunks"] + row["plain_chunks"]) / num_elements


def rows_of(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"study_{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def study(name: str) -> dict[str, Runs]:
    """Return the cases of one study in the order of their first runs. The result is empty if the study was not run."""
    rows = rows_of(name)
    cases = {row["case"]: [each for each in rows if each["case"] == row["case"]] for row in rows}
    return {
        case: Runs(
            {row["seed"]: row["loss"] for row in runs},
            fmean(row["spread"] for row in runs),
            fmean(row["sent_per_parameter_step"] for row in runs),
            runs[0]["num_replicas"],
        )
        for case, runs in cases.items()
    }


def late_costs(case: str) -> dict[int, float]:
    """Return by how many per cent a case of lateness.py exceeds waiting with the same optimizer and rate, by seed."""
    waiting = {row["seed"]: row["loss"] for row in rows_of("lateness") if row["case"] == waits_like(case)}
    return {
        row["seed"]: 100 * (row["loss"] / waiting[row["seed"]] - 1)
        for row in rows_of("lateness")
        if row["case"] == case
    }


def waits_like(case: str) -> str:
    if case.startswith("Muon"):
        return "Muon, waiting"
    return f"waiting, rate {case.rsplit(' ', 1)[1]}" if ", rate " in case else "waiting"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
