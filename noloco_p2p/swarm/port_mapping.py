"""Asks the router of this network to forward a peer's two ports to this machine.

It uses NAT-PMP (RFC 6886) or, if that fails, UPnP.

The address that a router reports is only a hint. A peer stops announcing it when others report that it leads nowhere
(see `peer/reachability.py`). The mappings expire, so they are renewed while the peer runs, and they are removed when it
leaves. Routers that support only PCP, or that have a private address themselves, cannot be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from noloco_p2p.hosts import ip_of, is_home, is_public

log = logging.getLogger(__name__)
T = TypeVar("T")

LEASE_S = 3600  # the requested lifetime of a mapping; a router may grant less
SHORTEST_LEASE_S = 60
AGAIN_S = 600.0  # the pause if no router helped
ANSWER_S = 10.0  # the time limit for one router and protocol
FAREWELL_S = 2.0
PMP_PORT = 5351
PMP_TRIES_S = (0.25, 0.5, 1.0)
PMP_MAP_TCP = 2
UPNP_DISCOVERY_MS = 2_000
UPNP_TRIES = 3  # attempts with random ports, after the desired port was refused
OTHER_PORTS = range(20_000, 60_000)
ROUTES = Path("/proc/net/route")

Ports = tuple[int, int]  # the gRPC port and the libp2p port


class NoMapping(Exception):
    """The router does not map the ports. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class MappedPorts:
    """The external address and ports of a peer.

    `ports` are in the order of the internal ports, and `by` is the name of the protocol.
    """

    host: str
    ports: Ports
    by: str
    lease_s: float = LEASE_S


class RouterClient(Protocol):
    """A client that asks a router for port mappings. On failure, it raises NoMapping, OSError or TimeoutError."""

    async def map(self, ports: Ports) -> MappedPorts: ...

    async def unmap(self, ports: Ports, mapping: MappedPorts) -> None: ...


class PortMapping:
    """The port mapping of one peer.

    `run` keeps the mapping alive, and must run as a task. `mapped` is None while there is no mapping. `ports` returns
    the internal ports. `on_change` is called when `mapped` changes.
    """

    def __init__(
        self, clients: Sequence[RouterClient], *, ports: Callable[[], Ports], on_change: Callable[[], None]
    ) -> None:
        self.mapped: MappedPorts | None = None
        self._clients = clients
        self._client: RouterClient | None = None  # the client that made `mapped`
        self._ports = ports
        self._on_change = on_change
        self._has_asked = asyncio.Event()

    async def run(self) -> None:
        while self._clients:
            before = self.mapped
            self.mapped = await self._ask(self._ports())
            self._has_asked.set()
            if self.mapped != before:
                self._on_change()
            await asyncio.sleep(self.mapped.lease_s / 2 if self.mapped else AGAIN_S)

    async def wait(self, timeout_s: float) -> None:
        """Wait until the router has been asked for the first time, for at most `timeout_s`."""
        if self._clients:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_asked.wait(), timeout_s)

    async def close(self) -> None:
        """Remove the mapping. If the router does not answer within FAREWELL_S, give up."""
        if self._client and self.mapped:
            with contextlib.suppress(NoMapping, OSError, TimeoutError):
                await asyncio.wait_for(self._client.unmap(self._ports(), self.mapped), FAREWELL_S)
        self._client = self.mapped = None

    async def _ask(self, ports: Ports) -> MappedPorts | None:
        for client in sorted(self._clients, key=lambda each: each is not self._client):
            try:
                async with asyncio.timeout(ANSWER_S):
                    mapping = await client.map(ports)
                    if not is_public(mapping.host):
                        await client.unmap(ports, mapping)
                        raise NoMapping(f"the router itself has a private address, {mapping.host}")
            except (NoMapping, OSError, TimeoutError) as error:
                log.debug("%s: %s", type(client).__name__, error or "no answer")
                continue
            self._client = client
            log.info(
                "the router at %s forwards ports %d and %d to this machine (%s)",
                mapping.host,
                *mapping.ports,
                mapping.by,
            )
            return mapping
        self._client = None
        return None


# NAT-PMP


def gateway(routes: Path = ROUTES) -> str:
    """Return the private address of the default route's router, or an empty string if it is unknown."""
    try:
        lines = routes.read_text().splitlines()[1:]
        fields = [line.split() for line in lines]
        found = [socket.inet_ntoa(struct.pack("<I", int(each[2], 16))) for each in fields if each[1] == "00000000"]
    except (OSError, ValueError, IndexError, struct.error):
        return ""
    return next(filter(is_home, found), "")


