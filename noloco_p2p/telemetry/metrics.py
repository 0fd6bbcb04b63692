"""The table of all metrics of a peer, with the kind, unit and meaning of each metric, and where it is shown.

Everything that shows a metric is generated from this table. This includes a peer's status, events, /metrics and
directory record; the monitor's JSON, tables, totals, curves and /metrics; and docs/reference.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from noloco_p2p.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Shown:
    """Where a metric is shown beyond the status, the events and /metrics of its peer.

    `key` is the name of the metric in the record that the peer signs, and should be short; "" means that it is not in
    the record. `digits` is the number of significant digits in the record. `column` is the heading of the metric's
    column in the monitor's table of peers; "" means that there is no column. `rank` is the order of the columns; on a
    narrow screen, the last ones are left out first. `total` says how the monitor aggregates the values of all peers: it
    is a key of `telemetry.totals.WAYS`, or "" if the monitor does not aggregate them.
    """

    key: str = ""
    digits: int = 6
    column: str = ""
    rank: int = 0
    total: str = ""


@dataclass(frozen=True, slots=True)
class About:
    """Describes a metric.

    `kind` is "counter" (it only increases, even across restarts), "gauge" (a current value) or "text" (not for
    Prometheus).
    """

    kind: str
    unit: str
    meaning: str
    shown: Shown


def _counter(unit: str, meaning: str, shown: Shown = Shown(), *, default: float | None = 0) -> Any:
    return field(default=default, metadata={"about": About("counter", unit, meaning, shown)})


def _gauge(unit: str, meaning: str, shown: Shown = Shown(), *, default: float | None = 0.0) -> Any:
    return field(default=default, metadata={"about": About("gauge", unit, meaning, shown)})


def _text(unit: str, meaning: str, shown: Shown) -> Any:
    return field(default="", metadata={"about": About("text", unit, meaning, shown)})


@dataclass(slots=True)
class Metrics:
    """The current metrics of one peer. The training thread writes them, and the network thread reads them.

    Scripts set them to whatever holds one number, such as a tensor. Raises SettingsError for anything else.
    """

    step: int = _counter("steps", "inner steps taken in this run, including those before a restart")
    trained_s: float | None = _counter(
        "s",
        "time in the state `training`, including time spent waiting and time before a restart",
        Shown(key="tr", column="trained", rank=8),
        default=None,
    )
    tokens: int | None = _counter(
        "tokens",
        "tokens that this peer trained on, including those before a restart; with stages, tokens that it processed",
        Shown(key="tk", column="tokens", rank=8),
        default=None,
    )
    progress: float = _gauge(
        "fraction",
        "position in the schedule of the run, from 0 to 1",
        Shown(key="prog", digits=9, column="done", rank=1, total="highest"),
    )
    swaps: int = _counter("swaps", "committed swaps", Shown(key="swaps", column="swaps", rank=5, total="sum"))
    failed_unreachable: int = _counter(
        "swaps", "swaps that failed because the partner could not be reached", Shown(key="fu", total="sum")
    )
    failed_slow: int = _counter(
        "swaps", "swaps that failed because the partner did not answer in time", Shown(key="fs", total="sum")
    )
    failed_corrupt: int = _counter(
        "swaps", "swaps that failed because the partner sent invalid data", Shown(key="fc", total="sum")
    )
    failed_abandoned: int = _counter(
        "swaps", "swaps that failed because the partner ended them", Shown(key="fa", total="sum")
    )
    swaps_per_min: float = _gauge(
        "swaps/min",
        "rate of committed swaps over the last minute",
        Shown(key="rate", digits=4, column="swaps/min", rank=3, total="training"),
    )
    swap_s: float = _gauge("s", "usual time of a swap, from the agreement to the commit")
    link_use: float = _gauge(
        "fraction",
        "share of the last minute in which a swap was sending or receiving",
        Shown(key="link", digits=3, column="link", rank=4, total="training"),
    )
    age_steps: float = _gauge(
        "steps",
        "age of half-differences when they are applied, in inner steps since the snapshot: a running mean",
        Shown(key="age", digits=3, column="age", rank=7, total="training"),
    )
    apart: float | None = _gauge(
        "fraction",
        "distance of a replica from the mean, relative to the norm of the weights: a running mean of the distances to "
        "the last partners, divided by 2^0.5",
        Shown(key="apart", digits=3, column="apart", rank=3, total="mean"),
        default=None,
    )
    moved: float | None = _gauge(
        "fraction",
        "distance that the last partner's slice moved this peer's weights, relative to their norm",
        Shown(key="moved", digits=3),
        default=None,
    )
    blocked_s: float = _counter(
        "s", "time that training waited for swaps or was busy with them", Shown(key="wait"), default=0.0
    )
    refused_over_share: int = _counter(
        "offers", "offers refused because the offering peer had used up its share of swaps while other peers were live"
    )
    refused_unlisted: int = _counter("offers", "offers refused because no live record of the offering peer was known")
    clipped_pieces: int = _counter("pieces", "pieces of half-differences that the update filter clipped")
    judged_pieces: int = _counter("pieces", "pieces of half-differences that the update filter checked")
    diverged: int = _counter("times", "number of times that this peer's weights were non-finite")
    catch_ups: int = _counter(
        "times", "number of times that this peer fell far behind and fetched the state of a live peer"
    )
    loss: float | None = _gauge(
        "nats/token",
        "mean training loss of the last steps",
        Shown(key="loss", column="loss", rank=1, total="mean"),
        default=None,
    )
    validation_loss: float | None = _gauge(
        "nats/token",
        "loss on the held-out sequences at the last evaluation",
        Shown(key="val", column="val", rank=9),
        default=None,
    )
    validation_progress: float | None = _gauge(
        "fraction", "position in the schedule at the last evaluation", Shown(key="vp", digits=3), default=None
    )
    tokens_per_s: float = _gauge(
        "tokens/s",
        "training throughput in tokens per second over the steps that the loss covers (with stages: over the last "
        "30 s); the time includes waiting and evaluation",
        Shown(key="tps", column="tokens/s", rank=2, total="speed"),
    )
    inner_steps_per_s: float = _gauge(
        "steps/s",
        "inner steps per second over the steps that the loss covers; the time includes waiting and evaluation",
        Shown(key="sps"),
    )
    gradient_norm: float | None = _gauge(
        "1", "norm of the gradient in the last inner step, before clipping", default=None
    )
    mfu: float | None = _gauge(
        "fraction",
        "model FLOP/s (the time includes waiting and evaluation) divided by the dense bf16 peak of the accelerator; "
        "missing if the peak is unknown",
        default=None,
    )
    memory_bytes: int = _gauge(
        "bytes",
        "peak memory of the tensors on the accelerator since the start (on MPS, torch's current allocation; on a CPU, "
        "the memory of the process now)",
        default=0,
    )
    data_wait_s: float = _gauge("s", "time that training waited for data during the steps that the loss covers")
    data_faults: int = _counter("faults", "unusable lines, rows and files that were skipped while reading the data")
    bytes_sent: int = _counter(
        "bytes",
        "payload sent in swaps, including failed ones; excludes headers, DHT traffic and the first fetch",
        Shown(key="out", column="out", rank=6, total="sum"),
    )
    bytes_received: int = _counter(
        "bytes",
        "payload received in swaps, including failed ones; excludes headers, DHT traffic and the first fetch",
        Shown(key="in", column="in", rank=6, total="sum"),
    )
    relayed_bytes: int = _counter("bytes", "bytes that this peer relayed between peers that cannot be dialled")
    chunks: int = _counter("chunks", "chunks that were sent in swaps")
    repeated_chunks: int = _counter(
        "chunks", "chunks that needed more than their first bits (only with the codec `modulo`)"
    )
    microbatches: int = _counter(
        "microbatches", "microbatches whose gradients the peer has counted (only with stages)", Shown(key="mb")
    )
    lost_microbatches: int = _counter(
        "microbatches",
        "microbatches that the peer started but that were lost before it counted their gradients (only with stages)",
        Shown(key="mbx"),
    )
    late_microbatches: int = _counter(
        "microbatches",
        "microbatches counted in a later inner step than the one in which their forward pass began (only with stages)",
        Shown(key="mbl"),
    )
    queue: int = _gauge(
        "microbatches", "microbatches that the peer holds now (only with stages)", Shown(key="q"), default=0
    )
    capacity: float = _gauge(
        "tokens/s",
        "tokens per second that the peer could process if it never had to wait (only with stages)",
        Shown(key="cap"),
    )
    last_partner: str = _text("peer id", "partner of the last swap that was applied", Shown(key="with"))

    @property
    def failed(self) -> dict[str, int]:
        """The number of failed swaps by kind."""
        return {name.removeprefix("failed_"): getattr(self, name) for name in FAILED}

    def evaluated(self, loss: float | None) -> None:
        """Set the validation loss, measured at the current position in the schedule. None forgets the last one."""
        self.validation_loss, self.validation_progress = loss, None if loss is None else self.progress

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Continue from the values in a checkpoint, and return what this adds to the counters.

        A counter never decreases, as the checkpoint may be older than this peer. Unknown names are ignored.
        """
        added: dict[str, float] = {}
        for name in METRICS.keys() & values.keys():
            if (value := values[name]) is None:
                continue
            if METRICS[name].kind == "counter":
                now = getattr(self, name) or 0
                added[name], value = max(0, value - now), max(now, value)
            setattr(self, name, value)
        return added

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, _checked(name, value))


