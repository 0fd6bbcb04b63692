"""Enters the DHT and keeps this peer in it by dialling bootstraps and known peers while they are missing.

The pause between two attempts to dial a peer doubles after each failure, up to a limit. Bootstraps are dialled at least
every `every_s`, and the most recently lost peers at least every LONGEST_PAUSE_LOST_S, so that the parts of a divided
swarm find each other again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from noloco_p2p.atomic_file import write_atomically
from noloco_p2p.errors import DirectoryError, Unreachable
from noloco_p2p.identity import short_id
from noloco_p2p.swarm.addresses import CIRCUIT, guarded, host_in, split_peer_id
from noloco_p2p.swarm.clock import CLOCK, Offset, check_clock
from noloco_p2p.swarm.node import SwarmNode

logger = logging.getLogger(__name__)

MAX_PEERS = 64
MAX_ADDRESSES = 4  # per peer
MAX_FILE_BYTES = 256 * 1024
MAX_ADDRESS_CHARS = 320

LONGEST_SLEEP_S = 1.0  # the longest pause between two rounds of dials
DIALLED_AT_ONCE = 8
NUM_DIALS = 2  # connections to each address: `SwarmNode.dial` opens a plain one, and then libp2p opens another
FIRST_PAUSE_S = 1.0
ENOUGH_NEIGHBOURS = 16  # with this many neighbours, only bootstraps and lost peers are dialled
WARN_AFTER_S = 20.0  # without any neighbour; a dead ticket has ended a newcomer by then
LOST_PEERS = 8  # how many of the most recently lost peers are dialled, because they may be alive beyond a partition
LONGEST_PAUSE_LOST_S = 20.0  # short, so that the swarm reunites within half a minute after a partition
LONGEST_PAUSE_REMEMBERED_S = 300.0


class AddressBook:
    """The multiaddrs of known peers, by peer id, in a JSON file. Each multiaddr ends in /p2p/PEER_ID.

    A peer dials these addresses when it restarts, and when it has lost contact with the swarm. The file is only a
    convenience. A damaged or missing file counts as empty, and a file that cannot be written causes only a warning.
    Without a `path`, the book is kept only in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._peers: dict[str, tuple[str, ...]] = {}  # the most recently seen peer is last
        self._changed = False
        if path:
            self._read(path)

    def remember(self, peer_id: str, multiaddrs: Sequence[str]) -> None:
        """Store the addresses of a live peer. If the book is full, the least recently seen peer is removed."""
        addresses = tuple(address for address in multiaddrs if _belongs(address, peer_id))[:MAX_ADDRESSES]
        if not addresses:
            return
        self._changed = self._changed or self._peers.get(peer_id) != addresses
        self._peers.pop(peer_id, None)
        self._peers[peer_id] = addresses
        while len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """Return the addresses by peer id, with the most recently seen peer first."""
        return dict(reversed(self._peers.items()))

    def save(self) -> None:
        """Write the file atomically if the book has changed. This blocks on the disk and never raises an exception."""
        if self._path is None or not self._changed:
            return
        values = {"version": 1, "peers": list(self._peers.items())}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(values).encode())
            self._changed = False
        except OSError as error:
            logger.warning("could not save the addresses of %d peers to %s: %s", len(self._peers), self._path, error)

    def _read(self, path: Path) -> None:
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"{path.stat().st_size} bytes")
            for peer_id, multiaddrs in json.loads(path.read_text(encoding="utf-8"))["peers"][-MAX_PEERS:]:
                self.remember(peer_id, multiaddrs)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("%s cannot be read (%s); starting without remembered peers", path, error)
            self._peers.clear()
        self._changed = False


def _belongs(address: object, peer_id: str) -> bool:
    return (
        isinstance(address, str)
        and len(address) <= MAX_ADDRESS_CHARS
        and address.startswith("/")
        and CIRCUIT not in address  # usable for calls while a relay holds the reservation, but not for entering the DHT
        and address.endswith(f"/p2p/{peer_id}")
    )


