"""The swarm from outside: what the DHT tells about every peer of a run, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

from noloco_p2p.swarm.dht import SwarmDirectory
from noloco_p2p.swarm.reader import find_somebody, reader
from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.ticket import Ticket

SETTLE_S = 2.0  # after the first record: the others come with the same read, or the next


async def snapshot(ticket: Ticket) -> dict[str, Any]:
    """The swarm now. Raises Unreachable when no record of the run is found."""
    async with reader(ticket) as directory:
        await find_somebody(ticket, directory)
        await asyncio.sleep(SETTLE_S)
        return summary(ticket, directory)


def summary(ticket: Ticket, directory: SwarmDirectory) -> dict[str, Any]:
    """All records as JSON values, the peers in a fixed order."""
    peers = [describe(record, age_s) for record, age_s in directory.records()]
    return {
        "run": ticket.run_name,
        "spec_digest": ticket.spec_digest,
        "peers": sorted(peers, key=lambda peer: peer["peer_id"]),
    }


def describe(record: PeerRecord, age_s: float) -> dict[str, Any]:
    """One peer; `age_s` is how long ago it said so."""
    return {
        "peer_id": record.peer_id,
        "state": record.state,
        "round": record.round,
        "progress": record.progress,
        "swaps": record.swaps,
        "alone": record.alone,
        "loss": record.loss,
        "tokens_per_s": record.tokens_per_s,
        "inner_steps_per_s": record.inner_steps_per_s,
        "last_partner": record.last_partner,
        "bytes_sent": record.bytes_sent,
        "bytes_received": record.bytes_received,
        "reachability": record.reachability,
        "addresses": list(record.addresses),
        "software": record.software,
        "age_s": round(age_s, 1),
    }
