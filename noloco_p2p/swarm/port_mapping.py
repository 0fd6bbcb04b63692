"""Asks the router of this network to forward a peer's two ports to this machine, by UPnP.

The address that a router reports is only a hint. A peer stops announcing it when others report that it leads nowhere
(see `peer/reachability.py`). The mappings expire, so they are renewed while the peer runs, and they are removed when it
leaves. Routers that support only NAT-PMP or PCP, or that have a private address themselves, cannot be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from noloco_p2p.hosts import ip_of, is_home, is_public

log = logging.getLogger(__name__)
T = TypeVar("T")

LEASE_S = 3600  # the lifetime of a mapping
AGAIN_S = 600.0  # the pause if no router helped
ANSWER_S = 10.0  # the time limit for one request
FAREWELL_S = 2.0
UPNP_DISCOVERY_MS = 2_000
UPNP_TRIES = 3  # attempts with random ports, after the desired port was refused
OTHER_PORTS = range(20_000, 60_000)

Ports = tuple[int, int]  # the gRPC port and the libp2p port


class NoMapping(Exception):
    """The router does not map the ports. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class MappedPorts:
    """The external address and ports of a peer, in the order of the internal ports."""

    host: str
    ports: Ports


class PortMapping:
    """The port mapping of one peer.

    `run` keeps the mapping alive, and must run as a task. `mapped` is None while there is no mapping. `ports` returns
    the internal ports. `on_change` is called when `mapped` changes.
    """

    def __init__(self, client: Upnp | None, *, ports: Callable[[], Ports], on_change: Callable[[], None]) -> None:
        self.mapped: MappedPorts | None = None
        self._client = client
        self._ports = ports
        self._on_change = on_change
        self._has_asked = asyncio.Event()

    async def run(self) -> None:
        while self._client:
            before = self.mapped
            self.mapped = await self._ask(self._client)
            self._has_asked.set()
            if self.mapped != before:
                self._on_change()
            await asyncio.sleep(LEASE_S / 2 if self.mapped else AGAIN_S)

    async def wait(self, timeout_s: float) -> None:
        """Wait until the router has been asked for the first time, for at most `timeout_s`."""
        if self._client:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_asked.wait(), timeout_s)

    async def close(self) -> None:
        """Remove the mapping. If the router does not answer within FAREWELL_S, give up."""
        if self._client and self.mapped:
            with contextlib.suppress(NoMapping, OSError, TimeoutError):
                await asyncio.wait_for(self._client.unmap(self.mapped), FAREWELL_S)
        self.mapped = None

    async def _ask(self, client: Upnp) -> MappedPorts | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                mapping = await client.map(self._ports())
                if not is_public(mapping.host):
                    await client.unmap(mapping)
                    raise NoMapping(f"the router itself has a private address, {mapping.host}")
        except (NoMapping, OSError, TimeoutError) as error:
            log.debug("the router maps no ports: %s", error or "no answer")
            return None
        log.info("the router at %s forwards ports %d and %d to this machine", mapping.host, *mapping.ports)
        return mapping


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

    async def unmap(self, mapping: MappedPorts) -> None:
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
            return MappedPorts(str(ipaddress.IPv4Address(host)), (grpc, libp2p))
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


def client_of(local_host: str) -> Upnp | None:
    """Return the client for a peer at this address, or None if it is not a private IPv4 address."""
    return Upnp(local_host) if ip_of(local_host).version == 4 and is_home(local_host) else None
