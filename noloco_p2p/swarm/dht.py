"""The directory of a run. It finds live peers through signed records in a DHT that the peers maintain together.

It performs four periodic tasks:

    heartbeat   Store this peer's record every 15 s and after changes; other peers drop it after 60 s. Before storing,
                read the records under this peer's id to detect a copied key (`announcer.py`).
    view        Read a bucket of records. A small run has a single bucket, which is read every 5 s. In a large run,
                one bucket is read every 10 s. At first, and while no peer is live, the pause is only 1 s
                (`membership_view.py`).
    dial        Dial bootstraps and known peers, repeatedly while they are missing (`dialer.py`).
    freshen     Look up a random key every 30 s to keep routing tables up to date. A peer or a monitor looks up a bucket
                at another depth instead.

A directory also works without any other node, but it is then empty.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.hosts import is_public
from noloco_p2p.identity import Identity
from noloco_p2p.swarm.address_book import CIRCUIT, AddressBook
from noloco_p2p.swarm.addresses import any_public, only_public, routable_host, split_peer_id
from noloco_p2p.swarm.announcer import Announcer
from noloco_p2p.swarm.clock import Offset
from noloco_p2p.swarm.daemon import ListenOn
from noloco_p2p.swarm.dial_back import DialBack, DialBackServer, ask, is_abroad
from noloco_p2p.swarm.dialer import Dialer
from noloco_p2p.swarm.membership_view import Headcount, MembershipView
from noloco_p2p.swarm.node import SwarmNode, end_tasks
from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.swarm.relay import Relay
from noloco_p2p.swarm.timing import Timing

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger(__name__)

FAREWELL_S = 4.0  # longer than the time that hivemind waits for one dead neighbour


class SwarmDirectory:
    """An implementation of `gossip.seams.Directory` on top of a DHT node.

    Create it on a running event loop, `start()` it, and end it with `stop()`. `describe` returns this peer's record, or
    None while there is nothing to announce. A directory without `describe` belongs to a monitor, which announces
    nothing, reads all buckets, and stays out of routing tables. A directory without `spec_digest` belongs to a
    bootstrap, which is a plain DHT node.

    `on_copy` is called, possibly repeatedly, when a process that was started later with the same identity key announces
    itself. Records for which `ignores` returns true are dropped, such as the records of peers that are banned or not
    invited. If `relays` is true, this node relays calls to peers that cannot be dialled, and the relayed bytes count as
    traffic of this machine. `own_addresses` returns the gRPC addresses of this peer. Raises DirectoryError if a
    bootstrap is not a valid address.
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
        self._identity = identity
        self._announce_host = announce_host or ""
        self._address_book = book = address_book or AddressBook()
        self._has_run = spec_digest is not None
        self._is_monitor = self._has_run and describe is None
        self._timing = timing = timing or Timing()
        doors = _by_peer(bootstraps)
        # peer id -> the first address of each bootstrap, because it is the best one
        self.entrances = {peer: addresses[0] for peer, addresses in doors.items()}
        self._node = node = SwarmNode(
            identity_path,
            identity.peer_id,
            ListenOn(listen_host, listen_port, announce_host, announce_port),
            is_client=self._is_monitor,
            guard=DialGuard(
                only_public=is_public(announce_host or routable_host(listen_host)) or any_public(bootstraps)
            ),
        )
        self._relay = Relay(node) if relays and not self._is_monitor else None
        self._view = MembershipView(
            node,
            identity.peer_id,
            book,
            spec_digest=spec_digest or "",
            is_monitor=self._is_monitor,
            timing=timing,
            ignores=ignores,
            own_addresses=own_addresses,
        )
        self._announcer: Announcer | None = None
        if describe and spec_digest:
            self._announcer = Announcer(
                node,
                identity,
                self._view,
                spec_digest=spec_digest,
                describe=describe,
                multiaddrs=self.multiaddrs,
                every_s=timing.heartbeat_s,
                on_copy=on_copy,
            )
        self._dialer = Dialer(
            node,
            doors,
            book,
            every_s=timing.dial_s,
            heard_of=lambda: {record.peer_id for record, _ in self.records()},
            on_met=self._meet,
            on_wrong_clock=self._view.somebody.set,  # wakes callers that wait for a first peer
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Self:
        """Start the node, and return this directory when it is up. Peers are dialled in the background.

        The first start in a process takes several seconds, because it imports hivemind. Raises DirectoryError if the
        port is taken or the daemon cannot run.
        """
        await self._node.start()
        try:
            if self._relay:
                await self._relay.start()
            if not self._is_monitor:
                await DialBackServer(self._node).start()
        except BaseException:
            await self._node.stop()
            raise
        self._node.on_restart = self._dialer.dial_all_now
        jobs: list[tuple[str, Callable[[], Awaitable[float]]]] = [
            ("dial", self._dialer.dial),
            ("freshen", self._freshen),
        ]
        if self._announcer:
            jobs.append(("heartbeat", self._announcer.beat))
        if self._has_run:
            jobs.append(("view", self._view.look))
        self._tasks = [asyncio.create_task(_forever(name, job), name=f"directory {name}") for name, job in jobs]
        return self

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def node(self) -> SwarmNode:
        """The DHT node, which can also open streams of other protocols over the same daemon."""
        return self._node

    @property
    def guard(self) -> DialGuard:
        return self._node.guard

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def port(self) -> int:
        """The TCP port of libp2p. If port 0 was requested, this is the port that the system chose."""
        return self._node.port

    @property
    def relayed_bytes(self) -> int:
        """The number of bytes that this node has relayed for peers that cannot be dialled."""
        return self._relay.passed_bytes if self._relay else 0

    def mirror(self, port: int) -> None:
        """Set the port on which this node tells relayed peers their external addresses."""
        if self._relay:
            self._relay.mirror_port = port

    @property
    def daemon_pid(self) -> int | None:
        """The process id of p2pd, or None while it is being restarted."""
        return self._node.daemon_pid

    def live(self) -> Sequence[Candidate]:
        """Return the other peers of the run that were seen within the TTL and are not leaving.

        In a large run, only the peers in the two buckets that were drawn last are returned. A monitor gets all peers
        that were read. This method is thread-safe and does not wait.
        """
        return self._view.live()

    def knows(self, peer_id: str) -> bool:
        """Return whether a live record of a peer was read from any bucket.

        This method is thread-safe and does not wait.
        """
        return self._view.knows(peer_id)

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        """Find a peer, and read its bucket if the peer is not known yet. Returns None if the peer cannot be found."""
        return await self._view.find(peer_id, timeout_s=timeout_s)

    def stage_of(self, peer_id: str) -> int | None:
        """Return the stage of a peer with a record, or None for any other name. It is thread-safe and does not wait."""
        return self._view.stage_of(peer_id)

    async def look_for(self, peer_id: str, *, timeout_s: float) -> None:
        """Read the record of a peer again, unless its bucket was read too often because of such requests."""
        await self._view.look_for(peer_id, timeout_s=timeout_s)

    def headcount(self) -> Headcount:
        """Return the number of other live peers. This method is thread-safe and does not wait."""
        return self._view.headcount()

    def records(self) -> list[tuple[PeerRecord, float]]:
        """Return (record, age in seconds) for each other peer whose record was read, including leaving peers."""
        return self._view.records()

    def read_age_s(self) -> float:
        """Return the number of seconds since the DHT last answered, or since the start if it has never answered."""
        return self._view.read_age_s()

    def multiaddrs(self) -> list[str]:
        """Return the multiaddrs at which this node can be dialled, with the announced host first.

        Each multiaddr ends in /p2p/PEER_ID. A peer in a swarm on public addresses leaves out private addresses.
        """
        return only_public(self._node.multiaddrs()) if self.is_abroad() else self._node.multiaddrs()

    def is_abroad(self) -> bool:
        """Return whether this is a peer in a swarm on public addresses, where private addresses are useless."""
        others = [candidate.address for candidate in self.live()]
        return self._announcer is not None and (
            is_public(self._announce_host) or is_abroad(self.entrances.values(), others)
        )

    def neighbours(self) -> set[str]:
        """Return the peer ids of DHT nodes that answered recently. These nodes can belong to any run."""
        return self._node.neighbours()

    async def ask_to_dial(self, peer_id: str, ports: Sequence[int]) -> DialBack:
        """Ask a live peer or a bootstrap to dial back to `ports` on this machine. Raises DirectoryError."""
        known = {record.peer_id: record.multiaddrs for record, _ in self.records()}
        ways = [way for way in (*known.get(peer_id, ()), self.entrances.get(peer_id, "")) if way and CIRCUIT not in way]
        return await ask(self._node, peer_id, ports, at=split_peer_id(ways[0])[0] if ways else "")

    def clock_offsets(self) -> Mapping[str, Offset]:
        """Return, by peer id, the clock offsets of the nodes that this one met first."""
        return self._dialer.offsets

    def dial_failures(self) -> dict[str, str]:
        """Return, by peer id, why bootstraps could not be reached on the last attempt."""
        return self._dialer.failures()

    async def wait_for_peers(self, timeout_s: float) -> bool:
        """Wait until a live peer of the run is known. Returns False if there is none within `timeout_s`.

        Raises DirectoryError if the clock of this machine differs from the clocks of the other nodes.
        """
        self._dialer.check_clock()
        try:
            await asyncio.wait_for(self._view.somebody.wait(), timeout_s)
        except TimeoutError:
            return False
        self._dialer.check_clock()
        return True

    async def wait_until_whole(self, timeout_s: float) -> bool:
        """Wait until a monitor has read all buckets of the run. Returns False after a timeout."""
        return await self._view.wait_until_whole(timeout_s)

    async def check_clock(self, timeout_s: float) -> None:
        """Wait until the bootstraps have been dialled once, then check the clock of this machine.

        Raises DirectoryError if this clock differs from the clocks of the other nodes.
        """
        await self._dialer.wait_until_tried(timeout_s)
        self._dialer.check_clock()

    async def announce_now(self) -> None:
        """Store this peer's record now, for example after a change of state.

        Raises DirectoryError if the record cannot be stored. The next heartbeat tries again.
        """
        if self._announcer:
            await self._announcer.announce()

    async def refresh_now(self) -> None:
        """Read a bucket now, or all buckets on a monitor.

        Raises DirectoryError if the DHT does not answer. The view then stays unchanged.
        """
        if self._has_run:
            await self._view.refresh()

    async def stop(self, *, farewell: bool = True) -> None:
        """End all tasks and processes, after `say_farewell` unless `farewell` is false.

        This method raises no exception unless it is cancelled.
        """
        try:
            await end_tasks(self._tasks)
            if farewell:
                await self.say_farewell()
        finally:
            await self._node.stop()
            await asyncio.to_thread(self._address_book.save)

    async def say_farewell(self) -> None:
        """Announce within FAREWELL_S that this peer is leaving, and end all periodic tasks."""
        await end_tasks(self._tasks)
        try:
            if self._announcer:
                await self._announcer.announce("leaving", timeout_s=FAREWELL_S)
        except DirectoryError as error:
            logger.warning("could not announce to the swarm that this peer is leaving: %s", error)

    async def _freshen(self) -> float:
        if self._has_run:
            await self._view.look_aside()
        else:
            await self._node.get(secrets.token_hex(16))
        return self._timing.freshen_s

    async def _meet(self) -> None:
        """Announce this peer to new neighbours, and look for the peers that they know."""
        await self.announce_now()
        await self.refresh_now()


def _by_peer(multiaddrs: Sequence[str]) -> dict[str, list[str]]:
    peers: dict[str, list[str]] = {}
    for multiaddr in multiaddrs:
        peers.setdefault(split_peer_id(multiaddr)[1], []).append(multiaddr)
    return peers


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
