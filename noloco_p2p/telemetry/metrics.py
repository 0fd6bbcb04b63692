"""The table of all metrics of a peer, with the kind, unit and meaning of each metric, and where it is shown.

Everything that shows a metric is generated from this table. This includes a peer's status, events, /metrics and
directory record; the monitor's JSON, tables, totals, curves and /metrics; and docs/reference.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class About:
    """Describes a metric.

    `kind` is "counter" (it only increases, even across restarts), "gauge" (a current value) or "text" (not for
    Prometheus). `key` is the name of the metric in the record that the peer signs, and should be short; "" means that
    it is not in the record, and "why:2" is the third number of the list "why". `digits` is the number of significant
    digits in the record. `column` is the heading of the metric's column in the monitor's table of peers; "" means that
    there is no column. `rank` is the order of the columns; on a narrow screen, the last ones are left out first.
    `total` says how the monitor aggregates the values of all peers: it is a key of `telemetry.totals.WAYS`, or "" if
    the monitor does not aggregate them.
    """

    kind: str
    unit: str
    meaning: str
    key: str = ""
    digits: int = 6
    column: str = ""
    rank: int = 0
    total: str = ""


def _metric(kind: str, unit: str, meaning: str, default: Any, **shown: Any) -> Any:
    """Return a field of `Metrics`. `shown` has the other fields of `About`."""
    return field(default=default, metadata={"about": About(kind, unit, meaning, **shown)})


@dataclass(slots=True)
class Metrics:
    """The current metrics of one peer. The training thread writes them, and the network thread reads them."""

    step: int = _metric("counter", "steps", "inner steps taken in this run, including those before a restart", 0)
    trained_s: float | None = _metric(
        "counter",
        "s",
        "time in the state `training`, including time spent waiting and time before a restart",
        None,
        key="tr",
        column="trained",
        rank=8,
    )
    tokens: int | None = _metric(
        "counter",
        "tokens",
        "tokens that this peer trained on, including those before a restart; with stages, tokens that it processed",
        None,
        key="tk",
        column="tokens",
        rank=8,
    )
    progress: float = _metric(
        "gauge",
        "fraction",
        "position in the schedule of the run, from 0 to 1",
        0.0,
        key="prog",
        digits=9,
        column="done",
        rank=1,
        total="highest",
    )
    swaps: int = _metric("counter", "swaps", "committed swaps", 0, key="swaps", column="swaps", rank=5, total="sum")
    failed_unreachable: int = _metric(
        "counter", "swaps", "swaps that failed because the partner could not be reached", 0, key="why:0", total="sum"
    )
    failed_slow: int = _metric(
        "counter", "swaps", "swaps that failed because the partner did not answer in time", 0, key="why:1", total="sum"
    )
    failed_corrupt: int = _metric(
        "counter", "swaps", "swaps that failed because the partner sent invalid data", 0, key="why:2", total="sum"
    )
    failed_abandoned: int = _metric(
        "counter", "swaps", "swaps that failed because the partner ended them", 0, key="why:3", total="sum"
    )
    swaps_per_min: float = _metric(
        "gauge",
        "swaps/min",
        "committed swaps per minute, over the last minute",
        0.0,
        key="rate",
        digits=4,
        column="swaps/min",
        rank=3,
        total="training",
    )
    link_use: float = _metric(
        "gauge",
        "fraction",
        "share of the last minute in which a swap was sending or receiving",
        0.0,
        key="link",
        digits=3,
        column="link",
        rank=4,
        total="training",
    )
    age_steps: float = _metric(
        "gauge",
        "steps",
        "age of half-differences when they are applied, in inner steps since the snapshot: a running mean",
        0.0,
        key="age",
        digits=3,
        column="age",
        rank=7,
        total="training",
    )
    apart: float | None = _metric(
        "gauge",
        "fraction",
        "distance of a replica from the mean, relative to the norm of the weights: a running mean of the distances to "
        "the last partners, divided by 2^0.5",
        None,
        key="apart",
        digits=3,
        column="apart",
        rank=3,
        total="mean",
    )
    blocked_s: float = _metric(
        "counter", "s", "time that training waited for swaps or was busy with them", 0.0, key="wait"
    )
    refused_over_share: int = _metric(
        "counter",
        "offers",
        "offers refused because the offering peer had used up its share of swaps while other peers were live",
        0,
    )
    refused_unlisted: int = _metric(
        "counter", "offers", "offers refused because no live record of the offering peer was known", 0
    )
    clipped_pieces: int = _metric("counter", "pieces", "pieces of half-differences that the update filter clipped", 0)
    judged_pieces: int = _metric("counter", "pieces", "pieces of half-differences that the update filter checked", 0)
    diverged: int = _metric("counter", "times", "number of times that this peer's weights were non-finite", 0)
    catch_ups: int = _metric(
        "counter", "times", "number of times that this peer fell far behind and fetched the state of a live peer", 0
    )
    loss: float | None = _metric(
        "gauge",
        "nats/token",
        "mean training loss of the last steps",
        None,
        key="loss",
        column="loss",
        rank=1,
        total="mean",
    )
    validation_loss: float | None = _metric(
        "gauge",
        "nats/token",
        "loss on the held-out sequences at the last evaluation",
        None,
        key="val",
        column="val",
        rank=9,
    )
    tokens_per_s: float = _metric(
        "gauge",
        "tokens/s",
        "training throughput in tokens per second over the steps that the loss covers (with stages: over the last "
        "30 s); the time includes waiting and evaluation",
        0.0,
        key="tok/s",
        column="tokens/s",
        rank=2,
        total="speed",
    )
    inner_steps_per_s: float = _metric(
        "gauge",
        "steps/s",
        "inner steps per second over the steps that the loss covers; the time includes waiting and evaluation",
        0.0,
        key="steps/s",
    )
    gradient_norm: float | None = _metric(
        "gauge", "1", "norm of the gradient in the last inner step, before clipping", None
    )
    mfu: float | None = _metric(
        "gauge",
        "fraction",
        "model FLOP/s (the time includes waiting and evaluation) divided by the dense bf16 peak of the accelerator; "
        "missing if the peak is unknown",
        None,
    )
    memory_bytes: int = _metric(
        "gauge",
        "bytes",
        "peak memory of the tensors on the accelerator since the start (on MPS, torch's current allocation; on a CPU, "
        "the peak of the process)",
        0,
    )
    data_wait_s: float = _metric(
        "gauge", "s", "time that training waited for data during the steps that the loss covers", 0.0
    )
    data_faults: int = _metric(
        "counter", "faults", "unusable lines, rows and files that were skipped while reading the data", 0
    )
    bytes_sent: int = _metric(
        "counter",
        "bytes",
        "payload sent in swaps, including failed ones; excludes headers, DHT traffic and the first fetch",
        0,
        key="out",
        column="out",
        rank=6,
        total="sum",
    )
    bytes_received: int = _metric(
        "counter",
        "bytes",
        "payload received in swaps, including failed ones; excludes headers, DHT traffic and the first fetch",
        0,
        key="in",
        column="in",
        rank=6,
        total="sum",
    )
    relayed_bytes: int = _metric(
        "counter", "bytes", "bytes that this peer relayed between peers that cannot be dialled", 0
    )
    chunks: int = _metric("counter", "chunks", "chunks that were sent in swaps", 0)
    repeated_chunks: int = _metric(
        "counter", "chunks", "chunks that needed more than their first bits (only with the codec `modulo`)", 0
    )
    microbatches: int = _metric(
        "counter", "microbatches", "microbatches whose gradients the peer has counted (only with stages)", 0, key="mb"
    )
    lost_microbatches: int = _metric(
        "counter",
        "microbatches",
        "microbatches that the peer started but that were lost before it counted their gradients (only with stages)",
        0,
        key="mbx",
    )
    late_microbatches: int = _metric(
        "counter",
        "microbatches",
        "microbatches counted in a later inner step than the one in which their forward pass began (only with stages)",
        0,
        key="mbl",
    )
    queue: int = _metric("gauge", "microbatches", "microbatches that the peer holds now (only with stages)", 0, key="q")
    capacity: float = _metric(
        "gauge",
        "tokens/s",
        "tokens per second that the peer could process if it never had to wait (only with stages)",
        0.0,
        key="cap",
    )
    last_partner: str = _metric(
        "text", "peer id", "partner of the last swap that was applied", "", key="with", column="last with", rank=5
    )

    @property
    def failed(self) -> dict[str, int]:
        """The number of failed swaps by kind."""
        return {name.removeprefix("failed_"): getattr(self, name) for name in FAILED}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def recorded(self, *, hides_contribution: bool = False) -> Metrics:
        """Return the metrics that the peer publishes in its record, rounded and without non-finite values."""
        hidden = CONTRIBUTION if hides_contribution else ()
        return Metrics(**{name: self._short(name) for name in RECORDED if name not in hidden})

    def _short(self, name: str) -> Any:
        value = getattr(self, name)
        if not isinstance(value, float):
            return value
        return float(f"{value:.{METRICS[name].digits}g}") if abs(value) <= LARGEST else DEFAULTS[name]


METRICS: dict[str, About] = {item.name: item.metadata["about"] for item in fields(Metrics)}
DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(Metrics)}
FAILED = tuple(name for name in METRICS if name.startswith("failed_"))
NUMBERS = tuple(name for name, about in METRICS.items() if about.kind != "text")
# A peer may hide these metrics. The counts of swaps stay visible, because they show the health of the run.
CONTRIBUTION = ("trained_s", "tokens")
RECORDED = tuple(name for name, about in METRICS.items() if about.key)
IN_COLUMNS = sorted((name for name, about in METRICS.items() if about.column), key=lambda name: METRICS[name].rank)
LARGEST = 2.0**53  # limit of the numbers in a record, so that browsers represent integers exactly and sums stay finite


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the known numbers in the result of `Metrics.as_dict`."""
    return {name: float(metrics[name]) for name in NUMBERS if metrics.get(name) is not None}
