"""Entering the DHT and staying in it: bootstraps and known peers are dialled while they are missing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError, Unreachable
from noloco_p2p.identity import short_id
from noloco_p2p.swarm.address_book import AddressBook
from noloco_p2p.swarm.addresses import guarded, host_in, split_peer_id
from noloco_p2p.swarm.clock import CLOCK, Offset, check_clock
from noloco_p2p.swarm.dial_plan import DialPlan
from noloco_p2p.swarm.node import SwarmNode

logger = logging.getLogger(__name__)

LONGEST_SLEEP_S = 1.0  # between checks of the plan


class Dialer:
    """Carries out a `DialPlan`, and compares the clocks of the peers that answer with this machine's.

    heard_of: peers whose records arrive. on_met: awaited when a peer has answered. on_wrong_clock: called when the
    clock of
    this machine differs from that of the others; `check_clock` then raises.
    """

    def __init__(
        self,
        node: SwarmNode,
        bootstraps: Mapping[str, Sequence[str]],
        address_book: AddressBook,
        *,
        own_peer_id: str,
        every_s: float,
        heard_of: Callable[[], Iterable[str]],
        on_met: Callable[[], Awaitable[None]],
        on_wrong_clock: Callable[[], None],
        guard: DialGuard,
    ) -> None:
        self._guard = guard
        self._given = frozenset(address for addresses in bootstraps.values() for address in addresses)
        self._node = node
        self._plan = DialPlan(own_peer_id, bootstraps, longest_pause_s=every_s)
        self._address_book = address_book
        self._sleep_s = min(every_s, LONGEST_SLEEP_S)
        self._heard_of = heard_of
        self._on_met = on_met
        self._on_wrong_clock = on_wrong_clock
        self._dial_now = asyncio.Event()
        self._has_dialled = asyncio.Event()
        self._nearby: dict[str, Sequence[str]] = {}  # in the local network: peer id -> multiaddrs
        self._offsets: dict[str, Offset] = {}  # of the clocks of nodes, until it is known which ones are right
        self._clock_is_right = False

    async def dial(self) -> float:
        """Dial the peers that are due, then wait until the next one may be; returns 0, the pause after it."""
        book, near = {**self._nearby, **self._address_book.addresses()}, self._node.neighbours()
        book |= {peer: (*nearby, *book.get(peer, ())) for peer, nearby in self._nearby.items()}
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
        """Dial all peers now, because the network of this machine has just come back."""
        self._plan.forget_failures()
        self._dial_now.set()

    def dial_nearby(self, peer_id: str, multiaddrs: Sequence[str]) -> None:
        """Dial a peer at addresses in the local network as well, now and while it is missing.

        Without addresses, it is dialled there no more.
        """
        if not multiaddrs:
            self._nearby.pop(peer_id, None)
            return
        self._nearby[peer_id] = multiaddrs
        self._dial_now.set()

    def failures(self) -> dict[str, str]:
        """Bootstraps that could not be reached so far: peer id -> why."""
        return self._plan.failures()

    def check_clock(self) -> None:
        """Raise DirectoryError when the clock of this machine differs from that of the others."""
        check_clock(self._offsets)

    async def wait_until_tried(self, timeout_s: float) -> None:
        """Wait until the entrances have been tried once; at most `timeout_s`."""
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
        logger.info("entered the DHT through %s", short_id(peer_id))
        self._plan.reached(peer_id, now_s=time.monotonic())
        for host in {host_in(address) for address in ways} & await self._hosts_of(peer_id):
            self._guard.reached(peer_id, host)
        CLOCK.heard(offset.seconds)
        if not self._clock_is_right:
            self._offsets[peer_id] = offset
        nearby = self._nearby.get(peer_id, ())  # in another network, they would lead to other machines
        self._address_book.remember(peer_id, [address for address in multiaddrs if address not in nearby])
        return True

    async def _hosts_of(self, peer_id: str) -> set[str]:
        """The hosts of a peer. It may have been connected before, so that only a plain socket was dialled."""
        try:
            return await self._node.hosts_of(peer_id)
        except DirectoryError:
            return set()

    async def _ways(self, peer_id: str, multiaddrs: Sequence[str]) -> list[str]:
        """The addresses to dial, without peer id: the user's as they are, those of others as far as the guard allows.

        Raises DirectoryError when none may be dialled now.
        """
        ways, faults = [], []
        for multiaddr in multiaddrs:
            address = split_peer_id(multiaddr)[0]
            try:
                ways.append(address if multiaddr in self._given else await guarded(self._guard, peer_id, address))
            except Unreachable as error:
                faults.append(str(error))
        if not ways:
            raise DirectoryError(f"{short_id(peer_id)} is not dialled: {'; '.join(faults) or 'no address'}")
        return ways

    def _look_at_clocks(self) -> None:
        """Judge the clocks. Once others agree on the time, or there was no answer, this peer never doubts it again."""
        try:
            self.check_clock()
        except DirectoryError as error:
            logger.warning("%s", error)
            self._on_wrong_clock()
        else:
            self._clock_is_right = True
            self._offsets.clear()
