"""Runs a DHT node that recovers from failures. If p2pd is lost, it is restarted with a new client and DHTNode.

hivemind's DHTNode does not survive its daemon, because the calls of its client are never answered again. The new node
has the same peer id, port and place in the key space, and other peers store their records on it again within one
heartbeat. Every call has a deadline, and every failure becomes a DirectoryError, regardless of the error that hivemind
raised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError
from noloco_p2p.identity import short_id
from noloco_p2p.owned_tasks import end_tasks
from noloco_p2p.swarm import kademlia
from noloco_p2p.swarm.addresses import announce_multiaddr, by_reach, guarded, host_in, tcp_target
from noloco_p2p.swarm.clock import Offset
from noloco_p2p.swarm.daemon import MAX_MEMORY_BYTES, Daemon, ListenOn, probe_port
from noloco_p2p.swarm.streams import StreamHandler, Streams

if TYPE_CHECKING:
    from typing import Self

    from noloco_p2p.swarm.kademlia.client import DaemonClient
    from noloco_p2p.swarm.kademlia.protocol import BoundedNode

logger = logging.getLogger(__name__)
T = TypeVar("T")

ATTACH_S = 10.0
KNOCK_S = 4.0
CONNECT_S = 8.0
CALL_S = 15.0
CLOSE_S = 2.0
NOTICE_TURNS = 3  # turns of the event loop until this process has closed its connections to an ended daemon
EXIT_S = 0.5  # The connection of a dying process closes before its exit is noticed.
PING_S = 2.0
HUNG_S = 9.0  # the longest silence of p2pd before a restart; it is then back within 15 s in total
RESTART_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # the last one repeats


class SwarmNode:
    """A node of the DHT.

    `start()` it once. `stop()` leaves no process, socket or task behind. `guard` limits the dials to addresses
    that others report.
    """

    def __init__(
        self,
        identity_path: Path,
        peer_id: str,
        listen_on: ListenOn,
        *,
        is_client: bool = False,
        guard: DialGuard | None = None,
    ) -> None:
        self.peer_id = peer_id
        self.on_restart: Callable[[], None] = lambda: None
        self._identity_path = identity_path
        self._listen_on = listen_on
        self._is_client = is_client
        self.guard = guard or DialGuard()
        self._daemon: Daemon | None = None
        self._p2p: DaemonClient | None = None
        self._dht: BoundedNode | None = None
        self._listening: list[str] = []  # multiaddrs from the daemon, without peer id
        self._watchdog: asyncio.Task[None] | None = None
        self._handlers: dict[str, StreamHandler] = {}
        self.streams = Streams()

    async def start(self) -> Self:
        """Start the node, without peers; `dial()` connects it to some.

        Raises DirectoryError if the port is taken, the daemon cannot run, or it has loaded another identity.
        """
        await asyncio.to_thread(kademlia.load)
        listen_on = self._listen_on
        if listen_on.announce_host and not listen_on.port:  # the daemon must know the port that it announces
            self._listen_on = replace(listen_on, port=probe_port(listen_on.host, 0))
        try:
            await self._bring_up()
        except BaseException:
            await self._tear_down()
            raise
        self._watchdog = asyncio.create_task(self._watch(), name="p2pd watchdog")
        return self

    async def stop(self) -> None:
        if self._watchdog is not None:
            await end_tasks([self._watchdog])
        await self._tear_down()

    @property
    def port(self) -> int:
        """The TCP port of libp2p."""
        return self._listen_on.port

    @property
    def daemon_pid(self) -> int | None:
        return self._daemon.pid if self._daemon else None

    def multiaddrs(self) -> list[str]:
        """Return the multiaddrs at which others can dial this node.

        The announced host comes first. Among the others, public addresses come before private ones.
        """
        return [f"{address}/p2p/{self.peer_id}" for address in self._addresses()]

    def _addresses(self) -> list[str]:
        announced = (
            [announce_multiaddr(self._listen_on.announce_host, self._listen_on.announce_port or self.port)]
            if self._listen_on.announce_host
            else []
        )
        return list(dict.fromkeys(announced + by_reach(self._listening)))

    def neighbours(self) -> set[str]:
        """Return the peer ids of the DHT nodes in the routing table, all of which answered recently."""
        return self._dht.neighbours() if self._dht is not None else set()

    async def dial(self, peer_id: str, addresses: Sequence[str]) -> Offset:
        """Connect to a peer, exchange routing table entries, and return the offset of its clock.

        A plain TCP connection is tried first. If libp2p itself fails to dial an address, it refuses to try again for up
        to five minutes, so it would miss a bootstrap that has come back. Raises DirectoryError if the peer cannot be
        reached or is not a DHT node.
        """
        what = f"dialling {short_id(peer_id)} at {', '.join(addresses)}"
        answers = await asyncio.gather(*(knock(address) for address in addresses))
        answering = [address for address, fault in zip(addresses, answers, strict=True) if not fault]
        if not answering:
            raise DirectoryError(f"{what}: {answers[0] if answers else 'no address'}")
        await _guard(self._running_p2p().connect(peer_id, answering), CONNECT_S, what)
        offset = await _guard(self._running_dht().greet(peer_id), CALL_S, what)
        if offset is None:
            raise DirectoryError(f"{what}: the connection succeeded, but the peer does not answer as a DHT node")
        return offset

    async def open_stream(
        self, peer_id: str, protocol: str, *, at: str = ""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a raw byte stream to a peer.

        If libp2p is not connected to it, its address `at` is dialled, which others have reported. If it is connected,
        nothing is dialled, and the address is not verified. Raises DirectoryError if the stream cannot be opened, or
        Unreachable if the guard forbids dialling the address.
        """
        what, way = f"opening a stream to {short_id(peer_id)}", ""
        if at and not await self.hosts_of(peer_id):
            way = await guarded(self.guard, peer_id, at)
            await _guard(self._running_p2p().connect(peer_id, [way]), CONNECT_S, what)
        reader, writer = await _guard(self._running_p2p().open_stream(peer_id, protocol), CONNECT_S, what)
        try:
            if way and host_in(way) in await self.hosts_of(peer_id):
                self.guard.reached(peer_id, host_in(way))
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def hosts_of(self, peer_id: str) -> set[str]:
        """Return the hosts of a peer's connections, as `DaemonClient.hosts_of` does.

        Raises DirectoryError if p2pd does not answer.
        """
        return await _guard(self._running_p2p().hosts_of(peer_id), ATTACH_S, "asking p2pd for its peers")

    async def handle_streams(self, protocol: str, handler: StreamHandler) -> None:
        """Call `handler` with (peer id, reader, writer) for each stream of this protocol that others open.

        The handler remains in use after p2pd restarts.
        """
        self._handlers[protocol] = handler
        handling = self._running_p2p().handle_streams(protocol, self.streams.bounded(handler))
        await _guard(handling, ATTACH_S, "asking p2pd to forward streams")

    async def store(
        self, key: str, subkey: str, value: bytes, *, expires_at_s: float, timeout_s: float = CALL_S
    ) -> None:
        """Store a value on the nodes closest to the key, until `expires_at_s` in DHT time.

        hivemind's result is not returned because it means little: it is true even if only this node stored the value,
        and false even if only the last of five nodes refused it. Raises DirectoryError if the call fails.
        """
        call = self._running_dht().store(key, value, expires_at_s, subkey=subkey)
        await _guard(call, timeout_s, "storing a record in the DHT")

    async def get(self, key: str, *, timeout_s: float = CALL_S) -> dict[str, tuple[bytes, float]]:
        """Read the values of a key from the nodes closest to it. Returns subkey -> (value, expiry).

        Raises DirectoryError if the call fails.
        """
        found = await _guard(self._running_dht().get(key, latest=True), timeout_s, "reading records from the DHT")
        if found is None or not isinstance(found.value, dict):
            return {}
        entries = ((subkey, entry.value, entry.expiration_time) for subkey, entry in found.value.items())
        return {s: (value, expiry) for s, value, expiry in entries if isinstance(s, str) and isinstance(value, bytes)}

    def _running_dht(self) -> BoundedNode:
        if self._dht is None:
            raise DirectoryError("p2pd is being restarted")
        return self._dht

    def _running_p2p(self) -> DaemonClient:
        if self._p2p is None:
            raise DirectoryError("p2pd is being restarted")
        return self._p2p

    async def _bring_up(self) -> None:
        from noloco_p2p.swarm.kademlia.client import DaemonClient
        from noloco_p2p.swarm.kademlia.protocol import BoundedNode

        listen_on = self._listen_on
        self._daemon = await Daemon.start(self._identity_path, listen_on)
        self._p2p = await _guard(DaemonClient.attach(self._daemon.control_socket), ATTACH_S, "attaching to p2pd")
        if str(self._p2p.peer_id) != self.peer_id:
            raise DirectoryError(
                f"p2pd loaded identity {self._p2p.peer_id} from {self._identity_path} instead of {self.peer_id}"
            )
        addresses = await _guard(self._p2p.get_visible_maddrs(), ATTACH_S, "asking p2pd for its addresses")
        suffix = f"/p2p/{self.peer_id}"
        self._listening = [str(address).removesuffix(suffix) for address in addresses]
        if listen_on.port == 0:
            self._listen_on = replace(listen_on, port=_port_of(self._listening))
        self._dht = BoundedNode(self._p2p, is_client=self._is_client, own_addresses=self._addresses, guard=self.guard)
        if not self._is_client:
            await _guard(self._dht.bounded.serve(), ATTACH_S, "starting the DHT")
        for protocol, handler in self._handlers.items():
            await self.handle_streams(protocol, handler)

    async def _tear_down(self) -> None:
        dht, p2p, daemon = self._dht, self._p2p, self._daemon
        self._dht = self._p2p = self._daemon = None
        try:
            if dht is not None:
                dht.end()
            if p2p is not None:
                await _guard(p2p.detach(), CLOSE_S, "detaching from p2pd")
        except DirectoryError as error:
            logger.debug("%s", error)
        finally:
            if daemon is not None:
                await daemon.stop()
                for _ in range(NOTICE_TURNS):
                    await asyncio.sleep(0)

    async def _watch(self) -> None:
        while True:
            reason = await self._lost()
            logger.warning("p2pd has stopped (%s); restarting it", reason)
            await self._restart()
            self.on_restart()

    async def _lost(self) -> str:
        """Wait until the daemon has ended, has closed its connection, or must be killed. Returns the reason."""
        assert self._daemon is not None
        ended = asyncio.create_task(self._daemon.ended())
        unfit = asyncio.create_task(self._unfit())
        try:
            connection = self._running_p2p().connection_tasks()
            await asyncio.wait({ended, unfit, *connection}, return_when=asyncio.FIRST_COMPLETED)
            if unfit.done():
                self._daemon.kill()  # a stopped process does not react to SIGTERM
            await asyncio.wait({ended}, timeout=EXIT_S)
            if unfit.done():
                return unfit.result()
            return ended.result() if ended.done() else "its connection was closed"
        finally:
            ended.cancel()
            unfit.cancel()

    async def _unfit(self) -> str:
        """Wait until the daemon uses too much memory, or has not answered for HUNG_S. Returns the reason.

        A new request is sent before each check, so the daemon is not restarted merely because this program was paused.
        """
        assert self._daemon is not None
        answered_s = time.monotonic()
        while time.monotonic() - answered_s < HUNG_S:
            if self._daemon.memory_bytes() > MAX_MEMORY_BYTES:
                return f"it used more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
            await asyncio.sleep(PING_S)
            with suppress(DirectoryError):
                await _guard(self._running_p2p().answers(), PING_S, "pinging p2pd")
                answered_s = time.monotonic()
        return "it did not answer"

    async def _restart(self) -> None:
        for attempt in range(2**31):
            try:
                await self._tear_down()
                await asyncio.sleep(RESTART_PAUSES_S[min(attempt, len(RESTART_PAUSES_S) - 1)])
                await self._bring_up()
                return
            except (DirectoryError, OSError) as error:  # for example, out of file descriptors
                logger.warning("could not restart p2pd: %s", error)


