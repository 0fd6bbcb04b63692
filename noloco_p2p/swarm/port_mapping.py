"""Asks the router of this network to forward a peer's two ports to this machine, by UPnP.

The address that a router reports is only a hint. A peer stops announcing it when others report that it leads nowhere
(see `peer/reachability.py`). The mappings expire, so they are renewed while the peer runs, and they are removed when it
leaves. Routers that support only NAT-PMP or PCP, or that have a private address themselves, cannot be used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
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
    the internal ports. `on_change` is called when `mapped` changes. No router is asked unless `local_host`, at which
    the router reaches this machine, is a private IPv4 address.

    The calls of miniupnpc block, so they run in a daemon thread. A router that answers byte by byte delays this thread,
    but neither the event loop nor the exit of the process.
    """

    def __init__(
        self, local_host: str, *, ports: Callable[[], Ports], on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.mapped: MappedPorts | None = None
        self.asks = bool(local_host) and ip_of(local_host).version == 4 and is_home(local_host)
        self._local_host = local_host
        self._ports = ports
        self._on_change = on_change
        self._has_asked = asyncio.Event()
        self._gateway: Any = None  # the router that made the last mapping
        self._thread: threading.Thread | None = None

    async def run(self) -> None:
        while self.asks:
            before = self.mapped
            self.mapped = await self._ask()
            self._has_asked.set()
            if self.mapped != before:
                self._on_change()
            await asyncio.sleep(LEASE_S / 2 if self.mapped else AGAIN_S)

    async def wait(self, timeout_s: float) -> None:
        """Wait until the router has been asked for the first time, for at most `timeout_s`."""
        if self.asks:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_asked.wait(), timeout_s)

    async def close(self) -> None:
        """Remove the mapping. If the router does not answer within FAREWELL_S, give up."""
        if self.mapped:
            mapped, self.mapped = self.mapped, None
            with suppress(NoMapping, OSError, TimeoutError):
                await asyncio.wait_for(self._beside(lambda: self._unmap(mapped)), FAREWELL_S)

    async def _ask(self) -> MappedPorts | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                mapped = await self._beside(self._map)
                if not is_public(mapped.host):
                    await self._beside(lambda: self._unmap(mapped))
                    raise NoMapping(f"the router itself has a private address, {mapped.host}")
        except (NoMapping, OSError, TimeoutError) as error:
            log.debug("the router maps no ports: %s", error or "no answer")
            return None
        log.info("the router at %s forwards ports %d and %d to this machine", mapped.host, *mapped.ports)
        return mapped

    async def _beside(self, ask: Callable[[], T]) -> T:
        """Run a function in the thread. Raises NoMapping if the thread is still busy."""
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

    # in the thread

    def _map(self) -> MappedPorts:
        """Map both ports at the first gateway that answers."""
        try:
            import miniupnpc  # wheels exist only for some platforms
        except ImportError:
            raise NoMapping("the package miniupnpc is not installed") from None
        self._gateway = router = miniupnpc.UPnP(self._local_host, None, UPNP_DISCOVERY_MS)
        _asked(router.discover)
        _asked(router.selectigd)
        grpc, libp2p = (self._map_one(port) for port in self._ports())
        host = _asked(router.externalipaddress)
        try:
            return MappedPorts(str(ipaddress.IPv4Address(host)), (grpc, libp2p))
        except ValueError:
            raise NoMapping("the router did not report a valid IPv4 address") from None

    def _map_one(self, inside: int) -> int:
        """Map an internal port, and return the external one.

        If the router has already given this port to another machine, a random port is used instead.
        """
        fault, add = NoMapping(f"the router did not map port {inside}"), self._gateway.addportmapping
        for outside in (inside, *random.sample(OTHER_PORTS, UPNP_TRIES)):
            try:
                if _asked(add, outside, "TCP", self._local_host, inside, "noloco_p2p", "", LEASE_S):
                    return outside
            except NoMapping as error:
                fault = error
        raise fault

    def _unmap(self, mapped: MappedPorts) -> None:
        for port in mapped.ports:
            _asked(self._gateway.deleteportmapping, port, "TCP")


def _asked(ask: Callable[..., Any], *arguments: object) -> Any:
    """Call miniupnpc, and turn its errors into NoMapping.

    It raises a plain Exception with the message of the router, or with "Success" if no router answers.
    """
    try:
        return ask(*arguments)
    except Exception as error:  # noqa: BLE001
        raise NoMapping(f"UPnP: {error}") from None