def _checked(name: str, value: Any) -> Any:
    """Return the plain value of a metric: a text, a number, or None where there may be none."""
    if name not in METRICS:
        raise AttributeError(f"there is no metric {name!r}")
    if value is None and DEFAULTS[name] is None:
        return None
    if METRICS[name].kind == "text":
        what, plain = "a short printable text", value if is_text(value) else None
    elif name in WHOLE:
        what, number = "a whole number of at least 0", _number(value)
        plain = int(number) if number is not None and 0 <= number <= LARGEST and number == int(number) else None
    else:
        what, plain = "one number", _number(value)
    if plain is None:
        found = value if isinstance(value, int | float) else f"a {type(value).__name__}"
        raise SettingsError(f"metrics.{name} must be {what}, but it was set to {found}")
    return plain


def is_text(value: object) -> bool:
    """Return whether a record may contain this text."""
    return isinstance(value, str) and len(value) <= MAX_TEXT_CHARS and value.isprintable()  # terminals show it


def _number(value: Any) -> float | None:
    """Return the number that a value is or holds, as a tensor or an array can, or None."""
    with suppress(AttributeError, TypeError, ValueError, RuntimeError, OverflowError):
        number = value if isinstance(value, int | float) else value.item()
        return float(number) if isinstance(number, int | float) else None
    return None