def _port_of(multiaddrs: Sequence[str]) -> int:
    for multiaddr in multiaddrs:
        parts = multiaddr.split("/")
        if len(parts) >= 5 and parts[3] == "tcp":
            return int(parts[4])
    raise DirectoryError(f"p2pd is not listening on any TCP address (its addresses: {', '.join(multiaddrs) or 'none'})")


async def knock(address: str) -> str:
    """Check whether a server listens at a TCP multiaddr.

    If no server listens there, this returns the reason. Otherwise, and for other kinds of addresses, it returns an
    empty string.
    """
    target = tcp_target(address)
    if target is None:
        return ""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*target), KNOCK_S)
    except TimeoutError:
        return f"no answer within {KNOCK_S:.0f} s"
    except (OSError, ValueError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    writer.close()
    return ""


async def _guard(call: Awaitable[T], timeout_s: float, what: str) -> T:
    """Await a call with a time limit, and turn all errors of hivemind into DirectoryErrors."""
    try:
        return await asyncio.wait_for(call, timeout_s)
    except TimeoutError:
        raise DirectoryError(f"{what}: no answer within {timeout_s:.0f} s") from None
    except DirectoryError:
        raise
    except Exception as error:  # hivemind and the layers below it raise many kinds of errors
        raise DirectoryError(f"{what}: {type(error).__name__}: {error}") from error
