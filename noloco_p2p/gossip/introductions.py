"""This module checks whether a caller has a live record.

Lookups are rate-limited, so that strangers cannot trigger a flood of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from noloco_p2p.gossip.seams import Directory
from noloco_p2p.rates import Rates

LOOKS_AT_ONCE = 4  # simultaneous lookups of unknown callers
LOOKS_PER_S = 0.5
EVERYBODY = ""  # the only key, because all callers share one limit
LOOK_S = 2.0  # the time limit for one lookup; shorter than the deadline of any offer


class Introductions:
    """Checks whether callers have a live record, using a local copy of the directory or a lookup.

    All callers together cause at most 30 lookups per minute. Beyond that, a newcomer is recognized only after the next
    regular read of the directory. `clock` returns seconds.
    """

    def __init__(self, directory: Directory, *, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._looks = Rates(per_s=LOOKS_PER_S, at_once=LOOKS_AT_ONCE, clock=clock)

    async def is_listed(self, peer_id: str) -> bool:
        """Return within LOOK_S whether the peer has a live record. It raises only CancelledError."""
        if self._directory.knows(peer_id):
            return True
        if not self._looks.take(EVERYBODY):
            return False
        try:
            async with asyncio.timeout(LOOK_S):
                return await self._directory.find(peer_id, timeout_s=LOOK_S) is not None
        except TimeoutError:
            return False
