"""Tune TCP sockets, and let a caller find out which address others see when it calls.

A connection that begins with ASK is answered with the address and port that it comes from, and is then closed. TLS
begins with a different byte.
"""

from __future__ import annotations

import asyncio
import socket

from noloco_p2p.hosts import ip_of, is_port

ASK = b"?"
MAX_ANSWER_BYTES = 64
# The limit on data that is queued but not yet sent. Data in flight can fill the link, and more data queued behind it
# would delay a ping.
UNSENT_BYTES = 256 * 1024
# Without an acknowledgement for this long, the other machine counts as gone. gRPC uses the same value.
UNACKNOWLEDGED_MS = 5_000
FIRST_BYTE_S = 5.0
MAX_ASKING = 256

Endpoint = tuple[str, int]  # IP address and port


def tune(connection: socket.socket) -> None:
    """Set the options of a socket.

    Small messages are sent at once, little data is queued in front of a slow link, and a dead machine is noticed.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_NOTSENT_LOWAT", UNSENT_BYTES), ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS)):
        if hasattr(socket, name):  # macOS does not have all of these options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def endpoint(host: object, port: object) -> Endpoint:
    """Validate an address and a port. An IPv4-mapped IPv6 address becomes an IPv4 address. Raises ValueError."""
    if not isinstance(host, str) or not isinstance(port, int) or not is_port(str(port)):
        raise ValueError(f"{host!r} and {port!r} are not a valid address and port")
    return str(ip_of(host)), port


def seen_from(connection: socket.socket) -> bytes:
    """Return the answer to a connection that asks where it comes from, such as `192.0.2.7 31337` and a newline."""
    host, port = connection.getpeername()[:2]
    return "{} {}\n".format(*endpoint(host, port)).encode()


async def ask_from_where(connection: socket.socket) -> Endpoint:
    """Ask the other end of a connection which address it sees for this end. Raises OSError if the connection fails, and
    ValueError if the answer is invalid.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, ASK)
    answer = b""
    while not answer.endswith(b"\n"):
        data = await loop.sock_recv(connection, MAX_ANSWER_BYTES)
        answer += data
        if not data or len(answer) > MAX_ANSWER_BYTES:
            raise ValueError("the answer is not an address and a port")
    host, port = answer.decode("ascii").split()
    return endpoint(host, int(port))


class Mirror:
    """A server that tells callers the address that they come from.

    A node without a gRPC server runs it on the port that gRPC would use.
    """

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._num_asking = 0

    async def start(self, host: str, port: int) -> int:
        """Listen on the port, and return the actual port. Raises OSError if it is in use."""
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
        except OSError:  # includes TimeoutError
            pass
        finally:
            self._num_asking -= 1
            writer.close()
