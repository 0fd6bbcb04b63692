"""Calls to peers that nobody can dial, by their relays: a local port for each, behind which gRPC finds the peer.

    gRPC client -> local port -> Pipe == stream to a relay == stream to the peer == Pipe -> gRPC server

A path that breaks is replaced, by another relay if need be, and the connection goes on: gRPC sees a pause at most.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import CorruptPayload, DirectoryError, Unreachable
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import short_id
from noloco_p2p.swarm.node import SwarmNode, end_tasks
from noloco_p2p.swarm.pipe import Pipe
from noloco_p2p.swarm.relay import ANSWER_S, BROKEN, CALL, TUNNEL, YES, open_told, relays_of

logger = logging.getLogger(__name__)

HELLO = struct.Struct(">16sQ")  # id of the connection, bytes received so far
ANSWER = struct.Struct(">BQ")  # 1 = go on, 0 = not known here; bytes received so far
RESUME_S = 12.0  # a connection without a path; gRPC gives up after 15 s
RETRY_S = 0.3
MAX_PORTS = 64
MAX_SESSIONS = 64
FAULTS = (*BROKEN, CorruptPayload, TimeoutError, Unreachable)

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class _Port:
    """Where calls to one peer are taken."""

    listener: socket.socket
    accepting: asyncio.Task[None]

    def close(self) -> None:
        self.accepting.cancel()
        self.listener.close()


@dataclass(slots=True)
class _Session:
    """A connection that came in by a tunnel."""

    pipe: Pipe | None = None  # while the own server is being connected to
    writer: asyncio.StreamWriter | None = None  # of the path of now
    carrying: asyncio.Lock = field(default_factory=asyncio.Lock)


class Tunnels:
    """Both sides of it, and the candidates of the directory with the addresses at which they are reached so.

    `live` and `multiaddrs` tell of live peers; `wanted`: this peer cannot be dialled, so that peers of its kind make no
    offers to it, nor it to them, but by tunnels; `server` is HOST and PORT of the own gRPC server, once it is there;
    `relays` are those that hold a place for this peer: nobody else brings calls of others.
    """

    def __init__(
        self,
        node: SwarmNode,
        *,
        live: Callable[[], Sequence[Candidate]],
        multiaddrs: Callable[[], Mapping[str, Sequence[str]]],
        wanted: Callable[[], bool],
        server: Callable[[], tuple[str, int]],
        relays: Callable[[], Collection[str]],
        guard: DialGuard,
    ) -> None:
        self.local_ports: dict[int, str] = {}  # from which calls that came by a tunnel reach the own server -> relay
        self._node = node
        self._live = live
        self._multiaddrs = multiaddrs
        self._wanted = wanted
        self._server = server
        self._relays = relays
        self._guard = guard
        self._ports: dict[str, _Port] = {}
        self._sessions: dict[bytes, _Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._node.handle_streams(TUNNEL, self._on_tunnel)

    async def stop(self) -> None:
        await end_tasks(self._tasks)
        for port in self._ports.values():
            port.close()
        for session in list(self._sessions.values()):
            if session.pipe:
                session.pipe.close()

    def live(self) -> Sequence[Candidate]:
        """As the directory tells them, but for those that only a tunnel reaches."""
        return self.reached(self._live())

    def reached(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The same peers; who can be called by a tunnel alone has the address of a local port."""
        if all(candidate.can_be_called for candidate in candidates) or not self._wanted():
            return candidates
        ways = {peer: relays_of(multiaddrs) for peer, multiaddrs in self._multiaddrs().items()}
        return [
            self._by_tunnel(candidate) if ways.get(candidate.peer_id) and not candidate.can_be_called else candidate
            for candidate in candidates
        ]

    def _by_tunnel(self, candidate: Candidate) -> Candidate:
        port = self._port_for(candidate.peer_id)
        return replace(candidate, address=f"127.0.0.1:{port}", can_be_called=True) if port else candidate

    # calling

    def _port_for(self, peer_id: str) -> int | None:
        if peer_id not in self._ports:
            if len(self._ports) >= MAX_PORTS:
                self._close_ports_of_the_gone()
            if len(self._ports) >= MAX_PORTS:
                return None
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            self._ports[peer_id] = _Port(listener, self._own(self._listen(peer_id, listener)))
        return self._ports[peer_id].listener.getsockname()[1]

    def _close_ports_of_the_gone(self) -> None:
        for peer_id in self._ports.keys() - self._multiaddrs().keys():
            self._ports.pop(peer_id).close()

    async def _listen(self, peer_id: str, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
                reader, writer = await asyncio.open_connection(sock=connection)
            except OSError as error:  # out of descriptors, for example: not for ever
                logger.debug("a call to %s could not be taken: %s", short_id(peer_id), error)
                await asyncio.sleep(RETRY_S)
                continue
            pipe = Pipe(reader, writer)
            calling = self._own(self._call(peer_id, pipe))
            calling.add_done_callback(lambda _, pipe=pipe: pipe.close())  # also of a task that never began

    async def _call(self, peer_id: str, pipe: Pipe) -> None:
        """Carry one connection until it is through, or no path can be had for RESUME_S."""
        session_id, loop = secrets.token_bytes(16), asyncio.get_running_loop()
        had_path_s = loop.time()
        while not pipe.is_done and loop.time() - had_path_s < RESUME_S:
            for relay, address in relays_of(self._multiaddrs().get(peer_id, ())).items():
                try:
                    reader, writer, received = await self._path(peer_id, relay, address, session_id, pipe.received)
                    had_path_s = loop.time()
                    await pipe.carry(reader, writer, peer_received=received)
                    return
                except ConnectionAbortedError:  # it is through there, or given up
                    return
                except FAULTS as error:
                    logger.debug("a tunnel to %s by %s broke: %s", short_id(peer_id), short_id(relay), error)
            await asyncio.sleep(RETRY_S)

    async def _path(
        self, peer_id: str, relay: str, address: str, session_id: bytes, received: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
        """A way to the peer that knows the connection. Raises what a broken stream does, TimeoutError."""
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await open_told(self._node, self._guard, relay, address, CALL)
            try:
                writer.write(peer_id.encode() + b"\n")
                if await reader.readline() != YES:
                    raise DirectoryError("the relay cannot call it")
                writer.write(HELLO.pack(session_id, received))
                is_known, there = ANSWER.unpack(await reader.readexactly(ANSWER.size))
                if not is_known:
                    raise ConnectionAbortedError("the other side has ended it")
            except BaseException:
                writer.close()
                raise
        return reader, writer, there

    # answering

    async def _on_tunnel(self, relay: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(ANSWER_S):
            session_id, received = HELLO.unpack(await reader.readexactly(HELLO.size))
        if relay not in self._relays():
            return
        session = self._sessions.get(session_id)
        if session is None:
            if received or len(self._sessions) >= MAX_SESSIONS:
                writer.write(ANSWER.pack(0, 0))
                return
            session = self._sessions[session_id] = _Session()  # at once: another stream may name it meanwhile
        if session.writer:
            session.writer.close()  # a path that its caller has given up
        session.writer = writer
        async with session.carrying:
            try:
                session.pipe = session.pipe or Pipe(*await self._connect(relay))
                writer.write(ANSWER.pack(1, session.pipe.received))
                await session.pipe.carry(reader, writer, peer_received=received)
            except FAULTS as error:
                logger.debug("a tunnel by %s broke: %s", short_id(relay), error)
        if session.writer is writer:
            self._own(self._end(session_id, session, writer))

    async def _end(self, session_id: bytes, session: _Session, writer: asyncio.StreamWriter) -> None:
        """At once when it is through, else when no other path came in time."""
        if session.pipe and not session.pipe.is_done:
            await asyncio.sleep(RESUME_S)
        if session.writer is writer:
            del self._sessions[session_id]
            if session.pipe:
                session.pipe.close()

    async def _connect(self, relay: str) -> Ends:
        host, port = self._server()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.bind((host, 0))
            own_port: int = connection.getsockname()[1]
            self.local_ports[own_port] = relay  # before the server sees it
            try:
                await asyncio.get_running_loop().sock_connect(connection, (host, port))
                reader, writer = await asyncio.open_connection(sock=connection)
            except BaseException:
                del self.local_ports[own_port]
                raise
        except BaseException:
            connection.close()
            raise
        self._own(self._forget(own_port, writer))
        return reader, writer

    async def _forget(self, port: int, writer: asyncio.StreamWriter) -> None:
        try:
            await writer.wait_closed()
        except OSError:
            pass
        finally:
            self.local_ports.pop(port, None)

    def _own(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
