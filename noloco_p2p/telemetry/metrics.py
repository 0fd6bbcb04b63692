"""The one table of what a peer counts: name, unit, what is counted and what is not. Records are made from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


def _metric(unit: str, meaning: str, default: Any) -> Any:
    return field(default=default, metadata={"unit": unit, "meaning": meaning})


@dataclass(slots=True)
class Metrics:
    """The numbers of one peer now. The training thread writes, the network thread reads: each is one assignment."""

    step: int = _metric("steps", "inner steps taken in this run, those before a restart too", 0)
    round: int = _metric("rounds", "outer steps taken; a newcomer begins at the round of its donor", 0)
    rounds_here: int = _metric("rounds", "outer steps taken by this peer, those before a restart too", 0)
    inner_steps: int = _metric("steps", "length of the round of now, or of the next one", 0)
    progress: float = _metric("fraction", "place in the schedule of the run, 0 to 1", 0.0)
    swaps: int = _metric("rounds", "rounds with a committed early part and late part", 0)
    halves: int = _metric("rounds", "rounds with a committed early part only; not in swaps, not in alone", 0)
    alone: int = _metric("rounds", "rounds without a committed part", 0)
    late: int = _metric("corrections", "outer gradients that came after their boundary and were applied", 0)
    loss: float | None = _metric("nats/token", "training loss, mean of the last round", None)
    validation_loss: float | None = _metric("nats/token", "on the held-out sequences, at the last evaluation", None)
    tokens_per_s: float = _metric("tokens/s", "of the last round; waiting and evaluation count as time", 0.0)
    inner_steps_per_s: float = _metric("steps/s", "of the last round; waiting and evaluation count as time", 0.0)
    blocked_s: float = _metric("s", "training waited for the network at the last boundary", 0.0)
    lateness_s: float = _metric("s", "the last partner came to its boundary so long after this peer, 0 if before", 0.0)
    transfer_s: float = _metric(
        "s", "late part of the last swap: from when both were at their boundaries to its end", 0.0
    )
    bytes_sent: int = _metric("bytes", "payload of swaps, failed ones too; no headers, no DHT, no first fetch", 0)
    bytes_received: int = _metric("bytes", "payload of swaps, failed ones too; no headers, no DHT, no first fetch", 0)
    modulo_chunks: int = _metric("chunks", "received in modulo coding, those that had to be sent again too", 0)
    plain_chunks: int = _metric("chunks", "of modulo sections, received as int8 as no bound was known for them", 0)
    broken_chunks: int = _metric("chunks", "received in modulo coding, bound broken, sent again as int8", 0)
    last_partner: str = _metric("peer id", "partner of the last committed swap or half", "")
    last_outcome: str = _metric("text", "what the last round got, in one phrase", "")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
