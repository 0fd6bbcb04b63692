"""Two peers that nobody can dial agree, by a relay of one of them, to connect to each other at the same moment.

    caller            relay            called        each first asks the relay from where it is seen (tcp.py)
      | -- seen, token ------------------> |
      | <-- seen, took_s, (local) -------- |         a round trip of the caller, without the time that the other took
      | -- (local) ----------------------> |         called connects now, the caller half a round trip later: hole.py

Words are lines of JSON. `local` is said and used only where both are seen at the same address: in one household. What
a partner says makes this peer dial one public address, at which others see the partner, or one in its own household,
and each is a dial that the guard counts.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from dataclasses import dataclass

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.hosts import ip_of, is_public
from noloco_p2p.swarm.hole import TOKEN_BYTES, Hole
from noloco_p2p.swarm.relay import Ends
from noloco_p2p.tcp import Endpoint, endpoint

MAX_LINE_BYTES = 512
PUNCH_S = 3.5  # for all of it: the call goes by the relay then, and has five seconds to connect
MAX_WAIT_S = 1.0  # half a round trip at most
NO_TOKEN = bytes(TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class Words:
    """What one side says at once; what a line leaves out has its default."""

    seen: Endpoint | None = None
    local: Endpoint | None = None
    token: bytes = NO_TOKEN
    took_s: float = 0.0  # from the other side's line to this one

    def line(self) -> bytes:
        values = {"seen": self.seen, "local": self.local, "token": self.token.hex(), "took_s": self.took_s}
        return json.dumps(values).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Words:
        """Raises ValueError for anything that is none."""
        if len(line) > MAX_LINE_BYTES or not line.endswith(b"\n"):
            raise ValueError("the partner's line is no line, or too long")
        try:
            values = json.loads(line)
            seen, local = (endpoint(*values[name]) if values[name] else None for name in ("seen", "local"))
            token, took_s = bytes.fromhex(values["token"]), values["took_s"]
        except (KeyError, TypeError, RecursionError, AttributeError) as error:
            raise ValueError(f"the partner's line lacks something: {error}") from None
        is_time = isinstance(took_s, (int, float)) and 0.0 <= took_s <= PUNCH_S
        if len(token) != TOKEN_BYTES or not is_time:
            raise ValueError("the partner's line has no such token or time")
        return cls(seen, local, token, took_s)


def in_one_household(one: Endpoint, other: Endpoint) -> bool:
    return one[0] == other[0]


def targets(own: Endpoint, seen: Endpoint | None, local: Endpoint | None, *, only_public: bool) -> list[Endpoint]:
    """Which of the partner's endpoints to connect to; `own` and `seen`: at which others see this peer and the partner.

    `only_public`: as of `DialGuard`. Raises ValueError when the partner names none that may be dialled.
    """
    if seen is None or (only_public and not is_public(seen[0])) or ip_of(seen[0]).version != ip_of(own[0]).version:
        raise ValueError("the partner names no address that may be dialled")
    if local and in_one_household(own, seen) and ip_of(local[0]).version == ip_of(seen[0]).version and _is_home(local):
        return [local, seen]
    return [seen]


def _is_home(local: Endpoint) -> bool:
    """Whether an address of a household: private, and not of one machine alone."""
    address = ip_of(local[0])
    return address.is_private and not (address.is_loopback or address.is_multicast or address.is_unspecified)


def wait_s(round_trip_s: float, took_s: float) -> float:
    """Half a round trip: the partner has the last line then, and connects."""
    return min(max(round_trip_s - took_s, 0.0) / 2, MAX_WAIT_S)


class Puncher:
    """Both sides of it. Raises OSError, ValueError, TimeoutError, Unreachable: there is no hole, and the relay is
    left."""

    def __init__(self, guard: DialGuard) -> None:
        self._guard = guard

    async def call(self, peer_id: str, relay: Ends, observer: Endpoint) -> socket.socket:
        """A connection to the peer; `relay` leads to it."""
        reader, writer = relay
        loop = asyncio.get_running_loop()
        hole = Hole()
        try:
            async with asyncio.timeout(PUNCH_S):
                own, own_local = await hole.look(observer)
                token, said_s = secrets.token_bytes(TOKEN_BYTES), loop.time()
                await _say(writer, Words(seen=own, token=token))
                partner = Words.parse(await reader.readline())
                pause_s = wait_s(loop.time() - said_s, partner.took_s)
                ways = targets(own, partner.seen, partner.local, only_public=self._guard.only_public)
                await _say(writer, Words(local=own_local if len(ways) > 1 else None))
                await asyncio.sleep(pause_s)
                return await self._open(hole, peer_id, ways, token, says_first=True)
        finally:
            hole.close()

    async def answer(self, relay: Ends, observer: Endpoint) -> socket.socket:
        """A connection from whoever calls by that relay."""
        reader, writer = relay
        loop = asyncio.get_running_loop()
        hole = Hole()
        try:
            async with asyncio.timeout(PUNCH_S):
                looking = asyncio.create_task(hole.look(observer))
                try:
                    caller = Words.parse(await reader.readline())
                    heard_s = loop.time()
                    own, own_local = await looking
                finally:
                    looking.cancel()
                is_home = caller.seen is not None and in_one_household(own, caller.seen)
                local = own_local if is_home else None
                await _say(writer, Words(seen=own, local=local, took_s=loop.time() - heard_s))
                last = Words.parse(await reader.readline())
                ways = targets(own, caller.seen, last.local, only_public=self._guard.only_public)
                return await self._open(hole, "", ways, caller.token, says_first=False)
        finally:
            hole.close()

    async def _open(
        self, hole: Hole, peer_id: str, ways: list[Endpoint], token: bytes, *, says_first: bool
    ) -> socket.socket:
        for host, _ in ways:
            await self._guard.way(peer_id, host)
        connection = await hole.open(ways, token, says_first=says_first)
        self._guard.reached(peer_id, str(ip_of(connection.getpeername()[0])))
        return connection


async def _say(writer: asyncio.StreamWriter, words: Words) -> None:
    writer.write(words.line())
    await writer.drain()
