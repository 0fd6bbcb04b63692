"""The directory of a run: who is alive, told by signed records in a DHT that all peers keep together.

    heartbeat   store the own record, every 15 s and when something changed; others drop it after 60 s
    view        read a bucket of records: all of a small run every 5 s, one of many every 10 s; every second at
                first and while nobody is there
    dial        bootstraps and peers met before, again and again while they are missing
    freshen     ask for a random key every 30 s, which keeps routing tables alive: a bucket of another depth
    copies      read what is stored under the own peer id, before every heartbeat: a copied key is noticed

Nothing here stops the peer: without any other node the directory is up, and empty.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from noloco_p2p.errors import DirectoryError
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import Identity, short_id
from noloco_p2p.swarm.address_book import AddressBook
from noloco_p2p.swarm.addresses import only_public, split_peer_id
from noloco_p2p.swarm.buckets import (
    MAX_DEPTH,
    Bucket,
    Census,
    Draw,
    bucket_of,
    buckets_at,
    random_bucket,
    within_limit,
)
from noloco_p2p.swarm.clock import CLOCK, Offset, check_clock
from noloco_p2p.swarm.copies import CopyWatch
from noloco_p2p.swarm.daemon import ListenOn
from noloco_p2p.swarm.dialing import DialPlan
from noloco_p2p.swarm.node import CALL_S, SwarmNode, end_tasks
from noloco_p2p.swarm.records import TTL_S, PeerRecord, RecordError, decode_record, encode_record
from noloco_p2p.swarm.relay import Relay
from noloco_p2p.swarm.view import View

logger = logging.getLogger(__name__)

FAREWELL_S = 4.0  # longer than hivemind waits for one dead neighbour
EXPIRY_SLACK_S = 1e-3
READS_AT_ONCE = 16
WHOLE_POLL_S = 0.1
LONGEST_SURVEY_PAUSE_S = 30.0

Read = tuple[Bucket, list[PeerRecord], float]  # a bucket, the records found there, and their share of all of it


@dataclass(frozen=True, slots=True)
class Timing:
    """How often each task runs; the defaults are the protocol's."""

    heartbeat_s: float = TTL_S / 4
    view_s: float = 5.0
    bucket_view_s: float = 10.0
    quick_view_s: float = 1.0
    quick_for_s: float = 30.0
    dial_s: float = 10.0
    freshen_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Headcount:
    """Live peers of a run, without the one that counts. An estimate where not all of them were read."""

    others: int
    is_estimate: bool


