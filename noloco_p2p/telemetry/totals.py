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
class Way:
    """A way to aggregate a metric over the peers for which `counts` is true.

    `ending` is the suffix of the total's name, and `empty` is the total if no peer has a value.
    """

    ending: str
    meaning: str
    counts: Callable[[Row], bool]
    make: Callable[[Sequence[float]], float]
    empty: float | None = None


WAYS = {
    "sum": (Way("", "sum over all peers seen in the last hour", lambda row: True, sum, 0),),
    # Each token passes through all stages, so only the heads count.
    "speed": (Way("", "sum over the live peers that are training (with stages: over the heads)", _is_head, sum, 0),),
    "training": (Way("", "mean over the live peers that are training", is_training, fmean),),
    "highest": (Way("", "highest value among live peers", is_living, max),),
    "mean": (
        Way("", "mean over live peers", is_living, fmean),
        Way("_lowest", "lowest value among live peers", is_living, min),
        Way("_highest", "highest value among live peers", is_living, max),
    ),
}


@dataclass(frozen=True, slots=True)
class Total:
    metric: str
    way: Way

    @property
    def name(self) -> str:
        return self.metric + self.way.ending

    @property
    def unit(self) -> str:
        return METRICS[self.metric].unit

    @property
    def meaning(self) -> str:
        return f"{self.way.meaning}: {METRICS[self.metric].meaning}"

    def over(self, rows: Iterable[Row]) -> float | None:
        values = [row[self.metric] for row in rows if self.way.counts(row)]
        known = [value for value in values if value is not None]
        return self.way.make(known) if known else self.way.empty


TOTALS = tuple(
    Total(name, way) for name, about in METRICS.items() if about.shown.total for way in WAYS[about.shown.total]
)
