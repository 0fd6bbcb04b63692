"""Punches TCP holes, through which two peers behind routers can open a direct connection.

Many routers map an internal port to the same external port, whatever the destination. A relay that is called from the
internal port sees this external port, so each peer can learn its external port from the relay. Both peers then connect
to each other's external port at the same time. To each router, the packets from the partner look like answers, so it
lets them in. Each peer also listens on its port, because the partner may connect first, and some routers accept
connections from anybody. The first connection that carries the token in both directions is kept, and all others are
closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from noloco_p2p.swarm.node import end_tasks
from noloco_p2p.tcp import Endpoint, ask_from_where, tune

TOKEN_BYTES = 16
MAX_TRIES, AGAIN_S = 8, 0.2  # A target may refuse the connection because the partner is not ready yet.
BACKLOG = MAX_ACCEPTED = 8  # connections, one of which is the partner's


@dataclass(frozen=True, slots=True)
class View:
    """A port as seen by an observer, the same port on this machine, and the round-trip time to the observer."""

    seen: Endpoint
    local: Endpoint
    round_trip_s: float


class Hole:
    """One attempt to punch a hole. Always call `close` at the end."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._family = socket.AF_INET
        self._port = 0
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None

    async def look(self, observer: Endpoint) -> View:
        """Ask an observer for the address and port at which it sees this peer, and listen on the local port.

        The connection to the observer stays open, because routers forget the mapping when it ends. Raises OSError or
        ValueError if the observer does not answer properly.
        """
        self._family = socket.AF_INET6 if ":" in observer[0] else socket.AF_INET
        connection, began_s = self._bound(), self._loop.time()
        await self._loop.sock_connect(connection, observer)
        round_trip_s = self._loop.time() - began_s
        host, self._port = connection.getsockname()[:2]
        self._listener = self._bound()
        self._listener.listen(BACKLOG)
        return View(await ask_from_where(connection), (host, self._port), round_trip_s)

    async def open(self, targets: Sequence[Endpoint], token: bytes, *, says_first: bool) -> socket.socket:
        """Connect to all targets and accept connections until one of them proves to be the partner's.

        Call it after `look`. It has no time limit of its own, so the caller must set one. The caller owns the socket
        that is returned.
        """
        assert self._listener is not None
        found: asyncio.Future[socket.socket] = self._loop.create_future()
        tasks = [asyncio.create_task(self._connect(target, token, found, says_first=says_first)) for target in targets]
        tasks.append(asyncio.create_task(self._accept(self._listener, token, found, says_first=says_first)))
        try:
            connection = await found
        finally:
            await end_tasks(tasks)
        self._open.discard(connection)
        tune(connection)
        return connection

    def close(self) -> None:
        for each in self._open:
            each.close()
        self._open.clear()

    def _bound(self) -> socket.socket:
        """Create a socket bound to this hole's port. The first socket chooses the port, and the others share it."""
        made = socket.socket(self._family, socket.SOCK_STREAM)
        self._open.add(made)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(("", self._port))
        return made

    async def _connect(
        self, target: Endpoint, token: bytes, found: asyncio.Future[socket.socket], *, says_first: bool
    ) -> None:
        for _ in range(MAX_TRIES):
            with suppress(OSError):  # refused, or the partner's connection between the same ports arrived first
                connection = self._bound()
                try:
                    await self._loop.sock_connect(connection, target)
                    await self._greet(connection, token, found, says_first=says_first)
                finally:
                    self._close_unless(found, connection)
            await asyncio.sleep(AGAIN_S)

    async def _accept(
        self,
        listener: socket.socket,
        token: bytes,
        found: asyncio.Future[socket.socket],
        *,
        says_first: bool,
    ) -> None:
        async def answer(connection: socket.socket) -> None:
            try:
                with suppress(OSError):
                    await self._greet(connection, token, found, says_first=says_first)
            finally:
                self._close_unless(found, connection)

        greeting: set[asyncio.Task[None]] = set()
        try:
            while len(greeting) < MAX_ACCEPTED:
                connection, _ = await self._loop.sock_accept(listener)
                self._open.add(connection)
                greeting.add(asyncio.create_task(answer(connection)))
        finally:
            await end_tasks(greeting)

    def _close_unless(self, found: asyncio.Future[socket.socket], connection: socket.socket) -> None:
        is_the_one = found.done() and not found.cancelled() and found.result() is connection
        if not is_the_one:
            self._open.discard(connection)
            connection.close()

    async def _greet(
        self, connection: socket.socket, token: bytes, found: asyncio.Future[socket.socket], *, says_first: bool
    ) -> None:
        """Exchange the token, and complete `found` with this connection if the token is right and `found` is still
        pending.

        The peer that receives the token first answers on a single connection only, so both peers keep the same one.
        """
        if says_first:
            connection.send(token)  # the send buffer of a new connection has space for it
        if await self._heard(connection) == token and not found.done():
            if not says_first:
                connection.send(token)
            found.set_result(connection)

    async def _heard(self, connection: socket.socket) -> bytes:
        data = b""
        while len(data) < TOKEN_BYTES and (more := await self._loop.sock_recv(connection, TOKEN_BYTES - len(data))):
            data += more
        return data
