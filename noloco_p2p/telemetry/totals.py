"""Defines how a monitor aggregates a metric over all peers.

`Shown.total` names one of the WAYS below. The name, unit and meaning of each total are derived from the metric. A row
is the JSON object of one peer, from `monitor.watcher.Member.row`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from noloco_p2p.telemetry.metrics import METRICS

Row = Mapping[str, Any]


def is_living(row: Row) -> bool:
    return row["health"] in ("alive", "silent")


def is_training(row: Row) -> bool:
    return is_living(row) and row["state"] == "training"


def _is_head(row: Row) -> bool:
    return is_training(row) and not row["stage"]  # it holds the whole model, or its first stage


@dataclass(frozen=True, slots=True)
class Total:
    """A metric of all peers for which `counts` is true, as one number, which is `empty` if no peer has a value."""

    name: str
    unit: str
    meaning: str
    metric: str
    counts: Callable[[Row], bool]
    make: Callable[[Sequence[float]], float]
    empty: float | None = None

    def over(self, rows: Iterable[Row]) -> float | None:
        values = [row[self.metric] for row in rows if self.counts(row)]
        known = [value for value in values if value is not None]
        return self.make(known) if known else self.empty


# For each way, the totals: the suffix of the name, the meaning, and the last fields of `Total`.
WAYS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "sum": (("", "sum over all peers seen in the last hour", lambda row: True, sum, 0),),
    # Each token passes through all stages, so only the heads count.
    "speed": (("", "sum over the live peers that are training (with stages: over the heads)", _is_head, sum, 0),),
    "training": (("", "mean over the live peers that are training", is_training, fmean),),
    "highest": (("", "highest value among live peers", is_living, max),),
    "mean": (
        ("", "mean over live peers", is_living, fmean),
        ("_lowest", "lowest value among live peers", is_living, min),
        ("_highest", "highest value among live peers", is_living, max),
    ),
}
TOTALS = tuple(
    Total(f"{name}{ending}", about.unit, f"{meaning}: {about.meaning}", name, *how)
    for name, about in METRICS.items()
    if about.shown.total
    for ending, meaning, *how in WAYS[about.shown.total]
)
