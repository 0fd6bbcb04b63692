"""Describes a swarm from the outside, based on the records of its peers in the DHT.

`Watcher` keeps the records that have been read, and returns the JSON that docs/monitoring.md describes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from noloco_p2p.monitor.notices import notices
from noloco_p2p.monitor.roster import Health, Roster
from noloco_p2p.monitor.stages import stage_rows
from noloco_p2p.swarm.directory import WHOLE_S, SwarmDirectory, find_somebody, reader
from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.telemetry.totals import TOTALS, is_living
from noloco_p2p.ticket import Ticket

SUMMARY_VERSION = 1
SETTLE_S = 2.0  # wait after the first record; the others arrive with the same read or the next one


class Watcher:
    """Observes one run. Each `look` reads the current records of the directory."""

    def __init__(self, ticket: Ticket) -> None:
        self.roster = Roster()
        self._ticket = ticket

    def look(self, directory: SwarmDirectory) -> dict[str, Any]:
        """Read the directory, and return a summary of the swarm."""
        headcount = directory.headcount()
        return self.take(
            directory.records(),
            directory_age_s=directory.read_age_s(),
            now_s=time.time(),
            num_estimated=headcount.others if headcount.is_estimate else None,
        )

    def take(
        self,
        records: Iterable[tuple[PeerRecord, float]],
        *,
        directory_age_s: float,
        now_s: float,
        num_estimated: int | None = None,
    ) -> dict[str, Any]:
        """Take the records and their ages, and return a summary of the swarm as JSON values.

        `num_estimated` is the estimated number of live peers, or None if all of them have been read.
        """
        self.roster.take(records, now_s=now_s)
        rows, lately = self.roster.rows(now_s=now_s), self.roster.lately()
        stages = stage_rows([row for row in rows if is_living(row)])
        told = notices(rows, stages=stages, lately=lately, directory_age_s=directory_age_s, num_estimated=num_estimated)
        health = Counter(row["health"] for row in rows)
        return {
            "version": SUMMARY_VERSION,
            "run": self._ticket.run_name,
            "spec_digest": self._ticket.spec_digest,
            "time_s": round(now_s, 3),
            "directory_age_s": round(directory_age_s, 1),
            "estimate": num_estimated,
            "totals": {
                **{str(kind): health[kind] for kind in Health},
                **{total.name: total.over(rows) for total in TOTALS},
                "lately": lately,
            },
            "stages": stages,
            "notices": [asdict(notice) for notice in told],
            "peers": rows,
        }


async def snapshot(ticket: Ticket) -> dict[str, Any]:
    """Read the swarm once, and return its summary. Raises Unreachable if no peer of the run is found."""
    async with reader(ticket) as directory:
        await find_somebody(ticket, directory)
        await asyncio.sleep(SETTLE_S)
        await directory.wait_until_whole(WHOLE_S)
        return Watcher(ticket).look(directory)
