"""Punches TCP holes, through which two peers that nobody can dial open a direct connection.

    caller                  relay                  called
      | -- seen, token, round trip ------------------> |
      | <------------------------- seen, (local) ----- |

Many routers map an internal port to the same external port, whatever the destination. A relay that is called from the
internal port sees this external port. Each peer therefore asks the relay for the address and port at which the relay
sees it (`tcp.py`), and sends the answer as `seen`. Then both peers connect to each other at the same time: the caller
when it receives the message of the called peer, and the called peer half a round trip after it has sent that message,
which is when the message should arrive. To each router, the packets from the partner look like answers, so it lets them
in. Each peer also listens on its port, because the partner may connect first, and some routers accept connections from
anybody. The first connection that carries the token in both directions is kept, and all others are closed.

Messages are lines of JSON. Each peer measures its round-trip time to the relay, and the sum of the two is the
round-trip time between the peers. `local` is sent only if the relay sees both peers at the same address, because they
are then probably on the same local network. A message can make a peer dial one public address, which the partner claims
as its own, and one address on the local network. The guard limits these dials.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.hosts import ip_of, is_home, is_public
from noloco_p2p.owned_tasks import end_tasks
from noloco_p2p.swarm.streams import MAX_LINE_BYTES, Ends, read_line
from noloco_p2p.tcp import Endpoint, ask_from_where, endpoint, tune

PUNCH_S = 3.5  # for the whole attempt; the caller waits 5 s, so there is time left to connect through the relay
MAX_WAIT_S = 1.0  # the limit for half a round-trip time
TOKEN_BYTES = 16
NO_TOKEN = bytes(TOKEN_BYTES)
MAX_TRIES, AGAIN_S = 8, 0.2  # A target may refuse the connection because the partner is not ready yet.
BACKLOG = MAX_ACCEPTED = 8  # connections, one of which is the partner's


@dataclass(frozen=True, slots=True)
class Words:
    """The message that one peer sends to the other through the relay."""

    seen: Endpoint | None = None
    local: Endpoint | None = None
    token: bytes = NO_TOKEN
    round_trip_s: float = 0.0  # to the relay

    def line(self) -> bytes:
        values = {"seen": self.seen, "local": self.local, "token": self.token.hex(), "round_trip_s": self.round_trip_s}
        return json.dumps(values).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Words:
        """Parse a line. Raises ValueError if it is not a valid message."""
        if len(line) > MAX_LINE_BYTES or not line.endswith(b"\n"):
            raise ValueError("the partner's message is incomplete or too long")
        try:
            values = json.loads(line)
            seen, local = (endpoint(*values[name]) if values[name] else None for name in ("seen", "local"))
            token, round_trip_s = bytes.fromhex(values["token"]), values["round_trip_s"]
        except (KeyError, TypeError, RecursionError, AttributeError) as error:
            raise ValueError(f"the partner's message is invalid: {error}") from None
        is_time = isinstance(round_trip_s, (int, float)) and 0.0 <= round_trip_s <= PUNCH_S
        if len(token) != TOKEN_BYTES or not is_time:
            raise ValueError("the partner's message has an invalid token or time")
        return cls(seen, local, token, round_trip_s)


def targets(own: Endpoint, seen: Endpoint | None, local: Endpoint | None, *, only_public: bool) -> list[Endpoint]:
    """Return the partner's endpoints to dial.

    `own` and `seen` are the endpoints at which the relay sees this peer and the partner. `local` is the partner's
    endpoint on its local network, if the partner has sent one. `only_public` is the same as in `DialGuard`. Raises
    ValueError if the partner has sent no endpoint that may be dialled.
    """
    if seen is None or (only_public and not is_public(seen[0])) or ip_of(seen[0]).version != ip_of(own[0]).version:
        raise ValueError("the partner sent no address that may be dialled")
    is_mate = local and own[0] == seen[0] and ip_of(local[0]).version == ip_of(seen[0]).version and is_home(local[0])
    return [local, seen] if local and is_mate else [seen]


def wait_s(own_round_trip_s: float, callers_s: float) -> float:
    """Return half of the round-trip time between the peers through the relay, but at most MAX_WAIT_S.

    After this time, the caller has received the answer.
    """
    return min((own_round_trip_s + callers_s) / 2, MAX_WAIT_S)


async def call_through_hole(guard: DialGuard, peer_id: str, relay: Ends, observer: Endpoint) -> socket.socket:
    """Open a connection to the peer that is called through the stream `relay`.

    `observer` is the endpoint at which the relay tells this peer its external address. Raises OSError, ValueError,
    TimeoutError or Unreachable if no hole can be punched.
    """
    reader, writer = relay
    async with asyncio.timeout(PUNCH_S):
        with Hole(guard) as hole:
            await hole.look(observer)
            token = secrets.token_bytes(TOKEN_BYTES)
            writer.write(Words(hole.seen, token=token, round_trip_s=hole.round_trip_s).line())
            partner = Words.parse(await read_line(reader))
            ways = targets(hole.seen, partner.seen, partner.local, only_public=guard.only_public)
            return await hole.open(ways, token, peer_id=peer_id, says_first=True)


async def answer_through_hole(guard: DialGuard, relay: Ends, observer: Endpoint) -> socket.socket:
    """Open a connection to the peer that calls through the stream `relay`. The rest is as in `call_through_hole`."""
    reader, writer = relay
    async with asyncio.timeout(PUNCH_S):
        with Hole(guard) as hole:
            await hole.look(observer)
            caller = Words.parse(await read_line(reader))
            ways = targets(hole.seen, caller.seen, None, only_public=guard.only_public)
            writer.write(Words(hole.seen, hole.local if hole.seen[0] == ways[0][0] else None).line())
            await asyncio.sleep(wait_s(hole.round_trip_s, caller.round_trip_s))
            return await hole.open(ways, caller.token, says_first=False)


class Hole:
    """One attempt to punch a hole: a port of this machine. At the end of the block, all its sockets are closed.

    After `look`, `seen` and `local` are the port as an observer sees it and on this machine. `round_trip_s` is the
    round-trip time to the observer.
    """

    seen: Endpoint
    local: Endpoint

    def __init__(self, guard: DialGuard) -> None:
        self.round_trip_s = 0.0
        self._guard = guard
        self._loop = asyncio.get_running_loop()
        self._family = socket.AF_INET
        self._port = 0
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._found: asyncio.Future[socket.socket] = self._loop.create_future()
        self._token, self._says_first = NO_TOKEN, False

    def __enter__(self) -> Hole:
        return self

    def __exit__(self, *exception: object) -> None:
        for each in self._open:
            each.close()
        self._open.clear()

    async def look(self, observer: Endpoint) -> None:
        """Ask an observer for the address and port at which it sees this peer, and listen on the local port.

        The connection to the observer stays open, because routers forget the mapping when it ends. Raises OSError or
        ValueError if the observer does not answer properly.
        """
        self._family = socket.AF_INET6 if ":" in observer[0] else socket.AF_INET
        connection, began_s = self._bound(), self._loop.time()
        await self._loop.sock_connect(connection, observer)
        self.round_trip_s = self._loop.time() - began_s
        host, self._port = connection.getsockname()[:2]
        self._listener = self._bound()
        self._listener.listen(BACKLOG)
        self.seen, self.local = await ask_from_where(connection), (host, self._port)

    async def open(
        self, ways: Sequence[Endpoint], token: bytes, *, peer_id: str = "", says_first: bool
    ) -> socket.socket:
        """Connect to all endpoints and accept connections until one of them proves to be the partner's.

        Call it after `look`. It has no time limit of its own, so the caller must set one. The caller owns the socket
        that is returned. Raises Unreachable if the guard forbids dialling one of the endpoints.
        """
        assert self._listener is not None
        for host, _ in ways:
            await self._guard.way(peer_id, host)
        self._token, self._says_first = token, says_first
        tasks = [asyncio.create_task(self._connect(way)) for way in ways]
        tasks.append(asyncio.create_task(self._accept(self._listener)))
        try:
            connection = await self._found
        finally:
            await end_tasks(tasks)
        self._open.discard(connection)
        tune(connection)
        self._guard.reached(peer_id, str(ip_of(connection.getpeername()[0])))
        return connection

    def _bound(self) -> socket.socket:
        """Create a socket bound to this hole's port. The first socket chooses the port, and the others share it."""
        made = socket.socket(self._family, socket.SOCK_STREAM)
        self._open.add(made)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(("", self._port))
        return made

    async def _connect(self, target: Endpoint) -> None:
        for _ in range(MAX_TRIES):
            with suppress(OSError):  # refused, or the partner's connection between the same ports arrived first
                await self._greet(self._bound(), target)
            await asyncio.sleep(AGAIN_S)

    async def _accept(self, listener: socket.socket) -> None:
        greeting: set[asyncio.Task[None]] = set()
        try:
            while len(greeting) < MAX_ACCEPTED:
                connection, _ = await self._loop.sock_accept(listener)
                self._open.add(connection)
                greeting.add(asyncio.create_task(self._greet(connection)))
        finally:
            await end_tasks(greeting)

    async def _greet(self, connection: socket.socket, target: Endpoint | None = None) -> None:
        """Connect to `target`, if it is given, and exchange the token. Then keep this connection if the token is right
        and no other connection has been kept, and otherwise close it.

        The peer that receives the token first answers on a single connection only, so both peers keep the same one.
        """
        try:
            if target:
                await self._loop.sock_connect(connection, target)
            if self._says_first:
                connection.send(self._token)  # the send buffer of a new connection has space for it
            heard = b""
            while len(heard) < TOKEN_BYTES:
                more = await self._loop.sock_recv(connection, TOKEN_BYTES - len(heard))
                if not more:
                    break
                heard += more
            if heard == self._token and not self._found.done():
                if not self._says_first:
                    connection.send(self._token)
                self._found.set_result(connection)
        except OSError:
            if target:
                raise
        finally:
            is_kept = self._found.done() and not self._found.cancelled() and self._found.result() is connection
            if not is_kept:
                self._open.discard(connection)
                connection.close()
