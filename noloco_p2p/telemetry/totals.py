"""Defines how a monitor aggregates a metric over all peers.

`About.total` names one of the WAYS below. The name, unit and meaning of each total are derived from the metric.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from noloco_p2p.telemetry.metrics import METRICS, Metrics

Values = Sequence[float]


@dataclass(frozen=True, slots=True)
class Peers:
    """The metrics of the peers over which totals are computed.

    `listed` has all known peers, `living` has the peers that are alive or silent, and `training` has the living peers
    that are training now. `heads` has those of them that hold the whole model or its first stage, because each token
    passes through all stages.
    """

    listed: Sequence[Metrics]
    living: Sequence[Metrics]
    training: Sequence[Metrics]
    heads: Sequence[Metrics]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to aggregate a metric. `ending` is the suffix of the total's name, and `of` is a field of `Peers`."""

    ending: str
    meaning: str
    of: str
    make: Callable[[Values], float]
    empty: float | None = None  # the total if no peer has a value


WAYS = {
    "sum": (Way("", "sum over all peers seen in the last hour", "listed", sum, 0),),
    "speed": (Way("", "sum over the live peers that are training (with stages: over the heads)", "heads", sum, 0),),
    "training": (Way("", "mean over the live peers that are training", "training", fmean),),
    "highest": (Way("", "highest value among live peers", "living", max),),
    "mean": (
        Way("", "mean over live peers", "living", fmean),
        Way("_lowest", "lowest value among live peers", "living", min),
        Way("_highest", "highest value among live peers", "living", max),
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

    def over(self, peers: Peers) -> float | None:
        values = [getattr(metrics, self.metric) for metrics in getattr(peers, self.way.of)]
        known = [value for value in values if value is not None]
        return self.way.make(known) if known else self.way.empty


TOTALS = tuple(Total(name, way) for name, about in METRICS.items() if about.total for way in WAYS[about.total])


def totals(peers: Peers) -> dict[str, Any]:
    """Return the value of every total by name. If no peer has a value, a sum is 0, and any other total is None."""
    return {total.name: total.over(peers) for total in TOTALS}