class NatPmp:
    """A client for NAT-PMP (RFC 6886), which most routers with PCP also support."""

    def __init__(self, router: str, port: int = PMP_PORT) -> None:
        self._router = (router, port)

    async def map(self, ports: Ports) -> MappedPorts:
        (address,) = await self._request(struct.pack("!BB", 0, 0), "!4s")
        host = socket.inet_ntoa(address)
        (grpc, one_s), (libp2p, other_s) = [await self._map(port, port, LEASE_S) for port in ports]
        return MappedPorts(host, (grpc, libp2p), "NAT-PMP", max(SHORTEST_LEASE_S, min(one_s, other_s, LEASE_S)))

    async def unmap(self, ports: Ports, mapping: MappedPorts) -> None:
        for port in ports:
            await self._map(port, 0, 0)

    async def _map(self, inside: int, outside: int, lease_s: int) -> tuple[int, int]:
        """Map an internal port. Returns the external port and the lifetime of the mapping in seconds."""
        request = struct.pack("!BBHHHI", 0, PMP_MAP_TCP, 0, inside, outside, lease_s)
        named, found, granted_s = await self._request(request, "!HHI")
        if named != inside or (lease_s and not (found and granted_s)):
            raise NoMapping("the router answered for another port or did not grant a mapping")
        return found, granted_s

    async def _request(self, request: bytes, layout: str) -> tuple[Any, ...]:
        """Send a request repeatedly until an answer arrives. Returns the fields of the answer after its header."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.setblocking(False)
            udp.connect(self._router)  # so that only answers from the router are received
            for patience_s in PMP_TRIES_S:
                udp.send(request)
                with contextlib.suppress(TimeoutError):
                    answer = await asyncio.wait_for(loop.sock_recv(udp, 64), patience_s)
                    return _fields(answer, request[1], layout)
        raise NoMapping("the router did not answer")


def _fields(answer: bytes, operation: int, layout: str) -> tuple[Any, ...]:
    header = struct.Struct("!BBHI")
    if len(answer) < header.size + struct.calcsize(layout):
        raise NoMapping("the router's answer is too short")
    version, answered, result, _ = header.unpack_from(answer)
    if version != 0 or answered != 128 + operation or result != 0:
        raise NoMapping(f"the router refused the request (version {version}, operation {answered}, result {result})")
    return struct.unpack_from(layout, answer, header.size)


# UPnP


class Upnp:
    """A client for UPnP Internet Gateway Devices, based on miniupnpc.

    The calls of miniupnpc block, so they run in a daemon thread. A router that answers byte by byte delays this thread,
    but neither the event loop nor the exit of the process. If the router has already given the external port to another
    machine, a random port is used instead.
    """

    def __init__(self, local_host: str) -> None:
        self._local_host = local_host
        self._gateway: Any = None  # the router that made the last mapping
        self._thread: threading.Thread | None = None

    async def map(self, ports: Ports) -> MappedPorts:
        return await self._beside(partial(self._map, ports))

    async def unmap(self, ports: Ports, mapping: MappedPorts) -> None:
        await self._beside(partial(self._unmap, mapping))

    async def _beside(self, ask: Callable[[], T]) -> T:
        if self._thread and self._thread.is_alive():
            raise NoMapping("UPnP: the router is still processing the previous request")
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # a caller that gives up must not cancel it

        def run() -> None:
            try:
                answer.set_result(ask())
            except BaseException as error:  # noqa: BLE001 - it is passed to the caller
                answer.set_exception(error)

        self._thread = threading.Thread(target=run, name="noloco-upnp", daemon=True)
        self._thread.start()
        return await asyncio.wrap_future(answer)

    def _map(self, ports: Ports) -> MappedPorts:
        self._gateway = router = self._router()
        grpc, libp2p = (self._map_one(router, port) for port in ports)
        host = _asked(router.externalipaddress)
        try:
            return MappedPorts(str(ipaddress.IPv4Address(host)), (grpc, libp2p), "UPnP")
        except ValueError:
            raise NoMapping("the router did not report a valid IPv4 address") from None

    def _map_one(self, router: Any, inside: int) -> int:
        """Map an internal port, and return the external one."""
        fault = NoMapping(f"the router did not map port {inside}")
        for outside in (inside, *random.sample(OTHER_PORTS, UPNP_TRIES)):
            try:
                if _asked(router.addportmapping, outside, "TCP", self._local_host, inside, "noloco_p2p", "", LEASE_S):
                    return outside
            except NoMapping as error:
                fault = error
        raise fault

    def _unmap(self, mapping: MappedPorts) -> None:
        for port in mapping.ports:
            _asked(self._gateway.deleteportmapping, port, "TCP")

    def _router(self) -> Any:
        """Return the first gateway that answers."""
        try:
            import miniupnpc  # wheels exist only for some platforms
        except ImportError:
            raise NoMapping("the package miniupnpc is not installed") from None
        router = miniupnpc.UPnP(self._local_host, None, UPNP_DISCOVERY_MS)
        _asked(router.discover)
        _asked(router.selectigd)
        return router


def _asked(ask: Callable[..., Any], *arguments: object) -> Any:
    """Call miniupnpc, and turn its errors into NoMapping.

    It raises a plain Exception with the message of the router, or with "Success" if no router answers.
    """
    try:
        return ask(*arguments)
    except Exception as error:  # noqa: BLE001
        raise NoMapping(f"UPnP: {error}") from None


def clients_of(local_host: str) -> list[RouterClient]:
    """Return the clients to try for a peer at this address. If it is not a private IPv4 address, the list is empty."""
    if ip_of(local_host).version != 4 or not is_home(local_host):
        return []
    router = gateway()
    return [*([NatPmp(router)] if router else []), Upnp(local_host)]
