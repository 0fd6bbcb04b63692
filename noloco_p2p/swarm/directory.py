"""The directory of a run. It finds live peers through signed records in a DHT that the peers maintain together.

It performs four periodic tasks:

    heartbeat   Store this peer's record every 15 s and after changes; other peers drop it after 60 s. Before storing,
                read the records under this peer's id to detect a copied key.
    view        Read a bucket of records. A small run has a single bucket, which is read every 5 s. In a large run,
                one bucket is read every 10 s. At first, and while no peer is live, the pause is only 1 s.
    dial        Dial bootstraps and known peers, repeatedly while they are missing (`dialer.py`).
    freshen     Look up a random key every 30 s to keep routing tables up to date. A peer or a monitor looks up a bucket
                at another depth instead.

A directory also works without any other node, but it is then empty.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import tempfile
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError, Unreachable
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.hosts import is_public
from noloco_p2p.identity import Identity, short_id
from noloco_p2p.owned_tasks import end_tasks
from noloco_p2p.rates import Rates
from noloco_p2p.swarm.addresses import CIRCUIT, host_of, only_public, routable_host, split_peer_id
from noloco_p2p.swarm.buckets import Bucket, Census, Found, bucket_of, run_key, within_limit
from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.daemon import ListenOn
from noloco_p2p.swarm.dial_back import CLOSED, DialBack, DialBackServer, ask, is_abroad
from noloco_p2p.swarm.dialer import AddressBook, Dialer
from noloco_p2p.swarm.node import CALL_S, SwarmNode
from noloco_p2p.swarm.records import (
    EXPIRY_SLACK_S,
    TTL_S,
    PeerRecord,
    RecordError,
    believable,
    decode_record,
    encode_record,
)
from noloco_p2p.swarm.relay import Relay
from noloco_p2p.ticket import Ticket

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger(__name__)

FAREWELL_S = 4.0  # longer than the time that hivemind waits for one dead neighbour
SILENT_S = 0.4 * TTL_S  # without a successful announcement; the third attempt of a heartbeat ends before half of TTL_S
MAX_NAMED = 200  # peers whose names are kept for `noloco ban`, so that a status fits into a line of the control socket
MEMORY_S = 2 * TTL_S  # how long a sequence number is remembered, so that an old record cannot revive a dead peer
LONGEST_SURVEY_PAUSE_S = 30.0
LOOKS_A_MINUTE = 24  # reads of one bucket because somebody named a peer that is not listed
LOOK_TIMEOUT_S = 20.0
DEAD_AFTER_S = 10.0  # a ticket is dead if no node has answered by then
WHOLE_S = 30.0  # enough time to read all buckets of a large run
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Timing:
    """The pauses of the periodic tasks of a directory. Tests use shorter ones.

    The defaults are the values of the protocol. During the first `quick_for_s` seconds after its start, a node reads
    records every `quick_view_s` seconds.
    """

    heartbeat_s: float = TTL_S / 4
    view_s: float = 5.0
    bucket_view_s: float = 10.0
    quick_view_s: float = 1.0
    quick_for_s: float = 30.0
    dial_s: float = 10.0
    freshen_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Headcount:
    """The number of live peers in a run, excluding this one. It is an estimate if not all of them were read."""

    others: int
    is_estimate: bool


class SwarmDirectory:
    """An implementation of `gossip.seams.Directory` on top of a DHT node, and all that this node knows of a run.

    Create it on a running event loop, `start()` it, and end it with `stop()`. `describe` returns this peer's record, or
    None while there is nothing to announce. A directory without `describe` belongs to a monitor, which announces
    nothing, reads all buckets, and stays out of routing tables. A directory without `spec_digest` belongs to a
    bootstrap, which is a plain DHT node.

    `on_copy` is called, possibly repeatedly, when another process with the same identity key announces itself. Records
    for which `ignores` returns true are dropped, such as the records of peers that are banned or not invited. If
    `relays` is true, this node relays calls to peers that cannot be dialled, and the relayed bytes count as traffic of
    this machine. `own_addresses` returns the gRPC addresses of this peer. Raises DirectoryError if a bootstrap is not a
    valid address.

    `node` is the DHT node, which can also open streams of other protocols. `relay` is None if this node does not relay.
    `live`, `knows`, `stage_of`, `records` and `headcount` are thread-safe and do not wait.
    """

    def __init__(
        self,
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
        own_addresses: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        if describe is not None and spec_digest is None:
            raise ValueError("spec_digest is required for a directory that announces a peer")
        self.identity = identity
        self.peer_id = identity.peer_id
        doors: dict[str, list[str]] = {}
        for multiaddr in bootstraps:
            doors.setdefault(split_peer_id(multiaddr)[1], []).append(multiaddr)
        # peer id -> the first address of each bootstrap, because it is the best one
        self.entrances = {peer: addresses[0] for peer, addresses in doors.items()}
        self._announce_host = announce_host or ""
        self._book = address_book or AddressBook()
        self._spec_digest = spec_digest or ""
        self._key = run_key(self._spec_digest)
        self._is_monitor = bool(spec_digest) and describe is None
        self._describe = describe
        self._timing = timing or Timing()
        self._on_copy = on_copy
        self._ignores = ignores
        self._own_addresses = own_addresses
        self.node = SwarmNode(
            identity_path,
            identity.peer_id,
            ListenOn(listen_host, listen_port, announce_host, announce_port),
            is_client=self._is_monitor,
            guard=DialGuard(
                only_public=is_public(announce_host or routable_host(listen_host)) or bool(only_public(bootstraps))
            ),
        )
        self.relay = Relay(self.node) if relays and not self._is_monitor else None
        self.dialer = Dialer(self.node, doors, self._book, every_s=self._timing.dial_s)
        self._census = Census(self._read, own_peer_id=self.peer_id, reads_all=self._is_monitor)
        # peer id -> its newest record, and the monotonic time at which it was made, as far as this machine can tell.
        # This is copied on write, so that any thread may read it while the network thread changes it.
        self._known: dict[str, tuple[PeerRecord, float]] = {}
        self._names: dict[str, str] = {}  # of the peers that were seen last, the newest last; copied on write, too
        self._looks = Rates.a_minute(LOOKS_A_MINUTE)
        self._somebody = asyncio.Event()  # set while a live peer is known, or if the clock of this machine is wrong
        self._survey_at_s, self._survey_pause_s = 0.0, self._timing.quick_view_s
        self.fault = ""  # why this peer cannot announce itself, if it has failed for SILENT_S
        self._started_at_s = self._read_at_s = self._announced_at_s = time.monotonic()
        self._announcing = asyncio.Lock()
        self._sequence, self._expires_at_s = 0, 0.0  # of the last record that was announced
        self._copies: dict[str, int] = {}  # session key of another process -> the first sequence number that was read
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Self:
        """Start the node, and return this directory when it is up. Peers are dialled in the background.

        The first start in a process takes several seconds, because it imports hivemind. Raises DirectoryError if the
        port is taken or the daemon cannot run.
        """
        await self.node.start()
        try:
            if self.relay:
                await self.relay.start()
            if not self._is_monitor:
                await DialBackServer(self.node).start()
        except BaseException:
            await self.node.stop()
            raise
        self.node.on_restart = self.dialer.dial_all_now
        jobs = {"dial": self._dial, "freshen": self._freshen}
        if self._describe:
            jobs["heartbeat"] = self._beat
        if self._spec_digest:
            jobs["view"] = self._look
        self._tasks = [asyncio.create_task(_forever(*job), name=f"directory {job[0]}") for job in jobs.items()]
        return self

    async def stop(self, *, farewell: bool = True) -> None:
        """End all tasks and processes, after `say_farewell` unless `farewell` is false.

        This method raises no exception unless it is cancelled.
        """
        try:
            await end_tasks(self._tasks)
            if farewell:
                await self.say_farewell()
        finally:
            await self.node.stop()
            await asyncio.to_thread(self._book.save)

    async def say_farewell(self) -> None:
        """Announce within FAREWELL_S that this peer is leaving, and end all periodic tasks."""
        await end_tasks(self._tasks)
        try:
            await self.announce_now("leaving", timeout_s=FAREWELL_S)
        except DirectoryError as error:
            logger.warning("could not announce to the swarm that this peer is leaving: %s", error)

    # what is known

    def records(self) -> list[tuple[PeerRecord, float]]:
        """Return (record, age in seconds) for each other peer that was seen within the TTL, including leaving peers."""
        now_s = time.monotonic()
        aged = [(record, max(0.0, now_s - made_at_s)) for record, made_at_s in self._known.values()]
        return [(record, age_s) for record, age_s in aged if age_s <= TTL_S]

    def live(self) -> Sequence[Candidate]:
        """Return the other peers of the run that were seen within the TTL and are not leaving.

        In a large run, only the peers in the two buckets that were drawn last are returned. A monitor gets all peers
        that were read.
        """
        drawn = None if self._is_monitor or self._census.depth == 0 else self._census.drawn()
        return [
            _candidate(record)
            for record, _ in self.records()
            if record.state != "leaving" and (drawn is None or record.peer_id in drawn)
        ]

    def names(self) -> list[tuple[str, str]]:
        """Return the ids and names of the MAX_NAMED peers that were seen last, even if they are gone, newest first."""
        return [*reversed(self._names.items())]

    def record_of(self, peer_id: str) -> PeerRecord | None:
        """Return the record of a peer that was read from any bucket within the TTL, even of one that is leaving."""
        record, made_at_s = self._known.get(peer_id, (None, 0.0))
        return record if time.monotonic() - made_at_s <= TTL_S else None

    def knows(self, peer_id: str) -> bool:
        """Return whether a live record of a peer was read from any bucket."""
        record = self.record_of(peer_id)
        return record is not None and record.state != "leaving"

    def headcount(self) -> Headcount:
        """Return the number of other live peers."""
        census, num_known = self._census, len(self.live())
        if census.depth == 0 or (self._is_monitor and census.whole_depth == census.depth):
            return Headcount(num_known, is_estimate=False)
        return Headcount(max(num_known, round(census.size) - (not self._is_monitor)), is_estimate=True)

    def read_age_s(self) -> float:
        """Return the number of seconds since the DHT last answered, or since the start if it has never answered."""
        return time.monotonic() - self._read_at_s

    def multiaddrs(self) -> list[str]:
        """Return the multiaddrs at which this node can be dialled, with the announced host first.

        Each multiaddr ends in /p2p/PEER_ID. A peer in a swarm on public addresses leaves out private addresses.
        """
        return only_public(self.node.multiaddrs()) if self.is_abroad() else self.node.multiaddrs()

    def is_abroad(self) -> bool:
        """Return whether this is a peer in a swarm on public addresses, where private addresses are useless."""
        others = [candidate.address for candidate in self.live()]
        return self._describe is not None and (
            is_public(self._announce_host) or is_abroad(self.entrances.values(), others)
        )

    # finding peers

    async def wait_for_peers(self, timeout_s: float) -> bool:
        """Wait until a live peer of the run is known. Returns False if there is none within `timeout_s`.

        Raises DirectoryError if the clock of this machine differs from the clocks of the other nodes.
        """
        self.dialer.check_clock()
        try:
            await asyncio.wait_for(self._somebody.wait(), timeout_s)
        except TimeoutError:
            return False
        self.dialer.check_clock()
        return True

    async def wait_until_whole(self, timeout_s: float) -> bool:
        """Wait until a monitor has read all buckets of the run. Returns False after a timeout."""
        until_s = time.monotonic() + timeout_s
        while self._census.whole_depth != self._census.depth:
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def check_clock(self, timeout_s: float) -> None:
        """Wait until the bootstraps have been dialled once, then check the clock of this machine.

        Raises DirectoryError if this clock differs from the clocks of the other nodes.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self.dialer.has_dialled.wait(), timeout_s)
        self.dialer.check_clock()

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        """Find a peer, and read its bucket if the peer is not known yet. Returns None if the peer cannot be found."""
        if not self.knows(peer_id):
            with suppress(DirectoryError):
                await self._read(self._buckets_of(peer_id), timeout_s=timeout_s)
        record = self.record_of(peer_id)
        return _candidate(record) if record and record.state != "leaving" else None

    async def look_for(self, peer_id: str, *, timeout_s: float) -> None:
        """Read the buckets of a peer now, but each bucket only a few times a minute, because strangers invent names.

        A read brings the records of all peers in its bucket, so this limit delays no peer for long.
        """
        due = [bucket for bucket in self._buckets_of(peer_id) if self._looks.take(bucket.key(self._key))]
        with suppress(DirectoryError):
            if due:
                await self._read(due, timeout_s=timeout_s)

    async def refresh_now(self) -> None:
        """Read a bucket now, or all buckets on a monitor.

        Raises DirectoryError if the DHT does not answer. What is known then stays unchanged.
        """
        if self._spec_digest:
            await self._census.refresh()

    async def ask_to_dial(self, peer_id: str, ports: Sequence[int]) -> DialBack:
        """Ask a live peer or a bootstrap to dial back to `ports` on this machine. Raises DirectoryError."""
        record = self.record_of(peer_id)
        told = (*(record.multiaddrs if record else ()), self.entrances.get(peer_id, ""))
        ways = [way for way in told if way and CIRCUIT not in way]
        return await ask(self.node, peer_id, ports, at=split_peer_id(ways[0])[0] if ways else "")

    # the periodic tasks; each returns the seconds until its next run

    async def _dial(self) -> float:
        if await self.dialer.dial({record.peer_id for record, _ in self.records()}):
            try:
                self.dialer.check_clock()
            except DirectoryError:
                self._somebody.set()  # wakes `wait_for_peers`, which raises this error
            await self.announce_now()  # to the new neighbours
            await self.refresh_now()  # the peers that they know
        await self.dialer.rest()
        return 0.0

    async def _freshen(self) -> float:
        if self._spec_digest:
            await self._census.look_aside()
        else:
            await self.node.get(secrets.token_hex(16))
        return self._timing.freshen_s

    async def _look(self) -> float:
        """Refresh the view, and probe another depth if needed."""
        timing, now_s = self._timing, time.monotonic()
        await self._census.refresh()
        is_young = now_s - self._started_at_s < timing.quick_for_s
        if not self.live() and self.node.neighbours() and now_s >= self._survey_at_s:
            self._survey_at_s = now_s + self._survey_pause_s
            self._survey_pause_s = min(2 * self._survey_pause_s, LONGEST_SURVEY_PAUSE_S)
            await self._census.survey()
        elif is_young:
            await self._census.look_aside()
        if is_young or not self.live():
            return timing.quick_view_s
        return timing.bucket_view_s if self._census.depth else timing.view_s

    async def _beat(self) -> float:
        """Check that the records stored under this peer's id are its own, and announce the record."""
        assert self._describe
        with suppress(DirectoryError):
            if own := self._describe():
                buckets = [bucket_of(self.peer_id, depth) for depth in self._census.depths()]
                stored = await self._get(buckets, timeout_s=self._timing.heartbeat_s)
                for bucket, entries in zip(buckets, stored, strict=True):
                    only_own = {key: value for key, value in entries.items() if key == self.peer_id}
                    for found in self._readable(bucket, only_own):
                        if is_copy(own, found, self._copies):
                            self._on_copy(found)
        try:
            await self.announce_now()
        except Exception as error:
            silent_s = time.monotonic() - self._announced_at_s
            if silent_s > SILENT_S and not self.fault:
                self.fault = f"this peer has not been able to announce itself for {silent_s:.0f} s: {error}"
                logger.warning("%s; others will take it for gone, unless this succeeds", self.fault)
            raise
        return self._timing.heartbeat_s

    # announcing

    async def announce_now(self, state: str | None = None, *, timeout_s: float | None = None) -> None:
        """Store this peer's record now, for example after a change. If `state` is given, it replaces the state.

        Raises DirectoryError if the record cannot be stored in one of its buckets. The next heartbeat tries again.
        """
        async with self._announcing:
            described = self._describe() if self._describe else None
            if described is None:
                return  # nothing to announce yet
            # Both numbers increase across restarts, and DHT nodes keep the record that expires last. If the clock was
            # far ahead before, no node would accept an even later expiry.
            now_s, depths = CLOCK.now(), self._census.depths()
            self._sequence = max(self._sequence + 1, int(now_s * 1000))
            is_usual = self._expires_at_s <= now_s + 2 * TTL_S
            self._expires_at_s = max(now_s + TTL_S, self._expires_at_s + EXPIRY_SLACK_S if is_usual else 0.0)
            record = replace(
                described,
                depths=() if depths == (0,) else depths,
                multiaddrs=tuple(described.multiaddrs or self.multiaddrs()),
                state=state or described.state,
                sequence=self._sequence,
                expires_at_s=self._expires_at_s,
            )
            value, timeout_s = encode_record(record, self.identity), timeout_s or self._timing.heartbeat_s
            keys = [bucket_of(self.peer_id, depth).key(self._key) for depth in depths]
            stores = [
                self.node.store(key, self.peer_id, value, expires_at_s=record.expires_at_s, timeout_s=timeout_s)
                for key in keys
            ]
            # A failure must not prevent the other buckets from being tried.
            for fault in filter(None, await asyncio.gather(*stores, return_exceptions=True)):
                raise fault
            self._announced_at_s, self.fault = time.monotonic(), ""

    # reading

    def _buckets_of(self, peer_id: str) -> list[Bucket]:
        return [bucket_of(peer_id, depth) for depth in self._census.read_at]

    async def _read(self, buckets: Sequence[Bucket], *, timeout_s: float = CALL_S) -> list[Found]:
        """Read buckets in parallel, and keep what is new. Returns an empty list if there is no node to ask.

        Raises DirectoryError if the DHT does not answer.
        """
        found = await self._get(buckets, timeout_s=timeout_s)
        if not any(found) and not self.node.neighbours():
            return []
        self._read_at_s, rng = time.monotonic(), random.SystemRandom()
        reads = []
        for bucket, entries in zip(buckets, found, strict=True):
            some = within_limit(entries, rng)
            records = self._readable(bucket, some)
            self._merge(records)
            live = {record.peer_id: record.depths or (0,) for record in records if record.state != "leaving"}
            reads.append(Found(live, len(some) / len(entries) if entries else 1.0))
        if self.live():
            self._somebody.set()
        else:
            self._somebody.clear()
        return reads

    async def _get(self, buckets: Sequence[Bucket], *, timeout_s: float) -> list[dict[str, tuple[bytes, float]]]:
        keys = [bucket.key(self._key) for bucket in buckets]
        return await asyncio.gather(*(self.node.get(key, timeout_s=timeout_s) for key in keys))

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
                records.append(believable(record, is_outside=self.node.guard.only_public, own=own))
        return records

    def _merge(self, records: Iterable[PeerRecord]) -> None:
        """Keep the records that are new.

        Expired records and records with older sequence numbers are ignored. A record that is read again does not become
        younger, so nobody can keep a dead peer alive by replaying its last record. Ages are measured with a monotonic
        clock. The expiry in a record is in DHT time, because another machine has set it.
        """
        now_s, dht_now_s = time.monotonic(), CLOCK.now()
        known = {peer: each for peer, each in self._known.items() if now_s - each[1] <= MEMORY_S}
        names = dict(self._names)
        for record in records:
            remaining_s, before = record.expires_at_s - dht_now_s, known.get(record.peer_id)
            if record.peer_id == self.peer_id or not 0 < remaining_s <= 2 * TTL_S:
                continue
            if before is None or record.sequence > before[0].sequence:
                known[record.peer_id] = record, now_s - max(0.0, TTL_S - remaining_s)
                self._book.remember(record.peer_id, record.multiaddrs)
                names.pop(record.peer_id, None)
                names[record.peer_id] = record.name
        self._known, self._names = known, dict([*names.items()][-MAX_NAMED:])


