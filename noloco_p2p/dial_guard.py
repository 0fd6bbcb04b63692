"""Limit what strangers can make this peer dial.

Outsiders cannot make it dial private addresses, and nobody can make it dial the same host again and again.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from collections.abc import Callable

from noloco_p2p.errors import Unreachable
from noloco_p2p.hosts import ip_of, is_public
from noloco_p2p.rates import Rates

FAILURES_A_MINUTE = 20  # failed dials to one host: per minute in the long run, and in a burst
MAX_REACHED = 4096
RESOLVE_S = 5.0


class DialGuard:
    """The guard for all dials of a peer.

    If `only_public` is true, private addresses that strangers name are refused. It is set if this peer announces a
    public address or joins through one, because a stranger's private address would then lead into this peer's own
    network.
    """

    def __init__(self, *, only_public: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.only_public = only_public
        self._failures = Rates(per_s=FAILURES_A_MINUTE / 60, at_once=FAILURES_A_MINUTE, clock=clock)
        self._reached: OrderedDict[tuple[str, str], None] = OrderedDict()  # (peer id, IP address)

    async def way(self, peer_id: str, host: str) -> str:
        """Return the IP address to dial for a peer's host. Raises Unreachable if the host must not be dialled."""
        address = await self._resolved(peer_id, host)
        if (peer_id, address) not in self._reached and not self._failures.take(address):
            raise Unreachable(
                f"in the last minute, {FAILURES_A_MINUTE} attempts to dial {address} failed", peer=peer_id
            )
        return address

    def reached(self, peer_id: str, address: str) -> None:
        """Record that the peer at this address has authenticated itself, so that dials to it are no longer counted."""
        if (peer_id, address) not in self._reached:
            self._failures.give_back(address)
        self._reached.pop((peer_id, address), None)
        self._reached[peer_id, address] = None
        while len(self._reached) > MAX_REACHED:
            self._reached.popitem(last=False)

    async def _resolved(self, peer_id: str, host: str) -> str:
        """Return an IP address unchanged, or resolve a name.

        The name is resolved only once, because it could resolve to another address a moment later.
        """
        try:
            return str(ip_of(host))
        except ValueError:
            pass
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise Unreachable(f"{host} cannot be resolved on this machine", peer=peer_id) from None
        addresses = [str(ip_of(str(each[4][0]))) for each in found]
        usable = [address for address in addresses if is_public(address)] if self.only_public else addresses
        if not usable:
            raise Unreachable(
                f"{host} resolves to a private address, but a peer on another network announced it", peer=peer_id
            )
        return usable[0]
