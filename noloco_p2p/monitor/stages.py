"""Summarizes the peers of each stage in a run whose model is cut into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from noloco_p2p.spec import MAX_STAGES
from noloco_p2p.swarm.records import SERVING
from noloco_p2p.telemetry.totals import Row

Stage = dict[str, Any]
SUMMED = ("capacity", "queue", "microbatches", "lost_microbatches", "late_microbatches")


def stage_rows(living: Sequence[Row]) -> list[Stage]:
    """Return one object per stage, in ascending order of capacity. The list is empty if peers hold whole models.

    `living` has the rows of the peers that are alive or silent. A stage that no peer serves has 0 peers.
    """
    # The number of stages is the one that most peers report, so that one peer cannot invent stages.
    told = Counter(row["stages"] for row in living if row["stages"] <= MAX_STAGES)
    num_stages = max(told, key=lambda number: (told[number], number), default=0)
    rows = [
        _row(stage, [row for row in living if row["stage"] == stage and row["state"] in SERVING])
        for stage in range(num_stages)
    ]
    return sorted(rows, key=lambda row: (row["capacity"], row["stage"]))


def _row(stage: int, peers: Sequence[Row]) -> Stage:
    sums = {name: sum(peer[name] for peer in peers) for name in SUMMED}
    done = sums["microbatches"]
    apart = [peer["apart"] for peer in peers if peer["apart"] is not None]
    return {
        "stage": stage,
        "peers": len(peers),
        "tokens_per_s": sum(peer["tokens_per_s"] for peer in peers if peer["state"] == "training"),
        **sums,
        "lost_share": sums["lost_microbatches"] / done if done else None,
        "late_share": sums["late_microbatches"] / done if done else None,
        "apart": fmean(apart) if apart else None,
    }
