"""Limit what strangers can make this peer dial, and which names they can make it look up.

Outsiders cannot make it dial private addresses, and nobody can make it dial the same host again and again.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from noloco_p2p.errors import Unreachable
from noloco_p2p.hosts import ip_of, is_home, is_public
from noloco_p2p.rates import Rates

FAILURES_A_MINUTE = 20  # failed connections to one host: per minute in the long run, and in a burst
MAX_REACHED = 4096
RESOLVE_S = 5.0
# A lookup that no name server answers occupies one of the four threads of libuv for 10 s or longer, whatever RESOLVE_S
# is. Half of the threads are for the names of strangers.
MAX_LOOKUPS = 2  # at a time, for different domains
FAILED_LOOKUPS_A_MINUTE = 4  # per domain, per minute in the long run, and in a burst
FAILED_LOOKUPS_A_MINUTE_GIVEN = 60
KEEP_S = 60.0  # how long the addresses of a name are used
KEEP_FAILED_S, KEEP_FAILED_GIVEN_S = 60.0, 5.0  # how long a name that could not be resolved is not looked up again
MAX_NAMES = 1024
MAX_ADDRESSES = 16  # per name


class DialGuard:
    """The guard for all dials of a peer.

    If `only_public` is true, private addresses that strangers name are refused, and those of peers that seem to be
    behind the same router count as one host. It is set if this peer announces a public address or joins through one,
    because a stranger's private address would then lead into this peer's own network.
    """

    def __init__(self, *, only_public: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.only_public = only_public
        self._failures = Rates(per_s=FAILURES_A_MINUTE / 60, at_once=FAILURES_A_MINUTE, clock=clock)
        self._reached: OrderedDict[tuple[str, str], None] = OrderedDict()  # (peer id, IP address)
        self._strangers = Lookups(clock, failed_a_minute=FAILED_LOOKUPS_A_MINUTE, keep_failed_s=KEEP_FAILED_S)
        self._given = Lookups(clock, failed_a_minute=FAILED_LOOKUPS_A_MINUTE_GIVEN, keep_failed_s=KEEP_FAILED_GIVEN_S)

    async def way(self, peer_id: str, host: str, *, num_dials: int = 1, is_given: bool = False) -> str:
        """Return the IP address to dial for a peer's host. Raises Unreachable if the host must not be dialled.

        `num_dials` is the number of connections that the caller is going to open. `is_given` is true if the host comes
        from the user or from the ticket. It may then be private, and its name is looked up apart from other names.
        """
        address = await self._resolved(peer_id, host, is_given=is_given)
        if (peer_id, address) not in self._reached and not self._failures.take(self._host(address), num_dials):
            raise Unreachable(
                f"in the last minute, {FAILURES_A_MINUTE} attempts to dial {address} failed", peer=peer_id
            )
        return address

    def reached(self, peer_id: str, address: str, *, num_dials: int = 1) -> None:
        """Record that the peer at this address has authenticated itself, so that dials to it are no longer counted."""
        if (peer_id, address) not in self._reached:
            self._failures.give_back(self._host(address), num_dials)
        self._reached.pop((peer_id, address), None)
        self._reached[peer_id, address] = None
        while len(self._reached) > MAX_REACHED:
            self._reached.popitem(last=False)

    def _host(self, address: str) -> str:
        return "this network" if self.only_public and is_home(address) else address

    async def _resolved(self, peer_id: str, host: str, *, is_given: bool) -> str:
        """Return an IP address unchanged, or resolve a name.

        The name is resolved only once, because it could resolve to another address a moment later.
        """
        try:
            return str(ip_of(host))
        except ValueError:
            pass
        addresses = await (self._given if is_given else self._strangers).addresses(host)
        if not addresses:
            raise Unreachable(f"{host} cannot be resolved on this machine", peer=peer_id)
        is_local_ok = is_given or not self.only_public
        usable = [address for address in addresses if is_local_ok or is_public(address)]
        if not usable:
            raise Unreachable(
                f"{host} resolves to a private address, but a peer on another network announced it", peer=peer_id
            )
        return usable[0]


class Lookups:
    """Looks up names, MAX_LOOKUPS at a time.

    A name that could be resolved before keeps its addresses while new lookups fail or have to wait.
    """

    def __init__(self, clock: Callable[[], float], *, failed_a_minute: float, keep_failed_s: float) -> None:
        self._clock = clock
        self._keep_failed_s = keep_failed_s
        self._failures = Rates(per_s=failed_a_minute / 60, at_once=failed_a_minute, clock=clock)
        self._running: dict[str, asyncio.Task[None]] = {}  # by domain, until the thread of libuv is free again
        # name -> (when to look it up again, its addresses)
        self._known: OrderedDict[str, tuple[float, Sequence[str]]] = OrderedDict()

    async def addresses(self, name: str) -> Sequence[str]:
        """Return the IP addresses of a name. The list is empty if it cannot be resolved within RESOLVE_S."""
        domain = ".".join(name.lower().rstrip(".").split(".")[-2:])
        try:
            async with asyncio.timeout(RESOLVE_S):
                while self._clock() >= self._last(name)[0]:
                    if domain not in self._running and len(self._running) < MAX_LOOKUPS:
                        if not self._failures.take(domain):
                            break
                        self._running[domain] = asyncio.create_task(self._look_up(name, domain), name=name)
                    await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            if domain in self._running and self._running[domain].get_name() == name:
                self._keep(name, ())
        return self._last(name)[1]

    def _last(self, name: str) -> tuple[float, Sequence[str]]:
        return self._known.get(name, (-math.inf, ()))

    def _keep(self, name: str, found: Sequence[str]) -> None:
        again_s = self._clock() + (KEEP_S if found else self._keep_failed_s)
        self._known[name] = again_s, found or self._last(name)[1]
        self._known.move_to_end(name)
        if len(self._known) > MAX_NAMES:
            self._known.popitem(last=False)

    async def _look_up(self, name: str, domain: str) -> None:
        try:
            found = await look_up(name)
        finally:
            del self._running[domain]
        if found:
            self._failures.give_back(domain)
        self._keep(name, found)


async def look_up(name: str) -> Sequence[str]:
    """Return the IP addresses of a name. The list is empty if there are none."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return [str(ip_of(str(each[4][0]))) for each in found[:MAX_ADDRESSES]]
