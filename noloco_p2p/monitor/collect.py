"""Describes a swarm from the outside, based on the records of its peers in the DHT.

`Watcher` keeps the records that have been read; `summary` is the JSON that docs/monitoring.md describes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from typing import Any

from noloco_p2p.gossip.outcome import LonelyCause
from noloco_p2p.monitor.notices import notices
from noloco_p2p.monitor.roster import Health, Member, Roster
from noloco_p2p.monitor.spread import Sketches, Spread
from noloco_p2p.monitor.stages import stage_rows
from noloco_p2p.swarm.dht import SwarmDirectory
from noloco_p2p.swarm.membership_view import Headcount
from noloco_p2p.swarm.reader import WHOLE_S, find_somebody, reader
from noloco_p2p.swarm.records import TTL_S, PeerRecord
from noloco_p2p.telemetry.metrics import RECORDED
from noloco_p2p.telemetry.totals import Peers, totals
from noloco_p2p.ticket import Ticket

SUMMARY_VERSION = 1
SETTLE_S = 2.0  # wait after the first record; the others arrive with the same read or the next one
COMMON_MARK_S = TTL_S / 4 + 5.0  # the time until every peer has announced itself again and its record has been read
MOST = 2 / 3  # minimum share of the peers with sketches that must have a mark in common
LOOK_AGAIN_S = 1.0
# The causes of solo rounds are shown together.
SHOWN = tuple(name for name in RECORDED if not name.startswith("alone_"))


class Watcher:
    """Observes one run. Each `look` reads the current records of the directory."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.roster = Roster()
        self.sketches: dict[
            int, Sketches
        ] = {}  # by stage, because peers of different stages are not replicas of each other
        self.spreads: dict[int, Spread] = {}
        self.directory_age_s = 0.0
        self.headcount: Headcount | None = None
        self.now_s = time.time()

    def look(self, directory: SwarmDirectory) -> None:
        self.headcount = directory.headcount()
        self.take(directory.records(), directory_age_s=directory.read_age_s(), now_s=time.time())

    def take(self, records: list[tuple[PeerRecord, float]], *, directory_age_s: float, now_s: float) -> None:
        self.now_s, self.directory_age_s = now_s, directory_age_s
        self.roster.take(records, now_s=now_s)
        by_stage: defaultdict[int, list[PeerRecord]] = defaultdict(list)
        for member in self.living():
            by_stage[member.record.stage].append(member.record)
        self.sketches = {stage: self.sketches.get(stage) or Sketches() for stage in by_stage}
        for stage, sketches in self.sketches.items():
            sketches.take(by_stage[stage])
        measured = {stage: sketches.measure() for stage, sketches in self.sketches.items()}
        self.spreads = {stage: spread for stage, spread in measured.items() if spread}

    def living(self) -> list[Member]:
        """Return the members that are alive or silent."""
        members = self.roster.members.values()
        return [member for member in members if member.health(self.now_s) in (Health.ALIVE, Health.SILENT)]

    def summary(self) -> dict[str, Any]:
        """Return a summary of the swarm as JSON values, with the peers ordered by id."""
        members = sorted(self.roster.members.items())
        stages = stage_rows([member.record for member in self.living()], self.spreads)
        told = notices(
            self.roster,
            spreads=tuple(self.spreads.values()),
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
        """Return the totals of the swarm.

        In a run with stages, only the heads count towards the speed, because each token passes through all stages. The
        spread is the largest spread of any stage.
        """
        health = Counter(member.health(self.now_s) for member in self.roster.members.values())
        records = [member.record for member in self.roster.members.values()]
        living = [member.record for member in self.living()]
        training = [record for record in living if record.state == "training" and record.stage == 0]
        spread = max(self.spreads.values(), key=lambda spread: spread.of_all, default=None)
        counted = Peers(*([record.metrics for record in group] for group in (records, living, training)))
        causes = Counter[str]()
        for metrics in counted.listed:
            causes.update(metrics.alone_by_cause)
        return {
            **{str(kind): health[kind] for kind in Health},
            **totals(counted),
            "spread": spread.of_all if spread else None,
            "spread_peers": spread.num_peers if spread else 0,
            "spread_progress": spread.progress if spread else None,
            "alone_by_cause": {str(cause): causes[cause] for cause in LonelyCause},
            "lately": self.roster.lately(),
        }

    def has_common_marks(self) -> bool:
        """Return whether most sketches are comparable in each stage where at least two peers publish a sketch."""
        return all(
            stage in self.spreads and self.spreads[stage].num_peers >= MOST * sketches.num_peers
            for stage, sketches in self.sketches.items()
            if sketches.num_peers > 1
        )

    def describe(self, member: Member) -> dict[str, Any]:
        spread = self.spreads.get(member.record.stage)
        distance = spread.of_each.get(member.record.peer_id) if spread else None
        health = member.health(self.now_s)
        return {**describe(member.record, member.age_s(self.now_s)), "health": str(health), "distance": distance}


async def snapshot(ticket: Ticket) -> dict[str, Any]:
    """Read the swarm once, and return its summary. Raises Unreachable if no peer of the run is found.

    If too few peers have comparable sketches, it keeps reading until every peer has announced itself again.
    """
    async with reader(ticket) as directory:
        await find_somebody(ticket, directory)
        await asyncio.sleep(SETTLE_S)
        await directory.wait_until_whole(WHOLE_S)
        watcher = Watcher(ticket)
        watcher.look(directory)
        until_s = time.monotonic() + COMMON_MARK_S
        while not watcher.has_common_marks() and time.monotonic() < until_s:
            await asyncio.sleep(LOOK_AGAIN_S)
            watcher.look(directory)
        return watcher.summary()


def describe(record: PeerRecord, age_s: float) -> dict[str, Any]:
    """Return the record of one peer as JSON values. `age_s` is the age of the record."""
    return {
        "peer_id": record.peer_id,
        "name": record.name,
        "state": record.state,
        "paused_by": record.paused_by if record.state == "paused" else "",
        **{name: getattr(record.metrics, name) for name in SHOWN},
        "alone_by_cause": record.metrics.alone_by_cause,
        "reachability": record.reachability,
        "addresses": list(record.addresses),
        "stage": record.stage if record.stages else None,
        "sends_to": list(record.sends_to),
        "software": record.software,
        "age_s": round(age_s, 1),
    }