class SwarmDirectory:
    """Implements the seam `gossip.seams.Directory`. Make it with `start()` on a running loop, end it with `stop()`.

    `describe` returns None until there is something to announce. Without it nothing ever is: with a run it only reads,
    and that all buckets (a monitor, which stays out of routing tables); without one it is a plain DHT node (a
    bootstrap).
    """

    def __init__(
        self,
        node: SwarmNode,
        identity: Identity,
        *,
        address_book: AddressBook,
        bootstraps: Sequence[str],
        spec_digest: str | None,
        describe: Callable[[], PeerRecord | None] | None,
        timing: Timing,
        on_copy: Callable[[PeerRecord], None],
        ignores: Callable[[PeerRecord], bool],
        relay: Relay | None,
    ) -> None:
        self.is_abroad: Callable[[], bool] = lambda: False
        self._node = node
        self._identity = identity
        self._address_book = address_book
        self._spec_digest = spec_digest
        self._describe = describe
        self._timing = timing
        self._on_copy = on_copy
        self._ignores = ignores
        self._relay = relay
        self._copies = CopyWatch()
        self._plan = DialPlan(identity.peer_id, _by_peer(bootstraps), longest_pause_s=timing.dial_s)
        self._view = View(identity.peer_id)
        rng = random.SystemRandom()
        self._rng, self._census, self._draw = rng, Census(rng), Draw(rng)
        self._reads_all = spec_digest is not None and describe is None
        self._whole_depth: int | None = None  # at which all buckets were read
        self._survey_at_s, self._survey_pause_s = 0.0, timing.quick_view_s
        self._started_at_s = self._read_at_s = time.monotonic()
        self._sequence = 0
        self._expires_at_s = 0.0
        self._announcing = asyncio.Lock()
        self._dial_now = asyncio.Event()
        self._somebody = asyncio.Event()
        self._has_dialled = asyncio.Event()
        self._offsets: dict[str, Offset] = {}  # of the clocks of nodes, while it is not known whose is right
        self._clock_is_right = False
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        *,
        identity_path: Path,
        identity: Identity,
        listen_host: str,
        listen_port: int,
        announce_host: str | None = None,
        announce_port: int = 0,
        bootstraps: Sequence[str] = (),
        address_book: AddressBook | None = None,
        spec_digest: str | None,
        describe: Callable[[], PeerRecord | None] | None = None,
        timing: Timing | None = None,
        on_copy: Callable[[PeerRecord], None] = lambda record: None,
        ignores: Callable[[PeerRecord], bool] = lambda record: False,
        relays: bool = True,
    ) -> SwarmDirectory:
        """Returns when the own node is up (seconds, for the import); peers are dialled in the background.

        `on_copy` is called, perhaps again and again, when a later start with the same key announces itself. Records
        for which `ignores` is true are never seen: of peers that are not invited, or banned.
        `relays`: calls to peers that nobody can dial are passed on, and count as traffic of this machine.

        Raises DirectoryError when the port is taken, the daemon cannot run, or a bootstrap is no address.
        """
        if describe is not None and spec_digest is None:
            raise ValueError("a peer that describes itself belongs to a run: spec_digest is missing")
        _by_peer(bootstraps)  # a mistyped address is told before seconds of import
        is_monitor = spec_digest is not None and describe is None
        listen_on = ListenOn(listen_host, listen_port, announce_host, announce_port)
        node = await SwarmNode.start(identity_path, identity.peer_id, listen_on, is_client=is_monitor)
        relay = Relay(node) if relays and not is_monitor else None
        if relay:
            await relay.start()
        directory = cls(
            node,
            identity,
            address_book=address_book or AddressBook(),
            bootstraps=bootstraps,
            spec_digest=spec_digest,
            describe=describe,
            timing=timing or Timing(),
            on_copy=on_copy,
            ignores=ignores,
            relay=relay,
        )
        directory._run()
        return directory

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def node(self) -> SwarmNode:
        """For streams of other protocols over the same daemon."""
        return self._node

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def port(self) -> int:
        """The TCP port of libp2p, also when 0 was asked for."""
        return self._node.port

    @property
    def relayed_bytes(self) -> int:
        """What this node has passed on between peers that nobody can dial."""
        return self._relay.passed_bytes if self._relay else 0

    @property
    def daemon_pid(self) -> int | None:
        """Process id of p2pd; None while it is being restarted."""
        return self._node.daemon_pid

    def live(self) -> Sequence[Candidate]:
        """Peers of the run heard of within the TTL and not leaving, without this one. Never waits; for any thread.

        Of a run with many buckets, those in the two that were drawn last; all that were read for a monitor.
        """
        drawn = None if self._reads_all or self._census.depth == 0 else self._draw.peers()
        return self._view.live(now_s=time.monotonic(), among=drawn)

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        """One particular peer: its bucket is read when it is not among those drawn. None when it cannot be found."""
        known = next((candidate for candidate in self.live() if candidate.peer_id == peer_id), None)
        depth = self._census.depth
        if known or depth == 0:
            return known
        try:
            await self._read([bucket_of(peer_id, depth)], timeout_s=timeout_s)
        except DirectoryError:
            return None
        return next(iter(self._view.live(now_s=time.monotonic(), among={peer_id})), None)

    def headcount(self) -> Headcount:
        """How many other peers are alive. Never waits; for any thread."""
        num_known = len(self.live())
        if self._census.depth == 0 or (self._reads_all and self._whole_depth == self._census.depth):
            return Headcount(num_known, is_estimate=False)
        return Headcount(max(num_known, round(self._census.size) - (self._describe is not None)), is_estimate=True)

    def records(self) -> list[tuple[PeerRecord, float]]:
        """(record, age in seconds) of the run's peers that were read, leaving ones too, without this one."""
        return self._view.records(now_s=time.monotonic())

    def read_age_s(self) -> float:
        """Seconds since the directory last answered; since the start when it never did."""
        return time.monotonic() - self._read_at_s

    def multiaddrs(self) -> list[str]:
        """Where this node can be dialled, the announced host first; each ends in /p2p/PEER_ID.

        In a swarm on public addresses those of private networks are left out.
        """
        return only_public(self._node.multiaddrs()) if self.is_abroad() else self._node.multiaddrs()

    def neighbours(self) -> set[str]:
        """Ids of DHT nodes that answered lately, whatever run they are of."""
        return self._node.neighbours()

    def dial_failures(self) -> dict[str, str]:
        """Bootstraps that could not be reached so far: peer id -> why."""
        return self._plan.failures()

    async def wait_for_peers(self, timeout_s: float) -> bool:
        """Wait until a live peer of the run is known; False when none was within `timeout_s`.

        Raises DirectoryError when the clock of this machine is not that of the others.
        """
        check_clock(self._offsets)
        try:
            await asyncio.wait_for(self._somebody.wait(), timeout_s)
        except TimeoutError:
            return False
        check_clock(self._offsets)
        return True

    async def wait_until_whole(self, timeout_s: float) -> bool:
        """For one that only reads: wait until it has read all buckets of the run; False when it has not."""
        until_s = time.monotonic() + timeout_s
        while self._whole_depth != self._census.depth:
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(WHOLE_POLL_S)
        return True

    async def check_clock(self, timeout_s: float) -> None:
        """Wait until those to enter through have been tried once. Raises DirectoryError, as `wait_for_peers` does."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_dialled.wait(), timeout_s)
        check_clock(self._offsets)

    async def announce_now(self) -> None:
        """Store the own record now, after a change of state. Raises DirectoryError; the next heartbeat tries again."""
        await self._announce(None, timeout_s=self._timing.heartbeat_s)

    async def refresh_now(self) -> None:
        """Read a bucket now (all for a monitor). Raises DirectoryError; the view then stays as it was."""
        if self._spec_digest is None:
            return
        depth = self._census.depth
        buckets = buckets_at(depth) if self._reads_all else [self._draw.next(depth)]
        self._rng.shuffle(buckets)
        for start in range(0, len(buckets), READS_AT_ONCE):
            for bucket, records, share in await self._read(buckets[start : start + READS_AT_ONCE]):
                self._count(bucket, records, share)
            if self._census.depth != depth:
                return  # other buckets are in use
        self._whole_depth = depth if self._reads_all else None

    async def _read(self, buckets: Iterable[Bucket], *, timeout_s: float = CALL_S) -> list[Read]:
        """Read buckets at once, and take what they hold into the view. Empty when there is nobody to ask."""
        assert self._spec_digest is not None
        buckets = list(buckets)
        keys = [bucket.key(self._spec_digest) for bucket in buckets]
        found = await asyncio.gather(*(self._node.get(key, timeout_s=timeout_s) for key in keys))
        if not any(found) and not self._node.neighbours():
            return []
        self._read_at_s = time.monotonic()
        reads = []
        for bucket, entries in zip(buckets, found, strict=True):
            some = within_limit(entries, self._rng)
            reads.append((bucket, self._readable(bucket, some), len(some) / len(entries) if entries else 1.0))
        everybody = [record for _, records, _ in reads for record in records]
        news = self._view.merge(everybody, now_s=time.monotonic(), dht_now_s=CLOCK.now())
        for record in news:
            self._address_book.remember(record.peer_id, record.multiaddrs)
        if self.live():
            self._somebody.set()
        else:
            self._somebody.clear()
        return reads

    def _count(self, bucket: Bucket, records: Sequence[PeerRecord], share: float) -> None:
        """A bucket at the depth of now was read, or `share` of it."""
        live = [record for record in records if record.state != "leaving"]
        self._draw.took(bucket, [record.peer_id for record in live])
        if bucket.depth == self._census.depth:
            homes = [record.depths[0] if record.depths else 0 for record in live]
            self._census.note(len(live) / share, homes=homes, now_s=time.monotonic())

    async def _look_aside(self, depth: int) -> None:
        """Are there peers that settled at another depth?"""
        for bucket, records, share in await self._read([random_bucket(depth, self._rng)]):
            live = [record for record in records if record.state != "leaving"]
            apart = [record for record in live if self._census.depth not in (record.depths or (0,))]
            self._census.note_aside(bucket.depth, len(apart) / share, now_s=time.monotonic())

    async def _survey(self) -> None:
        """A newcomer does not know the depth: look at all of them until somebody is found, ever more rarely."""
        self._survey_at_s = time.monotonic() + self._survey_pause_s
        self._survey_pause_s = min(2 * self._survey_pause_s, LONGEST_SURVEY_PAUSE_S)
        before = self._census.depth
        for depth in range(MAX_DEPTH + 1):
            if depth != before:
                await self._look_aside(depth)
            if self._census.depth != before:
                await self.refresh_now()
                return

    async def stop(self, *, farewell: bool = True) -> None:
        """Say good-bye (within FAREWELL_S), then end every task and process. Never raises but when cancelled."""
        try:
            await end_tasks(self._tasks)
            if farewell and self._describe is not None:
                await self._announce("leaving", timeout_s=FAREWELL_S)
        except DirectoryError as error:
            logger.warning("the swarm could not be told that this peer leaves: %s", error)
        finally:
            await self._node.stop()
            await asyncio.to_thread(self._address_book.save)

    def _run(self) -> None:
        self._node.on_restart = self._on_restart
        jobs: list[tuple[str, Callable[[], Awaitable[float]]]] = [("dial", self._dial), ("freshen", self._freshen)]
        if self._describe is not None:
            jobs.append(("heartbeat", self._beat))
        if self._spec_digest is not None:
            jobs.append(("view", self._look))
        self._tasks = [asyncio.create_task(_forever(name, job), name=f"directory {name}") for name, job in jobs]

    def _on_restart(self) -> None:
        self._plan.forget_failures()
        self._dial_now.set()

    async def _beat(self) -> float:
        with suppress(DirectoryError):
            await self._look_for_copies()
        await self._announce(None, timeout_s=self._timing.heartbeat_s)
        return self._timing.heartbeat_s

    async def _look_for_copies(self) -> None:
        """What is stored under the own peer id must be the own word."""
        own = self._describe() if self._describe else None
        if own is None or self._spec_digest is None:
            return
        buckets = [bucket_of(self.peer_id, depth) for depth in self._census.depths(time.monotonic())]
        keys = [bucket.key(self._spec_digest) for bucket in buckets]
        stored = await asyncio.gather(*(self._node.get(key, timeout_s=self._timing.heartbeat_s) for key in keys))
        for bucket, entries in zip(buckets, stored, strict=True):
            for found in self._readable(bucket, {k: v for k, v in entries.items() if k == self.peer_id}):
                if self._copies.must_stop(own, found):
                    self._on_copy(found)

    async def _look(self) -> float:
        await self.refresh_now()
        now_s = time.monotonic()
        is_young = now_s - self._started_at_s < self._timing.quick_for_s
        if not self.live() and self._node.neighbours() and now_s >= self._survey_at_s:
            await self._survey()
        elif is_young:
            await self._look_aside(self._census.aside())
        if is_young or not self.live():
            return self._timing.quick_view_s
        return self._timing.bucket_view_s if self._census.depth else self._timing.view_s

    async def _freshen(self) -> float:
        if self._spec_digest is None:
            await self._node.get(secrets.token_hex(16))
        else:
            await self._look_aside(self._census.aside())
        return self._timing.freshen_s

    async def _dial(self) -> float:
        heard_of = {record.peer_id for record, _ in self.records()}
        book, near = self._address_book.addresses(), self._node.neighbours()
        due = self._plan.due(book, near, heard_of=heard_of, now_s=time.monotonic())
        reached = await asyncio.gather(*(self._dial_one(peer, addresses) for peer, addresses in due.items()))
        self._has_dialled.set()
        if any(reached):
            self._look_at_clocks()
            await self._meet()
        if not self._clock_is_right and not self._node.neighbours():
            CLOCK.follow_wall()
        await asyncio.to_thread(self._address_book.save)
        self._dial_now.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._dial_now.wait(), min(self._timing.dial_s, 1.0))
        return 0.0

    async def _dial_one(self, peer_id: str, multiaddrs: Sequence[str]) -> bool:
        try:
            offset = await self._node.dial(peer_id, [split_peer_id(multiaddr)[0] for multiaddr in multiaddrs])
        except DirectoryError as error:
            logger.debug("%s", error)
            self._plan.failed(peer_id, str(error), now_s=time.monotonic())
            return False
        logger.info("entered the DHT through %s", short_id(peer_id))
        self._plan.reached(peer_id, now_s=time.monotonic())
        CLOCK.heard(offset.seconds)
        if not self._clock_is_right:
            self._offsets[peer_id] = offset
        self._address_book.remember(peer_id, multiaddrs)
        return True

    def _look_at_clocks(self) -> None:
        """Once others agree on the time, or nobody asked, this peer never doubts it again."""
        try:
            check_clock(self._offsets)
        except DirectoryError as error:
            logger.warning("%s", error)
            self._somebody.set()  # who waits is told
        else:
            self._clock_is_right = True
            self._offsets.clear()

    async def _meet(self) -> None:
        """New neighbours: tell them of this peer, and look for the peers that they know."""
        if self._describe is not None:
            await self._announce(None, timeout_s=self._timing.heartbeat_s)
        await self.refresh_now()

    async def _announce(self, state: str | None, *, timeout_s: float) -> None:
        if self._describe is None or self._spec_digest is None:
            return
        async with self._announcing:
            described = self._describe()
            if described is None:
                return  # nothing to say yet
            depths = self._census.depths(time.monotonic())
            record = replace(
                described,
                depths=() if depths == (0,) else depths,
                peer_id=self.peer_id,
                spec_digest=self._spec_digest,
                multiaddrs=tuple(described.multiaddrs or self.multiaddrs()),
                state=state or described.state,
                loss=described.loss if described.loss is None or math.isfinite(described.loss) else None,
                sequence=self._next_sequence(),
                expires_at_s=self._next_expiry_s(),
            )
            value, expires_at_s = encode_record(record, self._identity), record.expires_at_s
            keys = [bucket_of(self.peer_id, depth).key(self._spec_digest) for depth in depths]
            results = await asyncio.gather(
                *(
                    self._node.store(k, self.peer_id, value, expires_at_s=expires_at_s, timeout_s=timeout_s)
                    for k in keys
                ),
                return_exceptions=True,  # all are tried
            )
            for fault in filter(None, results):
                raise fault

    def _next_sequence(self) -> int:
        """Rises over restarts too: milliseconds of DHT time, or one more than the last."""
        self._sequence = max(self._sequence + 1, int(CLOCK.now() * 1000))
        return self._sequence

    def _next_expiry_s(self) -> float:
        """A DHT node keeps the record that expires last, so the newest must."""
        self._expires_at_s = max(self._expires_at_s + EXPIRY_SLACK_S, CLOCK.now() + TTL_S)
        return self._expires_at_s

    def _readable(self, bucket: Bucket, entries: dict[str, tuple[bytes, float]]) -> list[PeerRecord]:
        """The checks of the validator once more, on what was read, and the rest of the fields."""
        records: list[PeerRecord] = []
        for subkey, (value, expires_at_s) in entries.items():
            try:
                record = decode_record(value)
            except RecordError as error:
                logger.debug("ignored what is stored for %s: %s", short_id(subkey), error)
                continue
            is_own_word = record.peer_id == subkey and record.spec_digest == self._spec_digest
            is_in_time = abs(record.expires_at_s - expires_at_s) <= EXPIRY_SLACK_S
            if is_own_word and bucket.holds(subkey) and is_in_time and not self._ignores(record):
                records.append(record)
        return records


def _by_peer(multiaddrs: Sequence[str]) -> dict[str, list[str]]:
    peers: dict[str, list[str]] = {}
    for multiaddr in multiaddrs:
        peers.setdefault(split_peer_id(multiaddr)[1], []).append(multiaddr)
    return peers


async def _forever(name: str, job: Callable[[], Awaitable[float]]) -> None:
    """Run `job` again after the pause that it returns, whatever happens in it."""
    while True:
        try:
            pause_s = await job()
        except DirectoryError as error:
            logger.debug("directory %s: %s", name, error)
            pause_s = 1.0
        except Exception:  # a fault here must not end the membership of a peer that trains well
            logger.exception("directory %s failed; trying again", name)
            pause_s = 5.0
        await asyncio.sleep(pause_s)
