"""Changes to the records of peers and to their metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.telemetry.metrics import METRICS


def changed(record: PeerRecord, **changes: Any) -> PeerRecord:
    """Apply `dataclasses.replace` to the fields of a record and to those of its metrics."""
    metrics = {name: value for name, value in changes.items() if name in METRICS}
    others = {name: value for name, value in changes.items() if name not in METRICS}
    return replace(record, metrics=replace(record.metrics, **metrics), **others)
