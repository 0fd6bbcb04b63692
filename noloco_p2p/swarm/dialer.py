"""Enters the DHT and keeps this peer in it by dialling bootstraps and known peers while they are missing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from noloco_p2p.errors import DirectoryError, Unreachable
from noloco_p2p.identity import short_id
from noloco_p2p.swarm.address_book import AddressBook
from noloco_p2p.swarm.addresses import guarded, host_in, split_peer_id
from noloco_p2p.swarm.clock import CLOCK, Offset, check_clock
from noloco_p2p.swarm.dial_plan import DialPlan
from noloco_p2p.swarm.node import SwarmNode

logger = logging.getLogger(__name__)

LONGEST_SLEEP_S = 1.0  # the longest pause between two checks of the plan
NUM_DIALS = 2  # connections to each address: `SwarmNode.dial` opens a plain one, and then libp2p opens another


class Dialer:
    """Carries out a `DialPlan`, and compares this machine's clock with the clocks of the peers that answer.

    `heard_of` returns the peers whose records still arrive. `on_met` is awaited when a peer has answered.
    `on_wrong_clock` is called when this machine's clock differs from the clocks of the other nodes; `check_clock` then
    raises an error.
    """

    def __init__(
        self,
        node: SwarmNode,
        bootstraps: Mapping[str, Sequence[str]],
        address_book: AddressBook,
        *,
        every_s: float,
        heard_of: Callable[[], Iterable[str]],
        on_met: Callable[[], Awaitable[None]],
        on_wrong_clock: Callable[[], None],
    ) -> None:
        self._guard = node.guard
        self._given = frozenset(address for addresses in bootstraps.values() for address in addresses)
        self._node = node
        self._plan = DialPlan(node.peer_id, bootstraps, longest_pause_s=every_s)
        self._address_book = address_book
        self._sleep_s = min(every_s, LONGEST_SLEEP_S)
        self._heard_of = heard_of
        self._on_met = on_met
        self._on_wrong_clock = on_wrong_clock
        self._dial_now = asyncio.Event()
        self._has_dialled = asyncio.Event()
        self.offsets: dict[str, Offset] = {}  # of the nodes met before this machine's clock was known to be right
        self._clock_is_right = False

    async def dial(self) -> float:
        """Dial the peers that are due, then wait until others may be due. Returns 0, because this method has already
        waited.
        """
        book, near = self._address_book.addresses(), self._node.neighbours()
        due = self._plan.due(book, near, heard_of=self._heard_of(), now_s=time.monotonic())
        reached = await asyncio.gather(*(self._dial_one(peer, addresses) for peer, addresses in due.items()))
        self._has_dialled.set()
        if any(reached):
            self._look_at_clocks()
            await self._on_met()
        if not self._clock_is_right and not self._node.neighbours():
            CLOCK.follow_wall()
        await asyncio.to_thread(self._address_book.save)
        self._dial_now.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._dial_now.wait(), self._sleep_s)
        return 0.0

    def dial_all_now(self) -> None:
        """Dial all peers now, because this machine's network has just come back."""
        self._plan.forget_failures()
        self._dial_now.set()

    def failures(self) -> dict[str, str]:
        """Return, by peer id, why bootstraps could not be reached on the last attempt."""
        return self._plan.failures()

    def check_clock(self) -> None:
        """Raise DirectoryError if the clock of this machine differs from the clocks of the other nodes."""
        check_clock(self.offsets)

    async def wait_until_tried(self, timeout_s: float) -> None:
        """Wait until the bootstraps have been dialled once, for at most `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_dialled.wait(), timeout_s)

    async def _dial_one(self, peer_id: str, multiaddrs: Sequence[str]) -> bool:
        try:
            ways = await self._ways(peer_id, multiaddrs)
            offset = await self._node.dial(peer_id, ways)
        except DirectoryError as error:
            logger.debug("%s", error)
            self._plan.failed(peer_id, str(error), now_s=time.monotonic())
            return False
        logger.info("joined the DHT through %s", short_id(peer_id))
        self._plan.reached(peer_id, now_s=time.monotonic())
        # If libp2p was connected before, it dialled none of these addresses, so they may belong to another machine.
        for host in {host_in(address) for address in ways} & await self._hosts_of(peer_id):
            self._guard.reached(peer_id, host, num_dials=NUM_DIALS)
        CLOCK.heard(offset.seconds)
        if not self._clock_is_right:
            self.offsets[peer_id] = offset
        self._address_book.remember(peer_id, multiaddrs)
        return True

    async def _hosts_of(self, peer_id: str) -> set[str]:
        try:
            return await self._node.hosts_of(peer_id)
        except DirectoryError:
            return set()

    async def _ways(self, peer_id: str, multiaddrs: Sequence[str]) -> list[str]:
        """Return the addresses to dial, without peer ids.

        The addresses of the user and of the ticket may be private, unlike those from others. Raises DirectoryError if
        the guard allows none of them now.
        """
        ways, faults = [], []
        for multiaddr in multiaddrs:
            address = split_peer_id(multiaddr)[0]
            try:
                is_given = multiaddr in self._given
                ways.append(await guarded(self._guard, peer_id, address, num_dials=NUM_DIALS, is_given=is_given))
            except Unreachable as error:
                faults.append(str(error))
        if not ways:
            raise DirectoryError(f"{short_id(peer_id)} was not dialled: {'; '.join(faults) or 'it has no address'}")
        return ways

    def _look_at_clocks(self) -> None:
        """Check this machine's clock against the known offsets."""
        try:
            self.check_clock()
        except DirectoryError as error:
            logger.warning("%s", error)
            self._on_wrong_clock()
        else:
            self._clock_is_right = True