def _candidate(record: PeerRecord) -> Candidate:
    try:
        key = b64decode(record.session_key, validate=True)
    except ValueError:  # the error is reported when the peer is dialled
        key = b""
    address = record.addresses[0] if record.addresses else ""
    nearby = [each for each in record.addresses if host_of(each) != host_of(address)]  # see `records.believable`
    return Candidate(
        record.peer_id,
        address,
        record.state,
        record.metrics.progress,
        session_key=key,
        can_be_called=bool(address) and record.reachability not in CLOSED,
        stage=record.stage,
        capacity=record.metrics.capacity,
        loss=record.metrics.loss,
        name=record.name,
        nearby=nearby[0] if nearby else "",
    )


def is_copy(own: PeerRecord, found: PeerRecord, heard: dict[str, int]) -> bool:
    """Return whether another live process uses the same key as this one.

    `own` is the record that this process announces, and `found` is a record that was read under its peer id. A record
    outlives its process. So of an earlier process, only a record from after the start of this one counts, and one is
    enough: that process stops soon, and says no more. (After a clock was set back, this can be a false alarm, but it
    stops nobody.) A later process makes this one stop, so it must have announced two records; `heard` keeps the first.
    """
    if found.peer_id != own.peer_id or found.session_key == own.session_key or found.state == "leaving":
        return False
    if found.start < own.start:
        return found.sequence > own.started_at_ms
    if len(heard) > 16:
        heard.clear()
    return found.sequence > heard.setdefault(found.session_key, found.sequence)


