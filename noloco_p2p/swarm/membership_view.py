"""Keeps the membership view of a run by reading buckets of records and counting the peers in them.

A small run has a single bucket, which holds all records. In a large run, a peer reads one bucket at a time, drawn at
random, and a monitor reads all of them. Both also probe buckets at other depths, to find peers that have estimated a
different size.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from noloco_p2p.errors import DirectoryError
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import short_id
from noloco_p2p.rates import Rates
from noloco_p2p.swarm.address_book import AddressBook
from noloco_p2p.swarm.address_filter import believable
from noloco_p2p.swarm.buckets import (
    MAX_DEPTH,
    Bucket,
    BucketSampler,
    Census,
    bucket_of,
    buckets_at,
    is_enough,
    random_bucket,
    run_key,
    within_limit,
)
from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.node import CALL_S, SwarmNode
from noloco_p2p.swarm.records import EXPIRY_SLACK_S, PeerRecord, RecordError, decode_record
from noloco_p2p.swarm.sightings import Sightings
from noloco_p2p.swarm.timing import Timing

logger = logging.getLogger(__name__)

READS_AT_ONCE = 16
WHOLE_POLL_S = 0.1
LONGEST_SURVEY_PAUSE_S = 30.0
LOOKS_A_MINUTE = 24  # reads of one bucket because somebody named a peer that is not listed

Read = tuple[Bucket, list[PeerRecord], float]  # a bucket, its valid records, and the share of its entries that was read


@dataclass(frozen=True, slots=True)
class Headcount:
    """The number of live peers in a run, excluding this one. It is an estimate if not all of them were read."""

    others: int
    is_estimate: bool


class MembershipView:
    """The records of a run that were read from the DHT.

    `live`, `records` and `headcount` are thread-safe and do not wait. Everything else must be used on the event loop.
    `spec_digest` is the digest of the run, and records of other runs are ignored. If `is_monitor` is true, all buckets
    are read, and this node is not a peer itself. Records for which `ignores` returns true are dropped. `own_addresses`
    returns the gRPC addresses of this peer. The event `somebody` is set while a live peer is known.
    """

    def __init__(
        self,
        node: SwarmNode,
        own_peer_id: str,
        address_book: AddressBook,
        *,
        spec_digest: str,
        is_monitor: bool,
        timing: Timing,
        ignores: Callable[[PeerRecord], bool],
        own_addresses: Callable[[], Sequence[str]],
    ) -> None:
        self.somebody = asyncio.Event()
        self._node = node
        self._own_peer_id = own_peer_id
        self._address_book = address_book
        self._key = run_key(spec_digest)
        self._spec_digest = spec_digest
        self._is_monitor = is_monitor
        self._timing = timing
        self._ignores = ignores
        self._own_addresses = own_addresses
        self._sightings = Sightings(own_peer_id)
        self._looks = Rates.a_minute(LOOKS_A_MINUTE)
        rng = random.SystemRandom()
        self._rng, self._census, self._sampler = rng, Census(rng), BucketSampler(rng)
        self._whole_depth: int | None = None  # the depth at which all buckets were read
        self._survey_at_s, self._survey_pause_s = 0.0, timing.quick_view_s
        self._started_at_s = self._read_at_s = time.monotonic()

    # what is known

    def live(self) -> Sequence[Candidate]:
        """Return the peers that were seen within the TTL and are not leaving.

        In a large run, only the peers in the two buckets that were drawn last are returned, except on a monitor.
        """
        drawn = None if self._is_monitor or self._census.depth == 0 else self._sampler.peers()
        return self._sightings.live(now_s=time.monotonic(), among=drawn)

    def knows(self, peer_id: str) -> bool:
        """Return whether a peer was seen in any bucket within the TTL and is not leaving."""
        return bool(self._sightings.live(now_s=time.monotonic(), among={peer_id}))

    def stage_of(self, peer_id: str) -> int | None:
        """Return the stage of a peer whose record was read from any bucket within the TTL, or None for any other name.

        Leaving peers are included.
        """
        return self._sightings.stage_of(peer_id, now_s=time.monotonic())

    def records(self) -> list[tuple[PeerRecord, float]]:
        """Return (record, age in seconds) for each peer whose record was read, including leaving peers."""
        return self._sightings.records(now_s=time.monotonic())

    def headcount(self) -> Headcount:
        """Return the number of other live peers."""
        num_known = len(self.live())
        if self._census.depth == 0 or (self._is_monitor and self._whole_depth == self._census.depth):
            return Headcount(num_known, is_estimate=False)
        return Headcount(max(num_known, round(self._census.size) - (not self._is_monitor)), is_estimate=True)

    def read_age_s(self) -> float:
        """Return the number of seconds since the DHT last answered, or since the start if it has never answered."""
        return time.monotonic() - self._read_at_s

    def depths(self) -> tuple[int, ...]:
        """Return the depths at which this peer's record must be stored now. The peer reads at the first of them."""
        return self._census.depths(time.monotonic())

    # reading: all of these methods can raise DirectoryError, and the view then stays unchanged

    async def look(self) -> float:
        """Refresh the view, probe another depth if needed, and return the pause until the next read."""
        await self.refresh()
        now_s = time.monotonic()
        is_young = now_s - self._started_at_s < self._timing.quick_for_s
        if not self.live() and self._node.neighbours() and now_s >= self._survey_at_s:
            await self._survey()
        elif is_young:
            await self.look_aside()
        if is_young or not self.live():
            return self._timing.quick_view_s
        return self._timing.bucket_view_s if self._census.depth else self._timing.view_s

    async def refresh(self) -> None:
        """Read a bucket now, or all buckets on a monitor."""
        depth, base = self._census.depth, self._census.base
        witness = self._census.witness
        drawn = bucket_of(witness, depth) if witness else self._sampler.next(depth)
        buckets = buckets_at(depth) if self._is_monitor else [drawn]
        self._rng.shuffle(buckets)
        if base is not None:
            buckets += buckets_at(base) if self._is_monitor else [random_bucket(base, self._rng)]
        for start in range(0, len(buckets), READS_AT_ONCE):
            for bucket, records, share in await self._read(buckets[start : start + READS_AT_ONCE]):
                self._count(bucket, records, share)
            if self._census.depth != depth:
                return  # the depth has changed, so the remaining buckets are no longer used
        self._whole_depth = depth if self._is_monitor else None

    async def look_aside(self, depth: int | None = None) -> None:
        """Look for peers at another depth. If `depth` is None, the depth that is due next is probed."""
        depth, nums_apart = self._census.aside() if depth is None else depth, list[float]()
        while not is_enough(depth, nums_apart):
            reads = await self._read([random_bucket(depth, self._rng)])
            if not reads:
                return
            _, records, share = reads[0]
            live = [record for record in records if record.state != "leaving"]
            apart = [record for record in live if self._census.depth not in (record.depths or (0,))]
            nums_apart.append(len(apart) / share)
        self._census.note_aside(depth, nums_apart, now_s=time.monotonic())

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        """Find a peer, and read its bucket if the peer is not known yet. Returns None if the peer cannot be found."""
        if known := next((candidate for candidate in self.live() if candidate.peer_id == peer_id), None):
            return known
        try:
            await self._read([bucket_of(peer_id, depth) for depth in self._census.read_at], timeout_s=timeout_s)
        except DirectoryError:
            return None
        return next(iter(self._sightings.live(now_s=time.monotonic(), among={peer_id})), None)

    async def look_for(self, peer_id: str, *, timeout_s: float) -> None:
        """Read the buckets of a peer now, but each bucket only a few times a minute, because strangers invent names.

        A read brings the records of all peers in its bucket, so this limit delays no peer for long.
        """
        buckets = [bucket_of(peer_id, depth) for depth in self._census.read_at]
        due = [bucket for bucket in buckets if self._looks.take(bucket.key(self._key))]
        with contextlib.suppress(DirectoryError):
            if due:
                await self._read(due, timeout_s=timeout_s)

    async def stored_under(self, peer_id: str, *, timeout_s: float) -> list[PeerRecord]:
        """Return the records that are stored under one peer id at the depths in use."""
        buckets = [bucket_of(peer_id, depth) for depth in self.depths()]
        stored = await self._get(buckets, timeout_s=timeout_s)
        only = [{key: value for key, value in entries.items() if key == peer_id} for entries in stored]
        return [record for both in zip(buckets, only, strict=True) for record in self._readable(*both)]

    async def wait_until_whole(self, timeout_s: float) -> bool:
        """Wait until a monitor has read all buckets of the run. Returns False after a timeout."""
        until_s = time.monotonic() + timeout_s
        while self._whole_depth != self._census.depth:
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(WHOLE_POLL_S)
        return True

    async def _survey(self) -> None:
        """Probe all depths until this peer moves to one of them, because a newcomer does not know the right depth.

        Surveys become less frequent over time.
        """
        self._survey_at_s = time.monotonic() + self._survey_pause_s
        self._survey_pause_s = min(2 * self._survey_pause_s, LONGEST_SURVEY_PAUSE_S)
        before = self._census.depth
        for depth in range(MAX_DEPTH + 1):
            if depth != before:
                await self.look_aside(depth)
            if self._census.depth != before:
                await self.refresh()
                return

    async def _read(self, buckets: Iterable[Bucket], *, timeout_s: float = CALL_S) -> list[Read]:
        """Read buckets in parallel, and merge them into the view. Returns an empty list if there is no node to ask."""
        buckets = list(buckets)
        found = await self._get(buckets, timeout_s=timeout_s)
        if not any(found) and not self._node.neighbours():
            return []
        self._read_at_s = time.monotonic()
        reads = []
        for bucket, entries in zip(buckets, found, strict=True):
            some = within_limit(entries, self._rng)
            reads.append((bucket, self._readable(bucket, some), len(some) / len(entries) if entries else 1.0))
        everybody = [record for _, records, _ in reads for record in records]
        news = self._sightings.merge(everybody, now_s=time.monotonic(), dht_now_s=CLOCK.now())
        for record in news:
            self._address_book.remember(record.peer_id, record.multiaddrs)
        if self.live():
            self.somebody.set()
        else:
            self.somebody.clear()
        return reads

    async def _get(self, buckets: Sequence[Bucket], *, timeout_s: float) -> list[dict[str, tuple[bytes, float]]]:
        keys = [bucket.key(self._key) for bucket in buckets]
        return await asyncio.gather(*(self._node.get(key, timeout_s=timeout_s) for key in keys))

    def _count(self, bucket: Bucket, records: Sequence[PeerRecord], share: float) -> None:
        """Count the peers in a bucket at the current depth or the base. `share` is the fraction of its entries that was
        read.
        """
        live = [record for record in records if record.state != "leaving"]
        peer_ids, witness = [record.peer_id for record in live], self._census.witness
        self._sampler.took(bucket, peer_ids)
        if bucket.depth == self._census.depth:
            if witness and bucket.holds(witness):
                self._census.note_witness(witness in peer_ids)
            homes = [record.depths[0] if record.depths else 0 for record in live]
            self._census.note(len(live) / share, homes=homes, now_s=time.monotonic())
        elif bucket.depth == self._census.base:
            self._census.note_base([peer_id for peer_id in peer_ids if peer_id != self._own_peer_id])

    def _readable(self, bucket: Bucket, entries: dict[str, tuple[bytes, float]]) -> list[PeerRecord]:
        """Return the valid records among the entries. Unlike the validator, it checks all fields of a record."""
        records: list[PeerRecord] = []
        own = self._own_addresses()
        for subkey, (value, expires_at_s) in entries.items():
            try:
                record = decode_record(value)
            except RecordError as error:
                logger.debug("ignored the record stored for %s: %s", short_id(subkey), error)
                continue
            is_own_word = record.peer_id == subkey and record.spec_digest == self._spec_digest
            is_in_time = abs(record.expires_at_s - expires_at_s) <= EXPIRY_SLACK_S
            if is_own_word and bucket.holds(subkey) and is_in_time and not self._ignores(record):
                records.append(believable(record, only_public=self._node.guard.only_public, own=own))
        return records
