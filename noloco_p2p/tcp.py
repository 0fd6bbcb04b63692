"""TCP sockets: how they are set for this protocol, and how a caller learns from where it is seen.

A connection that begins with ASK is answered with the address and port that it comes from, and is closed. TLS begins
with another byte.
"""

from __future__ import annotations

import asyncio
import socket

from noloco_p2p.hosts import ip_of, is_port

ASK = b"?"
MAX_ANSWER_BYTES = 64
# What was sent and not yet acknowledged may fill the link; what waits behind it would delay a ping.
UNSENT_BYTES = 256 * 1024
UNACKNOWLEDGED_MS = 5_000  # then the other machine is gone; gRPC sets the same for its own connections
FIRST_BYTE_S = 5.0
MAX_ASKING = 256

Endpoint = tuple[str, int]  # IP address and port


def tune(connection: socket.socket) -> None:
    """A small message goes out at once, little waits behind a slow link, and a machine that is gone is noticed."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_NOTSENT_LOWAT", UNSENT_BYTES), ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS)):
        if hasattr(socket, name):  # macOS has not all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def endpoint(host: object, port: object) -> Endpoint:
    """An IPv4 address that came as IPv6 is IPv4. Raises ValueError when it is none."""
    if not isinstance(host, str) or not isinstance(port, int) or not is_port(str(port)):
        raise ValueError(f"{host!r} and {port!r} are no address and port")
    return str(ip_of(host)), port


def seen_from(connection: socket.socket) -> bytes:
    """What a connection that asks is answered: `192.0.2.7 31337` and a newline."""
    host, port = connection.getpeername()[:2]
    return "{} {}\n".format(*endpoint(host, port)).encode()


async def ask_from_where(connection: socket.socket) -> Endpoint:
    """How the other end of a connection sees this one. Raises OSError, ValueError."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, ASK)
    answer = b""
    while not answer.endswith(b"\n"):
        data = await loop.sock_recv(connection, MAX_ANSWER_BYTES)
        answer += data
        if not data or len(answer) > MAX_ANSWER_BYTES:
            raise ValueError("an answer that is no address")
    host, port = answer.decode("ascii").split()
    return endpoint(host, int(port))


class Mirror:
    """Answers those that ask, on a port of its own: for a node that has no gRPC server."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._num_asking = 0

    async def start(self, host: str, port: int) -> int:
        """The real port. Raises OSError when it is taken."""
        self._server = await asyncio.start_server(self._answer, host.strip("[]"), port)
        return self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_asking += 1
        try:
            if self._num_asking <= MAX_ASKING:
                async with asyncio.timeout(FIRST_BYTE_S):
                    if await reader.read(1) == ASK:
                        writer.write(seen_from(writer.get_extra_info("socket")))
        except OSError:  # TimeoutError is one
            pass
        finally:
            self._num_asking -= 1
            writer.close()
