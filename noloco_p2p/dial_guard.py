"""What the words of strangers can make this peer dial: no private address from outside, and no host again and again."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from collections.abc import Callable

from noloco_p2p.errors import Unreachable
from noloco_p2p.hosts import ip_of, is_public
from noloco_p2p.rates import Rates

FAILURES_A_MINUTE = 20  # dials of one host at which nobody was found, or somebody else; as many at once
MAX_REACHED = 4096
RESOLVE_S = 5.0


class DialGuard:
    """One for all dials of a peer. `only_public`: its own way into the swarm is public, so that a private address that
    a stranger names would be one of a network of its own."""

    def __init__(self, *, only_public: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.only_public = only_public
        self._failures = Rates(per_s=FAILURES_A_MINUTE / 60, at_once=FAILURES_A_MINUTE, clock=clock)
        self._reached: OrderedDict[tuple[str, str], None] = OrderedDict()  # (peer id, IP address)

    async def way(self, peer_id: str, host: str) -> str:
        """The IP address of a peer's host, to be dialled now. Raises Unreachable when it must not be."""
        address = await self._resolved(peer_id, host)
        if (peer_id, address) not in self._reached and not self._failures.take(address):
            raise Unreachable(f"{FAILURES_A_MINUTE} dials of {address} in a minute led to no peer", peer=peer_id)
        return address

    def reached(self, peer_id: str, address: str) -> None:
        """It has proved that it is there: dials of it are not counted."""
        if (peer_id, address) not in self._reached:
            self._failures.give_back(address)
        self._reached.pop((peer_id, address), None)
        self._reached[peer_id, address] = None
        while len(self._reached) > MAX_REACHED:
            self._reached.popitem(last=False)

    async def _resolved(self, peer_id: str, host: str) -> str:
        """An IP address as it is; a name as what it means now, for a moment later it may mean something else."""
        try:
            return str(ip_of(host))
        except ValueError:
            pass
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise Unreachable(f"{host} is not known here", peer=peer_id) from None
        addresses = [str(ip_of(str(each[4][0]))) for each in found]
        usable = [address for address in addresses if is_public(address)] if self.only_public else addresses
        if not usable:
            raise Unreachable(f"{host} is a private address, named by a peer of another network", peer=peer_id)
        return usable[0]