async def _forever(name: str, job: Callable[[], Awaitable[float]]) -> None:
    """Run `job` repeatedly, even after errors. `job` returns the seconds to wait before its next run."""
    while True:
        try:
            pause_s = await job()
        except DirectoryError as error:
            logger.debug("the directory task %s failed: %s", name, error)
            pause_s = 1.0
        except Exception:  # a bug here must not end the membership of a peer that is training
            logger.exception("the directory task %s failed; trying again", name)
            pause_s = 5.0
        await asyncio.sleep(pause_s)


# reading a swarm from outside


@asynccontextmanager
async def reader(ticket: Ticket) -> AsyncIterator[SwarmDirectory]:
    """Yield a directory of the ticket's run, on a node with a temporary identity. It leaves nothing behind."""
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
    """Wait for a live peer of the run. Raises Unreachable if there is none within `timeout_s`, or if no node at all
    answers within DEAD_AFTER_S.
    """
    if await directory.wait_for_peers(DEAD_AFTER_S):
        return
    found_none = f"no live peer of run {ticket.run_name} was found within"
    if not directory.node.neighbours():
        failures = "; ".join(directory.dialer.failures().values()) or "it has no addresses"
        advice = leads_to_itself(ticket, directory.peer_id) or "ask for a new ticket"
        raise Unreachable(f"{advice}: {found_none} {DEAD_AFTER_S:.0f} s ({failures})")
    if not await directory.wait_for_peers(timeout_s - DEAD_AFTER_S):
        silence = "a node answers, but no peer has announced itself, as scripts do when they create their NoLoCo"
        raise Unreachable(f"{found_none} {timeout_s:.0f} s; {leads_to_itself(ticket, directory.peer_id) or silence}")


def leads_to_itself(ticket: Ticket, peer_id: str) -> str:
    """Return why a ticket is of no use to this peer if it has no other address than this peer's own, or else ""."""
    if {split_peer_id(address)[1] for address in ticket.addresses} != {peer_id}:
        return ""
    return (
        f"the ticket leads only to this peer itself, as both have the id {peer_id}. If another machine printed it, the "
        "two use copies of one state folder: move identity.key away on this one, and run `noloco id` to create a new "
        "key. To restart the run here, use its spec instead of a ticket"
    )
