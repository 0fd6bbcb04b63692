"""Announces this peer by storing its record in the DHT periodically, and detects another peer with the same key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from noloco_p2p.errors import DirectoryError
from noloco_p2p.identity import Identity
from noloco_p2p.swarm.buckets import bucket_of, run_key
from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.membership_view import MembershipView
from noloco_p2p.swarm.node import SwarmNode
from noloco_p2p.swarm.records import EXPIRY_SLACK_S, TTL_S, PeerRecord, encode_record


class Announcer:
    """Stores this peer's record in the buckets of the membership view.

    `describe` returns the current record without the fields that the directory fills in, or None while there is nothing
    to announce. If the record has no multiaddrs, it gets the addresses of this node that `multiaddrs` returns.
    `on_copy` is called, possibly repeatedly, when a process that was started later with the same identity key announces
    itself.
    """

    def __init__(
        self,
        node: SwarmNode,
        identity: Identity,
        view: MembershipView,
        *,
        spec_digest: str,
        describe: Callable[[], PeerRecord | None],
        multiaddrs: Callable[[], list[str]],
        every_s: float,
        on_copy: Callable[[PeerRecord], None],
    ) -> None:
        self._node = node
        self._identity = identity
        self._view = view
        self._key = run_key(spec_digest)
        self._describe = describe
        self._multiaddrs = multiaddrs
        self._every_s = every_s
        self._on_copy = on_copy
        self._copies = CopyWatch()
        self._sequence = 0
        self._expires_at_s = 0.0
        self._announcing = asyncio.Lock()

    async def beat(self) -> float:
        """Announce the record, and return the pause until the next heartbeat.

        Raises DirectoryError if the record cannot be stored.
        """
        with suppress(DirectoryError):
            await self._look_for_copies()
        await self.announce()
        return self._every_s

    async def announce(self, state: str | None = None, *, timeout_s: float | None = None) -> None:
        """Store the record now. If `state` is given, it replaces the state in the record.

        Raises DirectoryError if the record cannot be stored in one of the buckets.
        """
        async with self._announcing:
            described = self._describe()
            if described is None:
                return  # nothing to announce yet
            depths = self._view.depths()
            record = replace(
                described,
                depths=() if depths == (0,) else depths,
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
            return_exceptions=True,  # a failure must not prevent the other buckets from being tried
        )
        for fault in filter(None, results):
            raise fault

    async def _look_for_copies(self) -> None:
        """Check that the records stored under this peer's id are its own."""
        own = self._describe()
        if own is None:
            return
        for found in await self._view.stored_under(self._identity.peer_id, timeout_s=self._every_s):
            if self._copies.must_stop(own, found):
                self._on_copy(found)

    def _next_sequence(self) -> int:
        """Return the next sequence number, which is based on DHT time, so that it increases across restarts."""
        self._sequence = max(self._sequence + 1, int(CLOCK.now() * 1000))
        return self._sequence

    def _next_expiry_s(self) -> float:
        """Return a later expiry than the previous one, because DHT nodes keep the record that expires last."""
        expires_at_s = CLOCK.now() + TTL_S
        # If the clock was far ahead before, no node would accept an even later expiry.
        if self._expires_at_s <= expires_at_s + TTL_S:
            expires_at_s = max(expires_at_s, self._expires_at_s + EXPIRY_SLACK_S)
        self._expires_at_s = expires_at_s
        return self._expires_at_s


class CopyWatch:
    """Detects whether another process uses the same key, by checking the records under this peer's id.

    A record outlives its process, so a single record of another process does not prove that the key was copied, but a
    second, newer record does. The process that started later, by the clocks of both machines, continues, and the other
    process stops. If the start times are equal, the session keys decide, so that the two processes never both stop.
    This class does no I/O.
    """

    def __init__(self) -> None:
        self._heard: dict[str, int] = {}  # session key of another process -> the first sequence number that was read

    def must_stop(self, own: PeerRecord, found: PeerRecord) -> bool:
        """Return whether this process must stop because a process that started later uses the same key.

        `own` is the record that this process announces, and `found` is a record that was read under its peer id.
        """
        if found.peer_id != own.peer_id or found.session_key == own.session_key or found.state == "leaving":
            return False
        if (found.started_at_ms, found.session_key) < (own.started_at_ms, own.session_key):
            return False
        if len(self._heard) > 16:
            self._heard.clear()
        return found.sequence > self._heard.setdefault(found.session_key, found.sequence)
