"""Connects two peers that nobody can dial. Through a relay, they agree to dial each other at the same moment.

    caller                  relay                  called
      | -- seen, token, round trip ------------------> |
      | <------------------------- seen, (local) ----- |

Before this, each peer asks the relay for the address and port at which the relay sees it (`tcp.py`), and sends the
answer as `seen`. The caller connects when it receives the message of the called peer. The called peer connects half a
round trip after it has sent that message, which is when the message should arrive (`hole.py`).

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
from dataclasses import dataclass

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.hosts import ip_of, is_home, is_public
from noloco_p2p.swarm.hole import TOKEN_BYTES, Hole
from noloco_p2p.swarm.relay import Ends
from noloco_p2p.swarm.streams import MAX_LINE_BYTES, read_line
from noloco_p2p.tcp import Endpoint, endpoint

PUNCH_S = 3.5  # for the whole attempt; the caller waits 5 s, so there is time left to connect through the relay
MAX_WAIT_S = 1.0  # the limit for half a round-trip time
NO_TOKEN = bytes(TOKEN_BYTES)


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


def in_one_household(one: Endpoint, other: Endpoint) -> bool:
    return one[0] == other[0]


def targets(own: Endpoint, seen: Endpoint | None, local: Endpoint | None, *, only_public: bool) -> list[Endpoint]:
    """Return the partner's endpoints to dial.

    `own` and `seen` are the endpoints at which the relay sees this peer and the partner. `local` is the partner's
    endpoint on its local network, if the partner has sent one. `only_public` is the same as in `DialGuard`. Raises
    ValueError if the partner has sent no endpoint that may be dialled.
    """
    if seen is None or (only_public and not is_public(seen[0])) or ip_of(seen[0]).version != ip_of(own[0]).version:
        raise ValueError("the partner sent no address that may be dialled")
    if (
        local
        and in_one_household(own, seen)
        and ip_of(local[0]).version == ip_of(seen[0]).version
        and is_home(local[0])
    ):
        return [local, seen]
    return [seen]


def wait_s(own_round_trip_s: float, callers_s: float) -> float:
    """Return half of the round-trip time between the peers through the relay, but at most MAX_WAIT_S.

    After this time, the caller has received the answer.
    """
    return min((own_round_trip_s + callers_s) / 2, MAX_WAIT_S)


class Puncher:
    """Punches holes, as the caller and as the called peer.

    If no hole can be punched, its methods raise OSError, ValueError, TimeoutError or Unreachable.
    """

    def __init__(self, guard: DialGuard) -> None:
        self._guard = guard

    async def call(self, peer_id: str, relay: Ends, observer: Endpoint) -> socket.socket:
        """Open a connection to the peer that is called through the stream `relay`."""
        reader, writer = relay
        hole = Hole()
        try:
            async with asyncio.timeout(PUNCH_S):
                view, token = await hole.look(observer), secrets.token_bytes(TOKEN_BYTES)
                writer.write(Words(view.seen, token=token, round_trip_s=view.round_trip_s).line())
                partner = Words.parse(await read_line(reader))
                ways = targets(view.seen, partner.seen, partner.local, only_public=self._guard.only_public)
                return await self._open(hole, peer_id, ways, token, says_first=True)
        finally:
            hole.close()

    async def answer(self, relay: Ends, observer: Endpoint) -> socket.socket:
        """Open a connection to the peer that calls through the stream `relay`."""
        reader, writer = relay
        hole = Hole()
        try:
            async with asyncio.timeout(PUNCH_S):
                view = await hole.look(observer)
                caller = Words.parse(await read_line(reader))
                ways = targets(view.seen, caller.seen, None, only_public=self._guard.only_public)
                local = view.local if in_one_household(view.seen, ways[0]) else None
                writer.write(Words(view.seen, local).line())
                await asyncio.sleep(wait_s(view.round_trip_s, caller.round_trip_s))
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
