"""The directory of a run: its live peers, from signed records in a DHT that all peers keep together.

    heartbeat   store this peer's record, every 15 s and after changes; others drop it after 60 s. Before that, read
                what is stored under this peer's id, which detects a copied key (`announcer.py`)
    view        read a bucket of records: all of a small run every 5 s, one of many every 10 s; every second at
                first and while no peer is live (`membership_view.py`)
    dial        bootstraps and known peers, repeatedly while they are missing (`dialer.py`)
    freshen     look up a random key every 30 s, which keeps routing tables alive: a bucket of another depth

Nothing here stops the peer: without any other node the directory is up, and empty.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.hosts import is_public
from noloco_p2p.identity import Identity
from noloco_p2p.swarm.address_book import AddressBook
from noloco_p2p.swarm.addresses import any_public, only_public, routable_host, split_peer_id
from noloco_p2p.swarm.announcer import Announcer
from noloco_p2p.swarm.buckets import run_key
from noloco_p2p.swarm.daemon import ListenOn
from noloco_p2p.swarm.dial_back import is_abroad
from noloco_p2p.swarm.dialer import Dialer
from noloco_p2p.swarm.membership_view import Headcount, MembershipView
from noloco_p2p.swarm.node import SwarmNode, end_tasks
from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.swarm.relay import Relay
from noloco_p2p.swarm.timing import Timing

logger = logging.getLogger(__name__)

FAREWELL_S = 4.0  # longer than hivemind waits for one dead neighbour


class SwarmDirectory:
    """Implements `gossip.seams.Directory`. Create it with `start()` on a running loop, end it with `stop()`.

    `describe` returns None until there is something to announce. Without `describe`, a directory of a run only reads,
    and reads all buckets (a monitor, which stays out of routing tables); one without a run is a plain DHT node (a
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
        guard: DialGuard,
        announce_host: str,
        key: str | None = None,
    ) -> None:
        self.guard = guard
        self._announce_host = announce_host
        self._entrances = [addresses[0] for addresses in _by_peer(bootstraps).values()]  # the best address of each
        self._node = node
        self._identity = identity
        self._address_book = address_book
        self._has_run = spec_digest is not None
        self._timing = timing
        self._relay = relay
        view_key = key or run_key(spec_digest or "")
        self._view = MembershipView(
            node,
            identity.peer_id,
            address_book,
            key=view_key,
            spec_digest=spec_digest or "",
            is_monitor=self._has_run and describe is None,
            timing=timing,
            ignores=ignores,
            only_public=guard.only_public,
        )
        self._announcer: Announcer | None = None
        if describe and spec_digest:
            self._announcer = Announcer(
                node,
                identity,
                self._view,
                key=view_key,
                spec_digest=spec_digest,
                describe=describe,
                multiaddrs=self.multiaddrs,
                every_s=timing.heartbeat_s,
                on_copy=on_copy,
            )
        self._dialer = Dialer(
            node,
            _by_peer(bootstraps),
            address_book,
            own_peer_id=identity.peer_id,
            every_s=timing.dial_s,
            heard_of=lambda: {record.peer_id for record, _ in self.records()},
            on_met=self._meet,
            on_wrong_clock=self._view.somebody.set,  # wakes callers that wait for a first peer
            guard=guard,
        )
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
        key: str | None = None,
    ) -> SwarmDirectory:
        """Return when this node is up (seconds, for the import); peers are dialled in the background.

        `on_copy` is called, possibly repeatedly, when a later start with the same key announces itself. Records for
        which `ignores` is true are never seen: those of peers that are not invited, or banned. `relays`: relay calls to
        peers that cannot be dialled, which counts as traffic of this machine. `key`: of the view that is read and
        announced in; None = that of the whole run.

        Raises DirectoryError when the port is taken, the daemon cannot run, or a bootstrap is not an address.
        """
        if describe is not None and spec_digest is None:
            raise ValueError("a peer that describes itself belongs to a run: spec_digest is missing")
        _by_peer(bootstraps)  # report a mistyped address before the slow import
        is_monitor = spec_digest is not None and describe is None
        listen_on = ListenOn(listen_host, listen_port, announce_host, announce_port)
        guard = DialGuard(only_public=is_public(announce_host or routable_host(listen_host)) or any_public(bootstraps))
        node = await SwarmNode.start(identity_path, identity.peer_id, listen_on, is_client=is_monitor, guard=guard)
        relay = Relay(node, only_public=guard.only_public) if relays and not is_monitor else None
        if relay:
            try:
                await relay.start()
            except BaseException:
                await node.stop()
                raise
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
            guard=guard,
            announce_host=announce_host or "",
            key=key,
        )
        directory._run()
        return directory

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def node(self) -> SwarmNode:
        """The node, for streams of other protocols over the same daemon."""
        return self._node

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def port(self) -> int:
        """The TCP port of libp2p, also when 0 was requested."""
        return self._node.port

    @property
    def relayed_bytes(self) -> int:
        """Bytes that this node has relayed between peers that cannot be dialled."""
        return self._relay.passed_bytes if self._relay else 0

    def mirror(self, port: int) -> None:
        """Relayed peers learn at this port of ours from where they are seen."""
        if self._relay:
            self._relay.mirror_port = port

    @property
    def daemon_pid(self) -> int | None:
        """Process id of p2pd; None while it is being restarted."""
        return self._node.daemon_pid

    def live(self) -> Sequence[Candidate]:
        """Peers of the run heard within the TTL and not leaving, without this one. Never waits; thread-safe.

        With many buckets, only those in the two that were drawn last; a monitor gets all that were read.
        """
        return self._view.live()

    def knows(self, peer_id: str) -> bool:
        """Whether a live record of this peer was read, from any bucket. Never waits; thread-safe."""
        return self._view.knows(peer_id)

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        """Find one particular peer, reading its bucket if it is unknown. None when it cannot be found."""
        return await self._view.find(peer_id, timeout_s=timeout_s)

    def headcount(self) -> Headcount:
        """How many other peers are alive. Never waits; thread-safe."""
        return self._view.headcount()

    def records(self) -> list[tuple[PeerRecord, float]]:
        """(record, age in seconds) of the run's peers that were read, including leaving ones, without this one."""
        return self._view.records()

    def read_age_s(self) -> float:
        """Seconds since the directory last answered, or since the start if it never did."""
        return self._view.read_age_s()

    def multiaddrs(self) -> list[str]:
        """Where this node can be dialled, the announced host first; each ends in /p2p/PEER_ID.

        A peer in a swarm on public addresses leaves out those of private networks.
        """
        return only_public(self._node.multiaddrs()) if self.is_abroad() else self._node.multiaddrs()

    def is_abroad(self) -> bool:
        """Whether this is a peer of a swarm on public addresses, where private ones are useless."""
        others = [candidate.address for candidate in self.live()]
        return self._announcer is not None and (is_public(self._announce_host) or is_abroad(self._entrances, others))

    def neighbours(self) -> set[str]:
        """Ids of DHT nodes that answered recently, of any run."""
        return self._node.neighbours()

    def dial_nearby(self, peer_id: str, multiaddrs: Sequence[str]) -> None:
        """Dial a peer at addresses in the local network as well; without addresses, no more."""
        self._dialer.dial_nearby(peer_id, multiaddrs)

    def dial_failures(self) -> dict[str, str]:
        """Bootstraps that could not be reached so far: peer id -> why."""
        return self._dialer.failures()

    async def wait_for_peers(self, timeout_s: float) -> bool:
        """Wait until a live peer of the run is known; False when none was within `timeout_s`.

        Raises DirectoryError when the clock of this machine differs from that of the others.
        """
        self._dialer.check_clock()
        try:
            await asyncio.wait_for(self._view.somebody.wait(), timeout_s)
        except TimeoutError:
            return False
        self._dialer.check_clock()
        return True

    async def wait_until_whole(self, timeout_s: float) -> bool:
        """On a monitor: wait until it has read all buckets of the run; False after a timeout."""
        return await self._view.wait_until_whole(timeout_s)

    async def check_clock(self, timeout_s: float) -> None:
        """Wait until the entrances have been tried once. Raises DirectoryError, as `wait_for_peers` does."""
        await self._dialer.wait_until_tried(timeout_s)
        self._dialer.check_clock()

    async def announce_now(self) -> None:
        """Store this peer's record now, after a change of state. Raises DirectoryError; the next heartbeat retries."""
        if self._announcer:
            await self._announcer.announce()

    async def refresh_now(self) -> None:
        """Read a bucket now (all for a monitor). Raises DirectoryError; the view is then unchanged."""
        if self._has_run:
            await self._view.refresh()

    async def stop(self, *, farewell: bool = True) -> None:
        """Announce leaving (within FAREWELL_S), then end every task and process. Never raises, except for
        cancellation.
        """
        try:
            await end_tasks(self._tasks)
            if farewell and self._announcer:
                await self._announcer.announce("leaving", timeout_s=FAREWELL_S)
        except DirectoryError as error:
            logger.warning("leaving could not be announced to the swarm: %s", error)
        finally:
            await self._node.stop()
            await asyncio.to_thread(self._address_book.save)

    def _run(self) -> None:
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

    async def _freshen(self) -> float:
        if self._has_run:
            await self._view.look_aside()
        else:
            await self._node.get(secrets.token_hex(16))
        return self._timing.freshen_s

    async def _meet(self) -> None:
        """Handle new neighbours: announce this peer to them, and look for the peers that they know."""
        await self.announce_now()
        await self.refresh_now()


def _by_peer(multiaddrs: Sequence[str]) -> dict[str, list[str]]:
    peers: dict[str, list[str]] = {}
    for multiaddr in multiaddrs:
        peers.setdefault(split_peer_id(multiaddr)[1], []).append(multiaddr)
    return peers


async def _forever(name: str, job: Callable[[], Awaitable[float]]) -> None:
    """Run `job` again after the pause that it returns, even after an error."""
    while True:
        try:
            pause_s = await job()
        except DirectoryError as error:
            logger.debug("directory %s: %s", name, error)
            pause_s = 1.0
        except Exception:  # an error here must not end the membership of a peer that trains well
            logger.exception("directory %s failed; trying again", name)
            pause_s = 5.0
        await asyncio.sleep(pause_s)
