"""Keep the state of a peer that others see, and count what it does, in this start and in the ones before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from noloco_p2p.gossip.gossip import Counts, Link
from noloco_p2p.telemetry.metrics import FAILED, Metrics


class Status:
    """The state of a peer, and the counters in its metrics.

    `state` is training, paused, leaving or done. It is published once the peer `has_entered`, which means that it has a
    model. `waits_for_stages` has the stages that this peer waits for because no peer holds them.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.state = "training"
        self.has_entered = False
        self.waits_for_stages: Sequence[int] = ()
        self.started_at_s = self.since_s = time.time()
        self._metrics = metrics
        self._before: dict[str, int] = {}  # what was counted before a restart
        # The time in the state "training" until the last change, and when that was; it stops while the machine sleeps.
        self._trained: tuple[float, float | None] = 0.0, None

    def enter(self) -> None:
        """Publish the state from now on."""
        self.has_entered = True
        self._begin(self.state)

    def change(self, state: str) -> None:
        if state != self.state:
            self._begin(state)

    def _begin(self, state: str) -> None:
        is_training = self.has_entered and state == "training"
        self._trained = self._trained_s(), time.monotonic() if is_training else None
        self.state, self.since_s = state, time.time()

    def _trained_s(self) -> float:
        before_s, since_s = self._trained
        return before_s if since_s is None else before_s + time.monotonic() - since_s

    def count(self, counts: Counts, link: Link, *, relayed_bytes: int) -> None:
        """Update the metrics that follow from swaps, relays and time. Any thread may call this."""
        for name, number in _counted(counts, relayed_bytes).items():
            setattr(self._metrics, name, self._before.get(name, 0) + number)
        self._metrics.swaps_per_min, self._metrics.link_use = link.last_minute(time.monotonic())
        self._metrics.trained_s = self._trained_s()

    def restore(self, values: dict[str, Any]) -> None:
        """Continue the counters from the values in a checkpoint. Unknown names are ignored."""
        for name in Metrics.__dataclass_fields__.keys() & values.keys():
            setattr(self._metrics, name, values[name])
        self._before = {name: getattr(self._metrics, name) for name in _counted(Counts(), 0)}
        trained_s, since_s = self._trained
        self._trained = trained_s + (self._metrics.trained_s or 0.0), since_s


def _counted(counts: Counts, relayed_bytes: int) -> dict[str, int]:
    """Return what a peer has counted since its start, by the names of the metrics."""
    return {
        **asdict(counts.traffic),
        "swaps": counts.swaps,
        **{name: counts.failures[name.removeprefix("failed_")] for name in FAILED},
        **{f"refused_{code.lower()}": counts.refused[code] for code in ("OVER_SHARE", "UNLISTED")},
        "relayed_bytes": relayed_bytes,
    }
