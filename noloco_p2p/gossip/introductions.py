"""Checks that a caller has a live record. Lookups of unknown callers are limited, so none can cause a flood."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from noloco_p2p.gossip.seams import Directory
from noloco_p2p.rates import Rates

LOOKS_AT_ONCE = 4  # for unknown callers
LOOKS_PER_S = 0.5
EVERYBODY = ""  # the one key: all callers share the lookups
LOOK_S = 2.0  # for one lookup; shorter than any offer's deadline


class Introductions:
    """Answers from what was read of the directory, and with at most 30 lookups per minute for all callers together.

    When these are used up, a newcomer is known after the next regular read of the directory. `clock` gives seconds.
    """

    def __init__(self, directory: Directory, *, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._looks = Rates(per_s=LOOKS_PER_S, at_once=LOOKS_AT_ONCE, clock=clock)

    async def is_listed(self, peer_id: str) -> bool:
        """Return within LOOK_S whether a live record of the peer is known. Never raises, except for cancellation."""
        if self._directory.knows(peer_id):
            return True
        if not self._looks.take(EVERYBODY):
            return False
        try:
            async with asyncio.timeout(LOOK_S):
                return await self._directory.find(peer_id, timeout_s=LOOK_S) is not None
        except TimeoutError:
            return False
