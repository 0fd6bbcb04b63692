"""The one table of what a peer counts: name, kind, unit, what is counted and what is not.

Records, the events of a round, a peer's /metrics and docs/metrics.md are made from it. A counter only rises, over
restarts too; a gauge is a value now; a text is not for Prometheus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


def _metric(kind: str, unit: str, meaning: str, default: Any) -> Any:
    return field(default=default, metadata={"kind": kind, "unit": unit, "meaning": meaning})


@dataclass(slots=True)
class Metrics:
    """The numbers of one peer now. The training thread writes, the network thread reads: each is one assignment."""

    step: int = _metric("counter", "steps", "inner steps taken in this run, those before a restart too", 0)
    round: int = _metric("gauge", "rounds", "outer steps taken; a newcomer begins at the round of its donor", 0)
    rounds_here: int = _metric("counter", "rounds", "outer steps taken by this peer, those before a restart too", 0)
    inner_steps: int = _metric("gauge", "steps", "length of the round of now, or of the next one", 0)
    progress: float = _metric("gauge", "fraction", "place in the schedule of the run, 0 to 1", 0.0)
    swaps: int = _metric("counter", "rounds", "rounds with a committed early part and late part", 0)
    halves: int = _metric("counter", "rounds", "rounds with a committed early part only; not in swaps, not in alone", 0)
    alone: int = _metric("counter", "rounds", "rounds without a committed part", 0)
    alone_nobody: int = _metric("counter", "rounds", "alone: no other live peer was known to train", 0)
    alone_refused: int = _metric("counter", "rounds", "alone: who was asked said no", 0)
    alone_no_answer: int = _metric("counter", "rounds", "alone: who was asked could not be reached or was silent", 0)
    alone_failed: int = _metric("counter", "rounds", "alone: a swap began and broke before anything was committed", 0)
    alone_slow: int = _metric("counter", "rounds", "alone: a swap was running, and not ready at the boundary", 0)
    alone_refused_state: int = _metric(
        "counter", "rounds", "alone: what a partner sent came whole, and a gate refused to apply it", 0
    )
    refused_not_finite: int = _metric("counter", "swaps", "broken off: a chunk of the partner held NaN or infinity", 0)
    refused_over_share: int = _metric(
        "counter", "offers", "not accepted: their peer had had its share of swaps, and others were there", 0
    )
    refused_unlisted: int = _metric("counter", "offers", "not accepted: no live record of their peer was known", 0)
    refused_gradients: int = _metric(
        "counter",
        "swaps",
        "not applied: the partner's outer gradient was far too long, or pointed against the own one",
        0,
    )
    refused_losses: int = _metric(
        "counter", "rounds", "undone: the swap raised the loss on a private batch; only with --max-loss-rise", 0
    )
    clipped_gradients: int = _metric("counter", "swaps", "the partner's outer gradient was shortened", 0)
    clipped_offsets: int = _metric(
        "counter", "pieces", "of the partner's slow weights and momentum, shortened to the radius around the own", 0
    )
    gated_offsets: int = _metric("counter", "pieces", "of slow weights and momentum that were looked at", 0)
    diverged: int = _metric(
        "counter", "rounds", "given up: own weights were not finite, and went back to those of the round's start", 0
    )
    late: int = _metric("counter", "corrections", "outer gradients that came after their boundary and were applied", 0)
    catch_ups: int = _metric("counter", "times", "the swarm was far ahead, and the state of a live peer was taken", 0)
    loss: float | None = _metric(
        "gauge", "nats/token", "training loss, mean of the last round; of the round so far while one runs", None
    )
    validation_loss: float | None = _metric(
        "gauge", "nats/token", "on the held-out sequences, at the last evaluation", None
    )
    tokens_per_s: float = _metric("gauge", "tokens/s", "as the loss; waiting and evaluation count as time", 0.0)
    inner_steps_per_s: float = _metric("gauge", "steps/s", "as the loss; waiting and evaluation count as time", 0.0)
    blocked_s: float = _metric("gauge", "s", "training waited for the network at the last boundary", 0.0)
    swap_hidden_s: float = _metric(
        "gauge", "s", "of the last committed swap or half: its time beside training, blocked_s taken off", 0.0
    )
    lateness_s: float = _metric(
        "gauge", "s", "the last partner came to its boundary so long after this peer, 0 if before", 0.0
    )
    transfer_s: float = _metric(
        "gauge", "s", "late part of the last swap: from when both were at their boundaries to its end", 0.0
    )
    spread: float | None = _metric(
        "gauge",
        "fraction",
        "estimate of how far a replica is from the mean: distance to the last partner over 2^0.5, as a share of the "
        "own norm; from a sample of the weights, coding errors in it",
        None,
    )
    gradient_norm: float | None = _metric(
        "gauge", "1", "of the last inner step of the last round, before clipping", None
    )
    mfu: float | None = _metric(
        "gauge",
        "fraction",
        "model flops of the last round over the dense bf16 peak of the accelerator; waiting and evaluation count as "
        "time; none where the peak is not known",
        None,
    )
    memory_bytes: int = _metric(
        "gauge",
        "bytes",
        "most that tensors took on the accelerator since the start; on MPS what torch holds now, on a CPU the process",
        0,
    )
    data_wait_s: float = _metric("gauge", "s", "training waited for data in the last round", 0.0)
    data_faults: int = _metric(
        "counter", "faults", "lines, rows and files of the data that could not be used and were skipped", 0
    )
    bytes_sent: int = _metric(
        "counter", "bytes", "payload of swaps, failed ones too; no headers, no DHT, no first fetch", 0
    )
    bytes_received: int = _metric(
        "counter", "bytes", "payload of swaps, failed ones too; no headers, no DHT, no first fetch", 0
    )
    relayed_bytes: int = _metric("counter", "bytes", "passed on between peers that nobody can dial, by this relay", 0)
    modulo_chunks: int = _metric("counter", "chunks", "received in modulo coding, those sent again too", 0)
    plain_chunks: int = _metric("counter", "chunks", "of modulo sections, received as int8: no bound was known", 0)
    broken_chunks: int = _metric("counter", "chunks", "received in modulo coding, bound broken, sent again as int8", 0)
    microbatches: int = _metric(
        "counter", "microbatches", "in a run with stages: whose gradients this peer has counted", 0
    )
    lost_microbatches: int = _metric(
        "counter", "microbatches", "in a run with stages: begun here, and lost before their gradients were counted", 0
    )
    late_microbatches: int = _metric(
        "counter", "microbatches", "in a run with stages: counted in a later inner step than their forward pass", 0
    )
    queue: int = _metric("gauge", "microbatches", "in a run with stages: that this peer holds now", 0)
    capacity: float = _metric(
        "gauge", "tokens/s", "in a run with stages: what this peer computes when nothing is waited for", 0.0
    )
    last_partner: str = _metric("text", "peer id", "partner of the last committed swap or half", "")
    last_outcome: str = _metric("text", "text", "what the last round got, in one phrase", "")

    def count_lonely(self, cause: str) -> None:
        """`cause`: a value of `gossip.outcome.LonelyCause`."""
        name = f"alone_{cause}"
        setattr(self, name, getattr(self, name) + 1)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


NUMBERS = tuple(item.name for item in fields(Metrics) if item.metadata["kind"] != "text")


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Of `Metrics.as_dict()` what is a number and known."""
    return {name: float(metrics[name]) for name in NUMBERS if metrics.get(name) is not None}
