"""Describes a swarm from the outside, based on the records of its peers in the DHT.

`Watcher` keeps the records that have been read; `summary` is the JSON that docs/monitoring.md describes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from noloco_p2p.monitor.notices import notices
from noloco_p2p.monitor.roster import Health, Member, Roster
from noloco_p2p.monitor.stages import stage_rows
from noloco_p2p.swarm.dht import SwarmDirectory
from noloco_p2p.swarm.membership_view import Headcount
from noloco_p2p.swarm.reader import WHOLE_S, find_somebody, reader
from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.telemetry.metrics import FAILED, RECORDED
from noloco_p2p.telemetry.totals import Peers, totals
from noloco_p2p.ticket import Ticket

SUMMARY_VERSION = 1
SETTLE_S = 2.0  # wait after the first record; the others arrive with the same read or the next one


class Watcher:
    """Observes one run. Each `look` reads the current records of the directory."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.roster = Roster()
        self.directory_age_s = 0.0
        self.headcount: Headcount | None = None
        self.now_s = time.time()

    def look(self, directory: SwarmDirectory) -> None:
        self.headcount = directory.headcount()
        self.take(directory.records(), directory_age_s=directory.read_age_s(), now_s=time.time())

    def take(self, records: list[tuple[PeerRecord, float]], *, directory_age_s: float, now_s: float) -> None:
        self.now_s, self.directory_age_s = now_s, directory_age_s
        self.roster.take(records, now_s=now_s)

    def living(self) -> list[Member]:
        """Return the members that are alive or silent."""
        members = self.roster.members.values()
        return [member for member in members if member.health(self.now_s) in (Health.ALIVE, Health.SILENT)]

    def summary(self) -> dict[str, Any]:
        """Return a summary of the swarm as JSON values, with the peers ordered by id."""
        members = sorted(self.roster.members.items())
        stages = stage_rows([member.record for member in self.living()])
        told = notices(
            self.roster,
            stages=stages,
            directory_age_s=self.directory_age_s,
            now_s=self.now_s,
            num_estimated=self.estimate(),
        )
        return {
            "version": SUMMARY_VERSION,
            "run": self.ticket.run_name,
            "spec_digest": self.ticket.spec_digest,
            "time_s": round(self.now_s, 3),
            "directory_age_s": round(self.directory_age_s, 1),
            "estimate": self.estimate(),
            "totals": self.totals(),
            "stages": stages,
            "notices": [{"level": notice.level, "text": notice.text} for notice in told],
            "peers": [self.describe(member) for _, member in members],
        }

    def estimate(self) -> int | None:
        """The estimated number of live peers. It is None once all peers have been read."""
        return self.headcount.others if self.headcount and self.headcount.is_estimate else None

    def totals(self) -> dict[str, Any]:
        health = Counter(member.health(self.now_s) for member in self.roster.members.values())
        records = [member.record for member in self.roster.members.values()]
        living = [member.record for member in self.living()]
        training = [record for record in living if record.state == "training"]
        heads = [record for record in training if record.stage == 0]
        groups = ([record.metrics for record in group] for group in (records, living, training, heads))
        return {
            **{str(kind): health[kind] for kind in Health},
            **totals(Peers(*groups)),
            "lately": self.roster.lately(),
        }

    def describe(self, member: Member) -> dict[str, Any]:
        health = member.health(self.now_s)
        return {**describe(member.record, member.age_s(self.now_s)), "health": str(health)}


async def snapshot(ticket: Ticket) -> dict[str, Any]:
    """Read the swarm once, and return its summary. Raises Unreachable if no peer of the run is found."""
    async with reader(ticket) as directory:
        await find_somebody(ticket, directory)
        await asyncio.sleep(SETTLE_S)
        await directory.wait_until_whole(WHOLE_S)
        watcher = Watcher(ticket)
        watcher.look(directory)
        return watcher.summary()


def describe(record: PeerRecord, age_s: float) -> dict[str, Any]:
    """Return the record of one peer as JSON values. `age_s` is the age of the record."""
    return {
        "peer_id": record.peer_id,
        "name": record.name,
        "state": record.state,
        "paused_by": record.paused_by if record.state == "paused" else "",
        **{name: getattr(record.metrics, name) for name in RECORDED if name not in FAILED},
        "failed": record.metrics.failed,
        "reachability": record.reachability,
        "addresses": list(record.addresses),
        "stage": record.stage if record.stages else None,
        "sends_to": list(record.sends_to),
        "software": record.software,
        "age_s": round(age_s, 1),
    }
