"""Summarizes the records of each stage's peers in a run whose model is cut into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from noloco_p2p.spec import MAX_STAGES
from noloco_p2p.swarm.records import SERVING, PeerRecord

Stage = dict[str, Any]
COUNTED = ("queue", "microbatches", "lost_microbatches", "late_microbatches")


def stage_rows(living: Sequence[PeerRecord]) -> list[Stage]:
    """Return one object per stage, in ascending order of capacity. The list is empty if peers hold whole models.

    `living` has the records of the peers that are alive or silent. A stage that no peer serves has 0 peers.
    """
    rows = [
        _row(stage, [record for record in living if record.stage == stage and record.state in SERVING])
        for stage in range(_num_stages(living))
    ]
    return sorted(rows, key=lambda row: (row["capacity"], row["stage"]))


def _num_stages(records: Sequence[PeerRecord]) -> int:
    """Return the number of stages that most peers report, so that one peer cannot invent stages.

    Peers report 0 until they enter the pipeline.
    """
    told = Counter(record.stages for record in records if record.stages <= MAX_STAGES)
    return max(told, key=lambda number: (told[number], number), default=0)


def _row(stage: int, records: Sequence[PeerRecord]) -> Stage:
    sums = {name: sum(getattr(record.metrics, name) for record in records) for name in COUNTED}
    done = sums["microbatches"]
    apart = [record.metrics.apart for record in records if record.metrics.apart is not None]
    return {
        "stage": stage,
        "peers": len(records),
        "capacity": sum(record.metrics.capacity for record in records),
        "tokens_per_s": sum(record.metrics.tokens_per_s for record in records if record.state == "training"),
        **sums,
        "lost_share": sums["lost_microbatches"] / done if done else None,
        "late_share": sums["late_microbatches"] / done if done else None,
        "apart": fmean(apart) if apart else None,
    }
