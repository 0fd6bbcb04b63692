"""Reads a swarm from outside, with a DHT node that has a temporary identity."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from noloco_p2p.errors import Unreachable
from noloco_p2p.identity import Identity
from noloco_p2p.swarm.dht import SwarmDirectory
from noloco_p2p.telemetry.console import named
from noloco_p2p.ticket import Ticket

LOOK_TIMEOUT_S = 20.0
WHOLE_S = 30.0  # enough time to read all buckets of a large run


@asynccontextmanager
async def reader(ticket: Ticket) -> AsyncIterator[SwarmDirectory]:
    """Yield a directory of the ticket's run. It announces nothing, and leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="noloco-reader-") as folder:
        key_file = Path(folder) / "identity.key"
        directory = await SwarmDirectory(
            identity_path=key_file,
            identity=Identity.load_or_create(key_file),
            listen_host="0.0.0.0",
            listen_port=0,
            bootstraps=ticket.addresses,
            spec_digest=ticket.invitation.listing(ticket.spec_digest).view if ticket.invitation else ticket.spec_digest,
        ).start()
        try:
            yield directory
        finally:
            await directory.stop(farewell=False)


async def find_somebody(ticket: Ticket, directory: SwarmDirectory, *, timeout_s: float = LOOK_TIMEOUT_S) -> None:
    """Wait for a live peer of the run. Raises Unreachable if there is none within `timeout_s`."""
    if await directory.wait_for_peers(timeout_s):
        return
    failures = "; ".join(f"{named(peer)}: {why}" for peer, why in directory.dial_failures().items())
    raise Unreachable(
        f"no live peer of run {ticket.run_name} was found within {timeout_s:.0f} s through "
        f"{', '.join(ticket.addresses) or 'a ticket without addresses'}"
        + (f" ({failures})" if failures else "")
        + "; ask for a new ticket"
    )
