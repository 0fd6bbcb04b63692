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
    round: int = _metric(
        "gauge",
        "rounds",
        "outer steps taken; a newcomer starts counting at its donor's round",
        0,
        key="round",
        column="round",
        rank=1,
        total="highest",
    )
    rounds_here: int = _metric(
        "counter", "rounds", "outer steps taken by this peer, including those before a restart", 0
    )
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
    inner_steps: int = _metric("gauge", "steps", "number of inner steps in the current round", 0)
    progress: float = _metric(
        "gauge",
        "fraction",
        "position in the schedule of the run, from 0 to 1",
        0.0,
        key="prog",
        digits=9,
        total="highest",
    )
    swaps: int = _metric(
        "counter",
        "rounds",
        "rounds in which both the early part and the late part were committed",
        0,
        key="swaps",
        column="swaps",
        rank=4,
        total="sum",
    )
    halves: int = _metric(
        "counter",
        "rounds",
        "rounds in which only the early part was committed; they count neither as swaps nor as solo rounds",
        0,
        key="half",
        total="sum",
    )
    alone: int = _metric(
        "counter",
        "rounds",
        "solo rounds, in which neither part was committed",
        0,
        key="alone",
        column="solo",
        rank=4,
        total="sum",
    )
    alone_nobody: int = _metric(
        "counter", "rounds", "rounds that were solo because no other live peer was training", 0, key="why:0"
    )
    alone_refused: int = _metric(
        "counter", "rounds", "rounds that were solo because the peers that were asked refused to swap", 0, key="why:1"
    )
    alone_no_answer: int = _metric(
        "counter", "rounds", "rounds that were solo because the peers that were asked did not answer", 0, key="why:2"
    )
    alone_failed: int = _metric(
        "counter", "rounds", "rounds that were solo because a swap failed before anything was committed", 0, key="why:3"
    )
    alone_slow: int = _metric(
        "counter", "rounds", "rounds that were solo because the swap was not ready by the boundary", 0, key="why:4"
    )
    alone_refused_state: int = _metric(
        "counter", "rounds", "rounds that were solo because the update filter rejected a partner's data", 0, key="why:5"
    )
    refused_not_finite: int = _metric(
        "counter", "swaps", "swaps aborted because a chunk from the partner contained NaN or infinity", 0
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
    refused_gradients: int = _metric(
        "counter",
        "swaps",
        "outer gradients refused because they were far too large or opposed this peer's own outer gradient",
        0,
    )
    clipped_gradients: int = _metric("counter", "swaps", "swaps in which the partner's outer gradient was clipped", 0)
    clipped_offsets: int = _metric(
        "counter",
        "pieces",
        "pieces of the partner's slow weights and momentum that were clipped because they were too far from this "
        "peer's own",
        0,
    )
    gated_offsets: int = _metric(
        "counter", "pieces", "pieces of slow weights and momentum that the update filter checked", 0
    )
    diverged: int = _metric(
        "counter",
        "rounds",
        "rounds discarded because of non-finite weights; training then resumed from the weights at the start of the "
        "round",
        0,
    )
    late: int = _metric(
        "counter",
        "corrections",
        "outer gradients that were applied although they arrived after the boundary",
        0,
        key="late",
        total="sum",
    )
    catch_ups: int = _metric(
        "counter", "times", "number of times that this peer fell far behind and fetched the state of a live peer", 0
    )
    loss: float | None = _metric(
        "gauge",
        "nats/token",
        "mean training loss over the last round, or over the current round so far",
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
        "training throughput in tokens per second over the round that the loss covers (with stages: over the last "
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
        "inner steps per second over the round that the loss covers; the time includes waiting and evaluation",
        0.0,
        key="steps/s",
    )
    blocked_s: float = _metric(
        "gauge", "s", "time that training waited for the network at the last boundary", 0.0, key="wait"
    )
    swap_hidden_s: float = _metric(
        "gauge", "s", "time that the last committed swap ran in parallel with training, excluding blocked_s", 0.0
    )
    lateness_s: float = _metric(
        "gauge",
        "s",
        "time from this peer's boundary to its last partner's boundary; 0 if the partner reached its boundary first",
        0.0,
    )
    transfer_s: float = _metric(
        "gauge",
        "s",
        "duration of the late part of the last swap, measured from when both partners had reached their boundaries",
        0.0,
    )
    spread: float | None = _metric(
        "gauge",
        "fraction",
        "estimated distance of a replica from the mean, relative to the norm of the weights: the distance to the last "
        "partner divided by 2^0.5, computed from a sample of the encoded weights",
        None,
    )
    gradient_norm: float | None = _metric(
        "gauge", "1", "norm of the gradient in the last inner step of the last round, before clipping", None
    )
    mfu: float | None = _metric(
        "gauge",
        "fraction",
        "model FLOP/s in the last round (whose duration includes waiting and evaluation) divided by the dense bf16 "
        "peak of the accelerator; missing if the peak is unknown",
        None,
    )
    memory_bytes: int = _metric(
        "gauge",
        "bytes",
        "peak memory of the tensors on the accelerator since the start (on MPS, torch's current allocation; on a CPU, "
        "the peak of the process)",
        0,
    )
    data_wait_s: float = _metric("gauge", "s", "time that training waited for data in the last round", 0.0)
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
    modulo_chunks: int = _metric(
        "counter", "chunks", "chunks received with modulo coding, including chunks that later had to be sent again", 0
    )
    plain_chunks: int = _metric(
        "counter", "chunks", "chunks of modulo sections received as int8 because no bound was known", 0
    )
    extended_chunks: int = _metric(
        "counter",
        "chunks",
        "times that this peer received two more bits per value for a `modulo` chunk because the chunk's bound did "
        "not hold",
        0,
    )
    broken_chunks: int = _metric(
        "counter",
        "chunks",
        "chunks received with modulo coding and then sent again as int8 because their bound did not hold",
        0,
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
        "text",
        "peer id",
        "last partner whose early part was committed",
        "",
        key="with",
        column="last with",
        rank=3,
    )
    last_outcome: str = _metric("text", "text", "outcome of the last round, as a short phrase", "")

    def count_solo(self, cause: str) -> None:
        """Count a solo round. `cause` is a value of `gossip.outcome.LonelyCause`."""
        name = f"alone_{cause}"
        setattr(self, name, getattr(self, name) + 1)

    @property
    def alone_by_cause(self) -> dict[str, int]:
        """The number of solo rounds for each value of `gossip.outcome.LonelyCause`."""
        return {name.removeprefix("alone_"): getattr(self, name) for name in METRICS if name.startswith("alone_")}

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
NUMBERS = tuple(name for name, about in METRICS.items() if about.kind != "text")
# A peer may hide these metrics. The counts of rounds stay visible, because they show the health of the run.
CONTRIBUTION = ("trained_s", "tokens")
RECORDED = tuple(name for name, about in METRICS.items() if about.key)
IN_COLUMNS = sorted((name for name, about in METRICS.items() if about.column), key=lambda name: METRICS[name].rank)
LARGEST = 2.0**53  # limit of the numbers in a record, so that browsers represent integers exactly and sums stay finite


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the known numbers in the result of `Metrics.as_dict`."""
    return {name: float(metrics[name]) for name in NUMBERS if metrics.get(name) is not None}
