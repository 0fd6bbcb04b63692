"""Announces this peer: stores its record in the DHT periodically, and detects another peer with the same key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from noloco_p2p.errors import DirectoryError
from noloco_p2p.identity import Identity
from noloco_p2p.swarm.buckets import bucket_of
from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.membership_view import MembershipView
from noloco_p2p.swarm.node import SwarmNode
from noloco_p2p.swarm.records import EXPIRY_SLACK_S, TTL_S, PeerRecord, encode_record


class Announcer:
    """Stores the result of `describe`, in the buckets of the membership view.

    key: of the view in which the record is stored. describe: returns the current record without the fields of the
    directory; None until there is something to announce. multiaddrs: where this node can be dialled, if the record
    does not
    say. on_copy: called, possibly repeatedly, when a later start with the same key announces itself.
    """

    def __init__(
        self,
        node: SwarmNode,
        identity: Identity,
        view: MembershipView,
        *,
        key: str,
        spec_digest: str,
        describe: Callable[[], PeerRecord | None],
        multiaddrs: Callable[[], list[str]],
        every_s: float,
        on_copy: Callable[[PeerRecord], None],
    ) -> None:
        self._node = node
        self._identity = identity
        self._view = view
        self._key = key
        self._spec_digest = spec_digest
        self._describe = describe
        self._multiaddrs = multiaddrs
        self._every_s = every_s
        self._on_copy = on_copy
        self._copies = CopyWatch()
        self._sequence = 0
        self._expires_at_s = 0.0
        self._announcing = asyncio.Lock()

    async def beat(self) -> float:
        """Announce the record; returns the pause until the next heartbeat. Raises DirectoryError."""
        with suppress(DirectoryError):
            await self._look_for_copies()
        await self.announce()
        return self._every_s

    async def announce(self, state: str | None = None, *, timeout_s: float | None = None) -> None:
        """Store the record now, with `state` instead of its own. Raises DirectoryError."""
        async with self._announcing:
            described = self._describe()
            if described is None:
                return  # nothing to announce yet
            depths = self._view.depths()
            record = replace(
                described,
                depths=() if depths == (0,) else depths,
                peer_id=self._identity.peer_id,
                spec_digest=self._spec_digest,
                multiaddrs=tuple(described.multiaddrs or self._multiaddrs()),
                state=state or described.state,
                sequence=self._next_sequence(),
                expires_at_s=self._next_expiry_s(),
            )
            await self._store(record, depths, timeout_s=timeout_s or self._every_s)

    async def _store(self, record: PeerRecord, depths: tuple[int, ...], *, timeout_s: float) -> None:
        value, expires_at_s = encode_record(record, self._identity), record.expires_at_s
        keys = [bucket_of(record.peer_id, depth).key(self._key) for depth in depths]
        results = await asyncio.gather(
            *(
                self._node.store(key, record.peer_id, value, expires_at_s=expires_at_s, timeout_s=timeout_s)
                for key in keys
            ),
            return_exceptions=True,  # try all of them
        )
        for fault in filter(None, results):
            raise fault

    async def _look_for_copies(self) -> None:
        """Check that the record under this peer's id is its own."""
        own = self._describe()
        if own is None:
            return
        for found in await self._view.stored_under(self._identity.peer_id, timeout_s=self._every_s):
            if self._copies.must_stop(own, found):
                self._on_copy(found)

    def _next_sequence(self) -> int:
        """The next sequence number, which increases over restarts: milliseconds of DHT time, or one more than the
        last.
        """
        self._sequence = max(self._sequence + 1, int(CLOCK.now() * 1000))
        return self._sequence

    def _next_expiry_s(self) -> float:
        """The next expiry. A DHT node keeps the record that expires last, so the newest one must."""
        expires_at_s = CLOCK.now() + TTL_S
        # otherwise the clock was ahead, and no node would accept a later expiry
        if self._expires_at_s <= expires_at_s + TTL_S:
            expires_at_s = max(expires_at_s, self._expires_at_s + EXPIRY_SLACK_S)
        self._expires_at_s = expires_at_s
        return self._expires_at_s


class CopyWatch:
    """Detects a key that is used twice, from the records stored under this peer's id. Pure.

    A record outlives its peer, so a record of another start does not prove a copy; one that has announced itself twice
    does. The later of two starts stays, by the clocks of their machines; with equal clocks the session keys decide, so
    that they never both stop.
    """

    def __init__(self) -> None:
        self._heard: dict[str, int] = {}  # session key of another start -> its first sequence number

    def must_stop(self, own: PeerRecord, found: PeerRecord) -> bool:
        """`own`: what this start announces; `found`: what was read under its peer id."""
        if found.peer_id != own.peer_id or found.session_key == own.session_key or found.state == "leaving":
            return False
        if (found.started_at_ms, found.session_key) < (own.started_at_ms, own.session_key):
            return False
        if len(self._heard) > 16:
            self._heard.clear()
        return found.sequence > self._heard.setdefault(found.session_key, found.sequence)
