"""The Prometheus metrics of one peer and of a whole swarm. There are few labels, and their values are bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noloco_p2p._version import __version__
from noloco_p2p.telemetry.metrics import METRICS, NUMBERS, Metrics
from noloco_p2p.telemetry.totals import TOTALS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

PREFIX = "noloco"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric at /metrics, where the names of counters end in `_total`. `labels` has the names of its labels."""

    name: str
    kind: str
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return self.name + ("_total" if self.kind == "counter" else "")


PEER = tuple(
    Family(f"{PREFIX}_{name}", METRICS[name].kind, METRICS[name].unit, METRICS[name].meaning) for name in NUMBERS
)
PEER_INFO = Family(
    f"{PREFIX}_peer_info", "gauge", "1", "always 1; its labels identify this peer", ("peer_id", "run", "software")
)
LIVE_PEERS = Family(
    f"{PREFIX}_live_peers", "gauge", "peers", "number of other live peers; an estimate if there are more than 48"
)
SWARM_PREFIX = f"{PREFIX}_swarm"
SWARM_PEERS = Family(
    f"{SWARM_PREFIX}_peers", "gauge", "peers", "number of peers by health, as judged by the monitor", ("health",)
)
SWARM = tuple(Family(f"{SWARM_PREFIX}_{total.name}", "gauge", total.unit, total.meaning) for total in TOTALS)
STAGES = tuple(
    Family(f"{SWARM_PREFIX}_stage_{name}", "gauge", unit, meaning, ("stage",))
    for name, unit, meaning in (
        ("peers", "peers", "number of live peers that hold the stage"),
        *(
            (name, METRICS[name].unit, f"sum over the live peers of a stage: {METRICS[name].meaning}")
            for name in ("capacity", "tokens_per_s", "queue", "microbatches", "late_microbatches", "lost_microbatches")
        ),
    )
)
DIRECTORY_AGE = Family(
    f"{SWARM_PREFIX}_directory_age_s", "gauge", "s", "time since the directory last answered the monitor"
)


def peer_page(metrics: Metrics, *, peer_id: str, run: str, live_peers: int) -> bytes:
    """Return the page that a peer serves at /metrics."""

    def collect() -> Iterator[Metric]:
        for family in PEER:
            value = getattr(metrics, family.name.removeprefix(f"{PREFIX}_"))
            if value is not None:
                yield _sample(family, [((), value)])
        yield _sample(PEER_INFO, [((peer_id, run, __version__), 1)])
        yield _sample(LIVE_PEERS, [((), live_peers)])

    return _page(collect)


def swarm_page(summary: dict[str, Any], *, healths: Iterable[str]) -> bytes:
    """Return the page that `noloco monitor --web` serves at /metrics, from `monitor.collect.Watcher.summary`."""
    totals, stages = summary["totals"], summary["stages"]

    def collect() -> Iterator[Metric]:
        yield _sample(SWARM_PEERS, [((str(health),), totals[health]) for health in healths])
        for family in SWARM:
            value = totals[family.name.removeprefix(f"{SWARM_PREFIX}_")]
            if value is not None:
                yield _sample(family, [((), value)])
        for family in STAGES if stages else ():
            name = family.name.removeprefix(f"{SWARM_PREFIX}_stage_")
            yield _sample(family, [((str(row["stage"]),), row[name]) for row in stages])
        yield _sample(DIRECTORY_AGE, [((), summary["directory_age_s"])])

    return _page(collect)


def _sample(family: Family, samples: list[tuple[tuple[str, ...], float]]) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = make(family.name, f"{family.meaning} [{family.unit}]", labels=family.labels)
    for labels, value in samples:
        metric.add_metric(labels, float(value))
    return metric


class _Collector:
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self.collect = collect


def _page(collect: Callable[[], Iterator[Metric]]) -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest

    registry: CollectorRegistry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(collect))  # pyright: ignore[reportArgumentType] - it only needs `collect`
    return generate_latest(registry)