METRICS: dict[str, About] = {item.name: item.metadata["about"] for item in fields(Metrics)}
DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(Metrics)}
WHOLE = frozenset(item.name for item in fields(Metrics) if "int" in str(item.type))
FAILED = tuple(name for name in METRICS if name.startswith("failed_"))
NUMBERS = tuple(name for name, about in METRICS.items() if about.kind != "text")
# A peer may hide these metrics. The counts of swaps stay visible, because they show the health of the run.
CONTRIBUTION = ("trained_s", "tokens")
RECORDED = tuple(name for name, about in METRICS.items() if about.shown.key)
IN_COLUMNS = sorted(
    (name for name, about in METRICS.items() if about.shown.column), key=lambda name: METRICS[name].shown.rank
)
MAX_TEXT_CHARS = 320  # of a text in a record, enough for a host name of 253 characters, followed by a peer id
LARGEST = 2.0**53  # limit of the numbers in a record, so that browsers represent integers exactly and sums stay finite


def rounded(name: str, value: Any) -> Any:
    """Return the value of a metric for a record: its first digits, or the default if it is not finite or too large."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{METRICS[name].shown.digits}g}") if abs(value) <= LARGEST else DEFAULTS[name]


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the known numbers in the result of `Metrics.as_dict`."""
    return {name: float(metrics[name]) for name in NUMBERS if metrics.get(name) is not None}