@dataclass(slots=True)
class _Attempts:
    failures: int = 0
    next_at_s: float = 0.0
    failed_at_s: float = math.inf
    reason: str = ""


class Dialer:
    """Dials peers, and compares this machine's clock with the clocks of those that answer.

    `bootstraps` has the multiaddrs of each peer that the user or the ticket names. Bootstraps are dialled at least
    every `every_s`.
    """

    def __init__(
        self, node: SwarmNode, bootstraps: Mapping[str, Sequence[str]], book: AddressBook, *, every_s: float
    ) -> None:
        self.has_dialled = asyncio.Event()
        self.offsets: dict[str, Offset] = {}  # of the nodes met before this machine's clock was known to be right
        self._node = node
        self._bootstraps = {peer: tuple(addresses) for peer, addresses in bootstraps.items() if peer != node.peer_id}
        self._given = frozenset(address for addresses in bootstraps.values() for address in addresses)
        self._book = book
        self._every_s = every_s
        self._attempts: dict[str, _Attempts] = {}
        self._lost: frozenset[str] = frozenset()
        self._clock_is_right = self._has_told = False
        self._silent_since_s = time.monotonic()
        self._dial_now = asyncio.Event()

    async def dial(self, heard_of: Collection[str]) -> bool:
        """Dial the peers that are due, and return whether one of them answered.

        `heard_of` has the peers whose records still arrive.
        """
        due = self.due(self._book.addresses(), self._node.neighbours(), heard_of=heard_of, now_s=time.monotonic())
        reached = await asyncio.gather(*(self._dial_one(peer, addresses) for peer, addresses in due.items()))
        self.has_dialled.set()
        if any(reached) or self._node.neighbours():
            self._silent_since_s = time.monotonic()
        if any(reached):
            self._has_told = False
            try:
                self.check_clock()
                self._clock_is_right = True
            except DirectoryError as error:
                logger.warning("%s", error)
        elif not self._node.neighbours():
            self._tell_failures()
            if not self._clock_is_right:
                CLOCK.follow_wall()
        await asyncio.to_thread(self._book.save)
        return any(reached)

    def _tell_failures(self) -> None:
        """Warn once, until a peer answers again, that none of those that this node enters through does."""
        failures, silent_s = self.failures(), time.monotonic() - self._silent_since_s
        if failures and not self._has_told and silent_s >= WARN_AFTER_S:
            self._has_told = True
            logger.warning(
                "none of the peers in the ticket or in --bootstrap answers (%s); trying again until one does. Check "
                "that the addresses are right and reachable, or get a new ticket from a live peer",
                "; ".join(failures.values()),
            )

    async def rest(self) -> None:
        """Wait until other peers may be due."""
        self._dial_now.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._dial_now.wait(), min(self._every_s, LONGEST_SLEEP_S))

    def dial_all_now(self) -> None:
        """Make all peers due for dialling, because this machine's network has just come back."""
        self._attempts.clear()
        self._dial_now.set()

    def check_clock(self) -> None:
        """Raise DirectoryError if the clock of this machine differs from the clocks of the other nodes."""
        check_clock(self.offsets)

    def failures(self) -> dict[str, str]:
        """Return, by peer id, why bootstraps could not be reached on the last attempt."""
        tried = {peer: self._attempts[peer] for peer in self._bootstraps if peer in self._attempts}
        return {peer: attempts.reason for peer, attempts in tried.items() if attempts.failures}

    def due(
        self,
        remembered: Mapping[str, Sequence[str]],
        neighbours: Collection[str],
        *,
        heard_of: Collection[str] = (),
        now_s: float,
    ) -> dict[str, tuple[str, ...]]:
        """Return, by peer id, the addresses of at most DIALLED_AT_ONCE peers that must be dialled now.

        Those that have been due for longest come first, so that each has its turn. Among those that have not been
        dialled, the bootstraps come first, and the others follow in the order of `remembered`. A peer in `neighbours`
        does not count as missing. If there are many neighbours, a peer in `heard_of` does not count as missing either,
        because its records still arrive.
        """
        near = {*neighbours, self._node.peer_id}
        reachable = {*self._bootstraps, *remembered} - near
        self._attempts = {peer: attempts for peer, attempts in self._attempts.items() if peer in reachable}
        has_enough = len(near) > ENOUGH_NEIGHBOURS
        known = {*near, *heard_of, *self._bootstraps} if has_enough else {*near, *self._bootstraps}
        missing = [peer for peer in remembered if peer not in known]
        self._lost = frozenset(missing[:LOST_PEERS])
        targets = [peer for peer in self._bootstraps if peer not in near]
        targets += missing[:LOST_PEERS] if has_enough else missing
        due = sorted((peer for peer in targets if self._next_at_s(peer) <= now_s), key=self._next_at_s)
        return {
            peer: tuple(dict.fromkeys((*self._bootstraps.get(peer, ()), *remembered.get(peer, ()))))
            for peer in due[:DIALLED_AT_ONCE]
        }

    def reached(self, peer_id: str, *, now_s: float) -> None:
        """Record that a peer answered. It is not dialled again for a while, even if it does not become a neighbour."""
        self._attempts[peer_id] = _Attempts(next_at_s=now_s + self._every_s)

    def failed(self, peer_id: str, reason: str, *, now_s: float) -> None:
        attempts = self._attempts.setdefault(peer_id, _Attempts())
        attempts.next_at_s = now_s + FIRST_PAUSE_S * 2.0 ** min(attempts.failures, 30)
        attempts.failed_at_s = now_s
        attempts.failures += 1
        attempts.reason = reason

    def _next_at_s(self, peer_id: str) -> float:
        attempts = self._attempts.get(peer_id)
        if attempts is None:
            return -math.inf
        # The longest pause is computed on each call, because the peer may have become one of the lost peers since.
        longest_s = LONGEST_PAUSE_LOST_S if peer_id in self._lost else LONGEST_PAUSE_REMEMBERED_S
        return min(
            attempts.next_at_s, attempts.failed_at_s + (self._every_s if peer_id in self._bootstraps else longest_s)
        )

    async def _dial_one(self, peer_id: str, multiaddrs: Sequence[str]) -> bool:
        """Dial a peer, and return whether it answered.

        The addresses of the user and of the ticket may be private, unlike those from others.
        """
        ways, faults, guard = [], [], self._node.guard
        try:
            for multiaddr in multiaddrs:
                address, is_given = split_peer_id(multiaddr)[0], multiaddr in self._given
                try:
                    ways.append(await guarded(guard, peer_id, address, num_dials=NUM_DIALS, is_given=is_given))
                except Unreachable as error:
                    faults.append(str(error))
            if not ways:
                why = "; ".join(faults) or "it has no address"
                raise DirectoryError(f"{short_id(peer_id)} was not dialled: {why}")
            offset = await self._node.dial(peer_id, ways)
        except DirectoryError as error:
            logger.debug("%s", error)
            self.failed(peer_id, str(error), now_s=time.monotonic())
            return False
        logger.info("joined the DHT through %s", short_id(peer_id))
        self.reached(peer_id, now_s=time.monotonic())
        # If libp2p was connected before, it dialled none of these addresses, so they may belong to another machine.
        with suppress(DirectoryError):
            for host in {host_in(address) for address in ways} & await self._node.hosts_of(peer_id):
                guard.reached(peer_id, host, num_dials=NUM_DIALS)
        CLOCK.heard(offset.seconds)
        if not self._clock_is_right:
            self.offsets[peer_id] = offset
        self._book.remember(peer_id, multiaddrs)
        return True
