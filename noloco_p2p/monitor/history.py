"""Keeps the curves of a swarm's metrics in memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from noloco_p2p.monitor.roster import Health
from noloco_p2p.telemetry.totals import TOTALS

SAMPLE_S = 10.0
MAX_SAMPLES = 1_000
MAX_LOSSES = 400_000  # in all samples together, about 40 MB
MAX_SERIES = 60  # maximum number of peers whose curves are returned at once
NAMES = tuple(total.name for total in TOTALS)
LEFT_OVER_S = 600.0  # the time over which the progress is measured, to estimate the time left


class History:
    """Samples of one swarm. Whenever there are too many, every second one is dropped, and the interval is doubled."""

    def __init__(self) -> None:
        self.interval_s = SAMPLE_S
        self._samples: list[tuple[dict[str, float | None], dict[str, float]]] = []  # totals, and losses by peer

    def add(self, summary: dict[str, Any]) -> None:
        """Add a sample if one is due."""
        time_s, totals = summary["time_s"], summary["totals"]
        if self._samples and time_s - (self._samples[-1][0]["time_s"] or 0.0) < self.interval_s:
            return
        alive = totals[Health.ALIVE] + totals[Health.SILENT]
        losses = {
            sys.intern(peer["peer_id"]): round(peer["loss"], 4)
            for peer in summary["peers"]
            if peer["health"] in (Health.ALIVE, Health.SILENT) and peer["loss"] is not None
        }
        self._samples.append(({"time_s": time_s, "alive": alive, **{name: totals[name] for name in NAMES}}, losses))
        while len(self._samples) > MAX_SAMPLES or sum(len(losses) for _, losses in self._samples) > MAX_LOSSES:
            del self._samples[-2::-2]
            self.interval_s *= 2

    def columns(self, peers: Sequence[str]) -> dict[str, Any]:
        """Return `time_s`, `alive`, the totals, and `losses`, which has the columns of the named peers.

        Peers without samples are omitted, and at most MAX_SERIES peers are returned.
        """
        curves = {name: [losses.get(name) for _, losses in self._samples] for name in peers[:MAX_SERIES]}
        return {
            "interval_s": self.interval_s,
            **{name: [totals[name] for totals, _ in self._samples] for name in ("time_s", "alive", *NAMES)},
            "losses": {name: curve for name, curve in curves.items() if any(loss is not None for loss in curve)},
        }

    def left_s(self) -> float | None:
        """Estimate the time until the schedule is complete from the progress in the last ten minutes."""
        points = [(t["time_s"] or 0.0, t["progress"]) for t, _ in self._samples]
        points = [(time_s, progress) for time_s, progress in points if progress is not None]
        if not points:
            return None
        now_s, progress = points[-1]
        began_s, begun = next((point for point in points[::-1] if now_s - point[0] >= LEFT_OVER_S), points[0])
        return (1 - progress) * (now_s - began_s) / (progress - begun) if progress > begun else None
