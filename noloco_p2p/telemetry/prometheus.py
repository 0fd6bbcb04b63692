"""The Prometheus metrics of one peer and of a whole swarm. There are few labels, and their values are bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from noloco_p2p._version import __version__
from noloco_p2p.telemetry.metrics import METRICS, NUMBERS, Metrics
from noloco_p2p.telemetry.totals import TOTALS

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# By the ending of a metric's name: the ending at /metrics, the unit there, and what values are multiplied by.
BASE: dict[str, tuple[str, Callable[[str], str], float]] = {
    "_per_min": ("_per_second", lambda unit: unit.replace("/min", "/s"), 1 / 60),
    "_per_s": ("_per_second", str, 1.0),
    "_s": ("_seconds", str, 1.0),
}
OF_STAGE = ("capacity", "tokens_per_s", "queue", "microbatches", "late_microbatches", "lost_microbatches")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric at /metrics, where the names of counters end in `_total`.

    `key` is the name of its value in the metrics, the totals or the stages. `labels` has the names of its labels.
    Prometheus wants whole words and base units, so `scale` converts the value.
    """

    name: str
    kind: str
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    key: str = ""
    scale: float = 1.0

    @classmethod
    def named(cls, prefix: str, key: str, kind: str, unit: str, meaning: str, labels: tuple[str, ...] = ()) -> Family:
        """Return the family of a metric that is called `key` in the rest of the program."""
        name, scale = key, 1.0
        for ending, (word, own_unit, factor) in BASE.items():
            if key.endswith(ending):
                name, unit, scale = key.removesuffix(ending) + word, own_unit(unit), factor
                break
        return cls(prefix + name, kind, unit, meaning, labels, key, scale)

    @property
    def full_name(self) -> str:
        return self.name + ("_total" if self.kind == "counter" else "")

    def of(self, *samples: tuple[Any, ...]) -> Metric:
        """Return the samples of this family. Each has the values of the labels, and then its own value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        metric = make(self.name, f"{self.meaning} [{self.unit}]", labels=self.labels)
        for *labels, value in samples:
            metric.add_metric([str(label) for label in labels], self.scale * float(value))
        return metric


PEER = tuple(
    Family.named("noloco_", name, METRICS[name].kind, METRICS[name].unit, METRICS[name].meaning) for name in NUMBERS
)
PEER_INFO = Family(
    "noloco_peer_info", "gauge", "1", "always 1; its labels identify this peer", ("peer_id", "run", "software")
)
LIVE_PEERS = Family(
    "noloco_live_peers", "gauge", "peers", "number of other live peers; an estimate if there are more than 48"
)
SWARM_PEERS = Family(
    "noloco_swarm_peers", "gauge", "peers", "number of peers by health, as judged by the monitor", ("health",)
)
SWARM = tuple(Family.named("noloco_swarm_", total.name, "gauge", total.unit, total.meaning) for total in TOTALS)
STAGES = tuple(
    Family.named("noloco_swarm_stage_", name, "gauge", unit, meaning, ("stage",))
    for name, unit, meaning in (
        ("peers", "peers", "number of live peers that hold the stage"),
        *(
            (name, METRICS[name].unit, f"sum over the live peers of a stage: {METRICS[name].meaning}")
            for name in OF_STAGE
        ),
    )
)
DIRECTORY_AGE = Family(
    "noloco_swarm_directory_age_seconds", "gauge", "s", "time since the directory last answered the monitor"
)

OF_A_PEER = (*PEER, LIVE_PEERS, PEER_INFO)
OF_A_SWARM = (SWARM_PEERS, *SWARM, *STAGES, DIRECTORY_AGE)
ALL = (*OF_A_PEER, *OF_A_SWARM)


def peer_page(metrics: Metrics, *, peer_id: str, run: str, live_peers: int) -> bytes:
    """Return the page that a peer serves at /metrics."""
    told = [family.of((value,)) for family in PEER if (value := getattr(metrics, family.key)) is not None]
    return _page([*told, PEER_INFO.of((peer_id, run, __version__, 1)), LIVE_PEERS.of((live_peers,))])


def swarm_page(summary: dict[str, Any], *, healths: Iterable[str]) -> bytes:
    """Return the page that `noloco monitor --web` serves at /metrics, from a summary of `monitor.watcher.Watcher`."""
    totals, stages = summary["totals"], summary["stages"]
    return _page(
        [
            SWARM_PEERS.of(*((health, totals[health]) for health in healths)),
            *(family.of((value,)) for family in SWARM if (value := totals[family.key]) is not None),
            *(family.of(*((row["stage"], row[family.key]) for row in stages)) for family in STAGES if stages),
            DIRECTORY_AGE.of((summary["directory_age_s"],)),
        ]
    )


def _page(metrics: list[Metric]) -> bytes:
    from prometheus_client import generate_latest

    return generate_latest(SimpleNamespace(collect=lambda: metrics))  # pyright: ignore[reportArgumentType]
