"""Carries calls between peers that cannot be dialled, through tunnels.

A tunnel leads through a hole in the routers or through a relay. For each peer that needs a tunnel, there is a local
port to which the gRPC client connects:

    gRPC client -> local port == hole in the routers (punch.py) == gRPC server
                       or     == stream to a relay == stream to the peer == gRPC server

Each connection uses its own hole, and the relay only helps to punch it. If punching fails for a peer, the next
connections to that peer use the relay immediately. A connection through a relay is lost when the relay is lost. A swap
then fails, a fetch continues with the missing chunks, and the next call uses another relay.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from noloco_p2p.errors import DirectoryError, Unreachable
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import short_id
from noloco_p2p.owned_tasks import OwnedTasks
from noloco_p2p.swarm.dial_back import Reach
from noloco_p2p.swarm.node import SwarmNode
from noloco_p2p.swarm.punch import answer_through_hole, call_through_hole
from noloco_p2p.swarm.relay import (
    ANSWER_S,
    BROKEN,
    CALL,
    HOLE,
    NO,
    PUNCH,
    TUNNEL,
    YES,
    relays_of,
    splice,
)
from noloco_p2p.swarm.streams import Ends, read_line
from noloco_p2p.tcp import BLOCK_BYTES, Endpoint, Splice, endpoint, tune

logger = logging.getLogger(__name__)

RETRY_S = 0.3
MAX_PORTS = 64
MAX_SERVED = 64  # open connections that arrived through relays
MAX_PUNCHING = 16  # simultaneous attempts to punch holes at the request of others
AGAIN_S = 300.0  # the pause after a failed attempt to punch a hole to a peer
FAULTS = (*BROKEN, TimeoutError, Unreachable)

Take = Callable[[socket.socket, str], None]


class Tunnels:
    """Opens tunnels to other peers, and accepts tunnels from them.

    `multiaddrs` returns the multiaddrs of live peers by peer id. `wanted` returns whether this peer cannot be dialled;
    such peers need tunnels to make offers to each other. `relays` returns the peers that hold a reservation for this
    one, and only those peers may forward calls to it.
    """

    def __init__(
        self,
        node: SwarmNode,
        *,
        multiaddrs: Callable[[], Mapping[str, Sequence[str]]],
        wanted: Callable[[], bool],
        relays: Callable[[], Collection[str]],
    ) -> None:
        self.last_ways: dict[str, Reach] = {}  # peer id -> the route of the last call to it, PUNCHED or RELAYED
        self.num_holes = 0  # total number of holes punched, for calls in either direction
        self.num_served = 0  # open connections to this peer's server that relays have brought
        self._take: Take = lambda connection, relay: connection.close()
        self._node = node
        self._multiaddrs = multiaddrs
        self._wanted = wanted
        self._relays = relays
        self._num_punching = 0
        self._no_hole_before_s: dict[str, float] = {}
        # peer id -> the local port for calls to this peer, and the task that accepts them
        self._ports: dict[str, tuple[socket.socket, asyncio.Task[None]]] = {}
        self._tasks = OwnedTasks("a call through a tunnel")

    async def start(self, take: Take) -> None:
        """Accept tunnels. `take` hands a connection to this peer's server, with the relay that brings it, or "" for a
        hole.
        """
        self._take = take
        await self._node.handle_streams(TUNNEL, self._on_tunnel)
        await self._node.handle_streams(HOLE, self._on_hole)

    async def stop(self) -> None:
        await self._tasks.stop(grace_s=0.0)
        for listener, _ in self._ports.values():
            listener.close()

    def reached(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates, with a local port as the address of each peer that only a tunnel can reach."""
        if all(candidate.can_be_called for candidate in candidates) or not self._wanted():
            return candidates
        ways = {peer: relays_of(multiaddrs) for peer, multiaddrs in self._multiaddrs().items()}
        found: list[Candidate] = []
        for candidate in candidates:
            port = None
            if not candidate.can_be_called and ways.get(candidate.peer_id):
                port = self._port_for(candidate.peer_id)
            found.append(replace(candidate, address=f"127.0.0.1:{port}", can_be_called=True) if port else candidate)
        return found

    # calling

    def _port_for(self, peer_id: str) -> int | None:
        if peer_id not in self._ports:
            if len(self._ports) >= MAX_PORTS:  # close those of the peers that are gone
                for gone in self._ports.keys() - self._multiaddrs().keys():
                    listener, accepting = self._ports.pop(gone)
                    accepting.cancel()
                    listener.close()
                    self.last_ways.pop(gone, None)
                    self._no_hole_before_s.pop(gone, None)
            if len(self._ports) >= MAX_PORTS:
                return None
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            # Accepted connections inherit this size. Otherwise, megabytes would queue up here and delay answers.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BLOCK_BYTES)
            self._ports[peer_id] = listener, self._tasks.start(self._listen(peer_id, listener))
        return self._ports[peer_id][0].getsockname()[1]

    async def _listen(self, peer_id: str, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # for example, temporarily out of file descriptors
                logger.debug("could not accept a call to %s: %s", short_id(peer_id), error)
                await asyncio.sleep(RETRY_S)
                continue
            calling = self._tasks.start(self._call(peer_id, connection))
            calling.add_done_callback(lambda _, near=connection: near.close())  # closed even if the task never started

    async def _call(self, peer_id: str, near: socket.socket) -> None:
        """Carry one connection through a hole, or else through the first relay that reaches the peer."""
        relays = relays_of(self._multiaddrs().get(peer_id, ()))
        if hole := await self._hole(peer_id, relays):
            self.last_ways[peer_id] = Reach.PUNCHED
            tune(near)
            await Splice(near, hole).run()
            return
        ends = await asyncio.open_connection(sock=near.dup())  # a copy, because its transport closes it
        for relay, address in relays.items():
            try:
                way, _ = await self._way(peer_id, relay, address, CALL)
            except FAULTS as error:
                logger.debug("could not open a tunnel to %s through %s: %s", short_id(peer_id), short_id(relay), error)
                continue
            self.last_ways[peer_id] = Reach.RELAYED
            await splice(ends, way)
            return
        ends[1].close()

    async def _hole(self, peer_id: str, relays: Mapping[str, str]) -> socket.socket | None:
        """Open a direct connection to the peer. Only one attempt is made, with the first relay that helps."""
        clock = asyncio.get_running_loop().time
        if clock() < self._no_hole_before_s.get(peer_id, 0.0):
            return None
        for relay, address in relays.items():
            try:
                ends, line = await self._way(peer_id, relay, address, PUNCH)
            except FAULTS as error:
                logger.debug("the relay %s could not reach %s: %s", short_id(relay), short_id(peer_id), error)
                continue
            try:
                connection = await call_through_hole(self._node.guard, peer_id, ends, await self._mirror(relay, line))
                self.num_holes += 1
                return connection
            except FAULTS as error:
                logger.debug("could not punch a hole to %s: %s", short_id(peer_id), error or "timed out")
            finally:
                ends[1].close()
            break
        self._no_hole_before_s[peer_id] = clock() + AGAIN_S
        return None

    async def _way(self, peer_id: str, relay: str, address: str, protocol: str) -> tuple[Ends, bytes]:
        """Open a stream to the peer through a relay. Returns the stream and the relay's first line.

        Raises TimeoutError, Unreachable or one of the errors in BROKEN if the stream cannot be opened.
        """
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await self._node.open_stream(relay, protocol, at=address)
            try:
                writer.write(peer_id.encode() + b"\n")
                line = await read_line(reader)
                if line in (NO, b"") or (protocol == CALL and line != YES):
                    raise DirectoryError("the relay cannot reach the peer")
            except BaseException:
                writer.close()
                raise
        return (reader, writer), line

    async def _mirror(self, relay: str, line: bytes) -> Endpoint:
        """Return the endpoint at which a relay tells this peer its external address.

        `line` is the relay's answer, which contains the port. Raises DirectoryError if the relay is gone, or ValueError
        if the port is invalid.
        """
        hosts = sorted(await self._node.hosts_of(relay), key=lambda host: ":" in host)  # IPv4 first
        if not hosts:
            raise DirectoryError("the relay is no longer connected")
        return endpoint(hosts[0], int(line))

    # answering

    async def _on_tunnel(self, relay: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if relay not in self._relays() or self.num_served >= MAX_SERVED:
            return
        near, far = socket.socketpair()
        self._take(far, relay)
        self.num_served += 1
        try:
            await splice((reader, writer), await _ends(near))
        finally:
            self.num_served -= 1

    async def _on_hole(self, relay: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if relay not in self._relays() or self._num_punching >= MAX_PUNCHING:
            return
        self._num_punching += 1
        try:
            async with asyncio.timeout(ANSWER_S):
                mirror = await self._mirror(relay, await read_line(reader))
            self._take(await answer_through_hole(self._node.guard, (reader, writer), mirror), "")
            self.num_holes += 1
        finally:
            self._num_punching -= 1


async def _ends(connection: socket.socket) -> Ends:
    try:
        return await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise
