"""Lets peers of the same run find and call each other on a local network, using mDNS (RFC 6762).

The peers need neither an address that can be reached from outside nor a router that supports hairpinning. Each peer
announces a service with the name MARK-PEERID. The port of the service is the libp2p port, and its TXT record contains
the gRPC port. The mark is a digest of the key under which the peers of the run store their records, so only peers of
the run recognise it.

Announcements are only hints, because any machine on the network can copy a mark. A peer dials only private addresses in
a subnet of this machine. It keeps at most 16 peers at a time, and after the first 16 announcements it accepts one more
per minute. A peer counts as near once it has proven, at its local address, that it owns the session key in its record.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import psutil
from blake3 import blake3
from zeroconf import (
    BadTypeInNameException,
    IPVersion,
    NonUniqueNameException,
    NotRunningException,
    ServiceStateChange,
    Zeroconf,
)
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from noloco_p2p.errors import PeerError
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.hosts import is_home, is_port, is_wildcard
from noloco_p2p.identity import short_id
from noloco_p2p.rates import Rates
from noloco_p2p.swarm.addresses import host_port
from noloco_p2p.swarm.node import end_tasks

log = logging.getLogger(__name__)

SERVICE = "_noloco._tcp.local."
GRPC = b"grpc"  # the key of the gRPC port in the text record of a service
NAME = re.compile(r"([0-9a-f]{8})-([1-9A-HJ-NP-Za-km-z]{40,54})\." + re.escape(SERVICE))
MARK_CONTEXT = "noloco_p2p 2026 mark of a run in a local network"
MAX_FOUND = 16
# This rate applies after the first 16 peers. Otherwise, a stranger who keeps announcing services could make this peer
# scan the network.
FOUND_PER_S = 1 / 60
MAX_HOSTS = 4  # per peer
ANSWER_MS = 3_000
LOOK_S = 1.0  # how often this peer looks for the records of the peers that it has found
RECHECK_S = 60.0

Interface = ipaddress.IPv4Interface


@dataclass(frozen=True, slots=True)
class Found:
    """The addresses at which a peer may be reachable on the local network, according to its mDNS service."""

    peer_id: str
    hosts: tuple[str, ...]
    grpc_port: int
    libp2p_port: int

    def multiaddrs(self) -> list[str]:
        return [f"/ip4/{host}/tcp/{self.libp2p_port}/p2p/{self.peer_id}" for host in self.hosts]

    def grpc(self) -> list[str]:
        return [host_port(host, self.grpc_port) for host in self.hosts]


def mark_of(view: str) -> str:
    """Return the mark of a run. `view` is the digest that identifies the records of the run in the DHT."""
    return blake3(view.encode(), derive_key_context=MARK_CONTEXT).hexdigest(length=4)


def own_interfaces(listen_host: str) -> list[Interface]:
    """Return the private IPv4 addresses of this machine, with their subnets.

    If `listen_host` is not a wildcard, only that address is returned.
    """
    found = [
        ipaddress.ip_interface(f"{each.address}/{each.netmask}")
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family.name == "AF_INET" and each.netmask
    ]
    private = [each for each in found if isinstance(each, Interface) and is_home(str(each.ip))]
    return [each for each in private if is_wildcard(listen_host) or str(each.ip) == listen_host]


def nearby(hosts: Iterable[str], interfaces: Sequence[Interface]) -> tuple[str, ...]:
    """Return up to MAX_HOSTS hosts, other than this machine, that are in one of its subnets."""
    own = {each.ip for each in interfaces}
    addresses = [ipaddress.IPv4Address(host) for host in hosts]
    near = [each for each in addresses if each not in own and any(each in one.network for one in interfaces)]
    return tuple(map(str, near[:MAX_HOSTS]))


class Household:
    """Finds peers of the run on the local network.

    Create it on the event loop. Call `look` first, and `announce` once this peer has a gRPC server. `view` is the same
    as in `mark_of`. `live` returns the peers whose records were read. `on_found` is called with the id and multiaddrs
    of a peer that may be on this network, and without multiaddrs once the peer has left. `ask` calls a peer and raises
    PeerError if the call fails; if it succeeds, the peer has proven its identity.
    """

    def __init__(
        self,
        peer_id: str,
        view: str,
        interfaces: Sequence[Interface],
        *,
        live: Callable[[], Sequence[Candidate]],
        on_found: Callable[[str, Sequence[str]], None],
        ask: Callable[[Candidate], Awaitable[object]],
    ) -> None:
        self._peer_id = peer_id
        self._mark = mark_of(view)
        self._interfaces = interfaces
        self._live = live
        self._on_found = on_found
        self._ask = ask
        self._found: dict[str, Found] = {}
        self._allowance = Rates(per_s=FOUND_PER_S, at_once=MAX_FOUND)
        self._near: dict[str, str] = {}  # peer id -> HOST:PORT of its gRPC server
        self._check_at_s: dict[str, float] = {}
        self._named: asyncio.Queue[str] = asyncio.Queue(MAX_FOUND)
        self._mdns: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def look(self) -> None:
        """Start looking for other peers. Does nothing if multicast is unavailable or there is no local network."""
        if not self._interfaces:
            return
        # zeroconf logs a warning with a traceback about every network that is down or disappears.
        logging.getLogger("zeroconf").setLevel(logging.DEBUG if log.isEnabledFor(logging.DEBUG) else logging.CRITICAL)
        hosts = [str(each.ip) for each in self._interfaces]
        try:
            self._mdns = AsyncZeroconf(interfaces=hosts, ip_version=IPVersion.V4Only)
        except OSError as error:
            log.info("cannot look for peers on the local network: %s", error)
            return
        self._browser = AsyncServiceBrowser(self._mdns.zeroconf, SERVICE, handlers=[self._on_change])
        self._tasks = [asyncio.create_task(self._resolve()), asyncio.create_task(self._check())]

    def announce(self, *, grpc_port: int, libp2p_port: int) -> None:
        """Let others on the local network find this peer."""
        if self._mdns:
            self._tasks.append(asyncio.create_task(self._register(self._mdns, grpc_port, libp2p_port)))

    async def stop(self) -> None:
        await end_tasks(self._tasks)
        if self._browser:
            await self._browser.async_cancel()
        if self._mdns:
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(self._mdns.async_close(), ANSWER_MS / 1e3)

    def is_near(self, peer_id: str) -> bool:
        return peer_id in self._near

    def reached(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates, with local addresses for the peers on the local network."""
        return [
            replace(each, address=self._near[each.peer_id], can_be_called=True) if self.is_near(each.peer_id) else each
            for each in candidates
        ]

    # announcements of others

    def _on_change(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        named = NAME.fullmatch(name)
        if named is None or named[1] != self._mark or named[2] == self._peer_id:
            return
        if state_change is ServiceStateChange.Removed:
            self._forget(named[2])
        elif not self._named.full():
            self._named.put_nowait(name)

    async def _resolve(self) -> None:
        """Ask the announced peers for their addresses, one after the other."""
        while True:
            name = await self._named.get()
            info = AsyncServiceInfo(SERVICE, name)
            assert self._mdns is not None
            try:
                answered = await info.async_request(self._mdns.zeroconf, ANSWER_MS)
            except (OSError, NotRunningException) as error:
                log.debug("could not get the addresses of %s: %s", name, error)
                continue
            found = read(info, self._interfaces) if answered else None
            if found and self._may_use(found):
                log.info("%s may be on this local network, at %s", short_id(found.peer_id), ", ".join(found.hosts))
                self._found[found.peer_id] = found
                self._check_at_s.pop(found.peer_id, None)
                self._on_found(found.peer_id, found.multiaddrs())

    def _may_use(self, found: Found) -> bool:
        known = self._found.get(found.peer_id)
        has_room = known is not None or len(self._found) < MAX_FOUND
        return found != known and has_room and self._allowance.take("")

    async def _check(self) -> None:
        """Call each peer that was found as soon as its record has been read, and again from time to time."""
        loop = asyncio.get_running_loop()
        while True:
            due = [
                each
                for each in self._live()
                if each.peer_id in self._found and self._check_at_s.get(each.peer_id, 0.0) <= loop.time()
            ]
            await asyncio.gather(*map(self._check_one, due))
            for each in due:
                self._check_at_s[each.peer_id] = loop.time() + RECHECK_S
            await asyncio.sleep(LOOK_S)

    async def _check_one(self, candidate: Candidate) -> None:
        for address in self._found[candidate.peer_id].grpc():
            try:
                await self._ask(replace(candidate, address=address))
            except PeerError as error:
                log.debug("could not reach %s at %s: %s", short_id(candidate.peer_id), address, error)
            else:
                if candidate.peer_id in self._found:
                    self._near[candidate.peer_id] = address
                return
        self._near.pop(candidate.peer_id, None)

    def _forget(self, peer_id: str) -> None:
        if self._found.pop(peer_id, None):
            self._on_found(peer_id, ())
        self._near.pop(peer_id, None)
        self._check_at_s.pop(peer_id, None)

    # announcements of this peer

    async def _register(self, mdns: AsyncZeroconf, grpc_port: int, libp2p_port: int) -> None:
        name = f"{self._mark}-{self._peer_id}.{SERVICE}"
        info = AsyncServiceInfo(
            SERVICE,
            name,
            port=libp2p_port,
            properties={GRPC: str(grpc_port)},
            server=f"{self._mark}-{self._peer_id[-12:].lower()}.local.",
            addresses=[each.ip.packed for each in self._interfaces],
        )
        try:
            await (await mdns.async_register_service(info))
        except (OSError, NonUniqueNameException, BadTypeInNameException) as error:
            log.info("could not announce this peer on the local network: %s", error or type(error).__name__)


def read(info: AsyncServiceInfo, interfaces: Sequence[Interface]) -> Found | None:
    """Return the usable addresses and ports of a service, or None if a port is invalid or no address is usable."""
    named = NAME.fullmatch(info.name)
    port = (info.properties.get(GRPC) or b"").decode("ascii", "replace")
    hosts = nearby(info.parsed_addresses(IPVersion.V4Only), interfaces)
    if named is None or not hosts or not is_port(port) or not is_port(str(info.port)):
        return None
    return Found(named[2], hosts, int(port), int(info.port or 0))
