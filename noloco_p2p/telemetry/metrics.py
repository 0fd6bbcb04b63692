"""The one table of what a peer counts: name, kind, unit, meaning, and where it is shown.

Everything that shows a metric is generated from it: the status of a peer, its events and its /metrics, its record in
the directory, the monitor's JSON, tables, totals, curves and /metrics, and docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class About:
    """What is known of a metric besides its value.

    kind: a counter only increases, also over restarts; a gauge is a current value; a text is not for Prometheus.
    key: its name in the record that the peer signs, which has little room; "" = it is not in the record; "why:2" = the
    third number of the list "why".
    digits: significant digits of a number in the record.
    column: the head of its column in the monitor's tables of peers; "" = none. rank: the order of the columns; if
    there is
    little room, the last ones are dropped first.
    total: how the monitor aggregates the values of all peers, a key of `telemetry.totals.WAYS`; "" = it does not.
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
    """`shown`: further fields of `About`."""
    return field(default=default, metadata={"about": About(kind, unit, meaning, **shown)})


@dataclass(slots=True)
class Metrics:
    """The current metrics of one peer. The training thread writes, the network thread reads: each is one assignment."""

    step: int = _metric("counter", "steps", "inner steps taken in this run, including those before a restart", 0)
    round: int = _metric(
        "gauge",
        "rounds",
        "outer steps taken; a newcomer begins at the round of its donor",
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
        "seconds in the state training, waiting included, and those before a restart, too",
        None,
        key="tr",
        column="trained",
        rank=8,
    )
    tokens: int | None = _metric(
        "counter",
        "tokens",
        "tokens that this peer trained on, before a restart, too; in a run with stages, those that it computed",
        None,
        key="tk",
        column="tokens",
        rank=8,
    )
    inner_steps: int = _metric("gauge", "steps", "length of the current round, or of the next one", 0)
    progress: float = _metric(
        "gauge", "fraction", "place in the schedule of the run, 0 to 1", 0.0, key="prog", digits=9, total="highest"
    )
    swaps: int = _metric(
        "counter",
        "rounds",
        "rounds with a committed early part and late part",
        0,
        key="swaps",
        column="swaps",
        rank=4,
        total="sum",
    )
    halves: int = _metric(
        "counter",
        "rounds",
        "rounds with a committed early part only; counted neither in swaps nor in alone",
        0,
        key="half",
        total="sum",
    )
    alone: int = _metric(
        "counter", "rounds", "solo rounds: no part was committed", 0, key="alone", column="alone", rank=4, total="sum"
    )
    alone_nobody: int = _metric(
        "counter", "rounds", "solo rounds because no other live peer was training", 0, key="why:0"
    )
    alone_refused: int = _metric(
        "counter", "rounds", "solo rounds because the peers that were asked refused", 0, key="why:1"
    )
    alone_no_answer: int = _metric(
        "counter", "rounds", "solo rounds because the peers that were asked did not answer", 0, key="why:2"
    )
    alone_failed: int = _metric(
        "counter", "rounds", "solo rounds because a swap broke before anything was committed", 0, key="why:3"
    )
    alone_slow: int = _metric(
        "counter", "rounds", "solo rounds because the swap was not ready at the boundary", 0, key="why:4"
    )
    alone_refused_state: int = _metric(
        "counter", "rounds", "solo rounds because the update filter refused what a partner sent", 0, key="why:5"
    )
    refused_not_finite: int = _metric(
        "counter", "swaps", "swaps ended because a chunk of the partner held NaN or infinity", 0
    )
    refused_over_share: int = _metric(
        "counter", "offers", "offers refused because the peer had had its share of swaps, and other peers were live", 0
    )
    refused_unlisted: int = _metric(
        "counter", "offers", "offers refused because no live record of the peer was known", 0
    )
    refused_gradients: int = _metric(
        "counter",
        "swaps",
        "outer gradients refused: far too long, or pointing against this peer's own",
        0,
    )
    refused_losses: int = _metric(
        "counter",
        "rounds",
        "rounds undone because the swap raised the loss on a private batch; only with --max-loss-rise",
        0,
    )
    clipped_gradients: int = _metric("counter", "swaps", "swaps whose outer gradient from the partner was clipped", 0)
    clipped_offsets: int = _metric(
        "counter",
        "pieces",
        "pieces of the partner's slow weights and momentum that were clipped to the radius around this peer's own",
        0,
    )
    gated_offsets: int = _metric(
        "counter", "pieces", "pieces of slow weights and momentum that the update filter checked", 0
    )
    diverged: int = _metric(
        "counter",
        "rounds",
        "rounds discarded because weights were not finite; training restarted from the round's start",
        0,
    )
    late: int = _metric(
        "counter",
        "corrections",
        "outer gradients that arrived after their boundary and were applied",
        0,
        key="late",
        total="sum",
    )
    catch_ups: int = _metric(
        "counter", "times", "times that this peer fell far behind and took the state of a live peer", 0
    )
    loss: float | None = _metric(
        "gauge",
        "nats/token",
        "training loss, mean over the last round, or over the current round so far",
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
        "tokens trained on per second, over the round that the loss covers (with stages: over the last 30 s); "
        "includes waiting and evaluation",
        0.0,
        key="tok/s",
        column="tokens/s",
        rank=2,
        total="speed",
    )
    inner_steps_per_s: float = _metric(
        "gauge",
        "steps/s",
        "inner steps per second, over the rounds of the loss; includes waiting and evaluation",
        0.0,
        key="steps/s",
    )
    blocked_s: float = _metric(
        "gauge", "s", "seconds that training waited for the network at the last boundary", 0.0, key="wait"
    )
    swap_hidden_s: float = _metric(
        "gauge", "s", "time that the last committed swap ran in parallel to training, without blocked_s", 0.0
    )
    lateness_s: float = _metric(
        "gauge", "s", "seconds by which the last partner reached its boundary after this peer; 0 if before", 0.0
    )
    transfer_s: float = _metric(
        "gauge", "s", "time of the late part of the last swap, from when both peers were at their boundaries", 0.0
    )
    spread: float | None = _metric(
        "gauge",
        "fraction",
        "estimated distance of a replica from the mean: distance to the last partner over 2^0.5, relative to the "
        "norm of the weights; from a sample of the weights, and with coding errors",
        None,
    )
    gradient_norm: float | None = _metric(
        "gauge", "1", "norm of the gradient in the last inner step of the last round, before clipping", None
    )
    mfu: float | None = _metric(
        "gauge",
        "fraction",
        "model flops of the last round over the dense bf16 peak of the accelerator; waiting and evaluation count as "
        "time; unknown where the peak is not known",
        None,
    )
    memory_bytes: int = _metric(
        "gauge",
        "bytes",
        "peak of the tensors on the accelerator since the start; on MPS the current allocation of torch, on a CPU the "
        "peak of the process",
        0,
    )
    data_wait_s: float = _metric("gauge", "s", "seconds that training waited for data in the last round", 0.0)
    data_faults: int = _metric(
        "counter", "faults", "lines, rows and files of the data that were skipped because they could not be used", 0
    )
    bytes_sent: int = _metric(
        "counter",
        "bytes",
        "payload of swaps, including failed ones; without headers, DHT and first fetch",
        0,
        key="out",
        column="out",
        rank=6,
        total="sum",
    )
    bytes_received: int = _metric(
        "counter",
        "bytes",
        "payload of swaps, including failed ones; without headers, DHT and first fetch",
        0,
        key="in",
        column="in",
        rank=6,
        total="sum",
    )
    relayed_bytes: int = _metric(
        "counter", "bytes", "bytes that this relay forwarded between peers that cannot be dialled", 0
    )
    modulo_chunks: int = _metric("counter", "chunks", "chunks received in modulo coding, including those sent again", 0)
    plain_chunks: int = _metric(
        "counter", "chunks", "chunks of modulo sections received as int8 because no bound was known", 0
    )
    extended_chunks: int = _metric(
        "counter",
        "chunks",
        "times that two more bits of a chunk of the codec modulo were received, because its bound did not hold",
        0,
    )
    broken_chunks: int = _metric(
        "counter",
        "chunks",
        "chunks received in modulo coding whose bound did not hold; they were sent again as int8",
        0,
    )
    microbatches: int = _metric(
        "counter", "microbatches", "microbatches whose gradients this peer has counted (run with stages)", 0, key="mb"
    )
    lost_microbatches: int = _metric(
        "counter",
        "microbatches",
        "microbatches begun here and lost before their gradients were counted (run with stages)",
        0,
        key="mbx",
    )
    late_microbatches: int = _metric(
        "counter",
        "microbatches",
        "microbatches counted in a later inner step than their forward pass (run with stages)",
        0,
        key="mbl",
    )
    queue: int = _metric("gauge", "microbatches", "microbatches that this peer holds now (run with stages)", 0, key="q")
    capacity: float = _metric(
        "gauge",
        "tokens/s",
        "tokens per second that this peer computes when it never waits (run with stages)",
        0.0,
        key="cap",
    )
    last_partner: str = _metric(
        "text", "peer id", "partner of the last committed swap or half", "", key="with", column="last with", rank=3
    )
    last_outcome: str = _metric("text", "text", "outcome of the last round in one phrase", "")

    def count_solo(self, cause: str) -> None:
        """`cause`: a value of `gossip.outcome.LonelyCause`."""
        name = f"alone_{cause}"
        setattr(self, name, getattr(self, name) + 1)

    @property
    def alone_by_cause(self) -> dict[str, int]:
        """The counts by values of `gossip.outcome.LonelyCause`."""
        return {name.removeprefix("alone_"): getattr(self, name) for name in METRICS if name.startswith("alone_")}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def recorded(self, *, hides_contribution: bool = False) -> Metrics:
        """The metrics in the peer's record, with few digits and without values that are not finite."""
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
CONTRIBUTION = ("trained_s", "tokens")  # what a peer may leave out of its record: swaps tell how well the run goes
RECORDED = tuple(name for name, about in METRICS.items() if about.key)
IN_COLUMNS = sorted((name for name, about in METRICS.items() if about.column), key=lambda name: METRICS[name].rank)
LARGEST = 2.0**53  # of any number in a record: integers up to it are exact in a browser, too, and sums are finite


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the known numbers of `Metrics.as_dict()`."""
    return {name: float(metrics[name]) for name in NUMBERS if metrics.get(name) is not None}
