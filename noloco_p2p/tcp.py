"""Tune TCP sockets, copy bytes between them, and let a caller find out which address others see when it calls.

A connection that begins with ASK is answered with the address and port that it comes from, and is then closed. TLS
begins with a different byte.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

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
BLOCK_BYTES = 256 * 1024  # the most that a copy holds in each direction

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


class _Block(threading.local):
    """The block of a thread, which all copies of its event loop share, because it is empty while one of them waits."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(BLOCK_BYTES))


_block = _Block()


async def ready(connection: socket.socket, *, to_write: bool = False) -> None:
    """Wait until a socket can be read or written. Unlike the functions of asyncio, this works with TLS sockets."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if to_write else (loop.add_reader, loop.remove_reader)
    add(connection, lambda: waiting.done() or waiting.set_result(None))
    try:
        await waiting
    finally:
        remove(connection)


class Splice:
    """A connection between a caller's socket `near` and a socket `far`, which leads to the server.

    `near` can be a TLS socket after its handshake. `may_take` returns how many more bytes the caller may send, and
    `admits` whether it may send this data.
    """

    def __init__(
        self,
        near: socket.socket,
        far: socket.socket,
        *,
        may_take: Callable[[], int] = lambda: BLOCK_BYTES,
        admits: Callable[[memoryview], bool] = lambda data: True,
    ) -> None:
        self.taken_bytes = self.given_bytes = 0
        self._near, self._far = near, far
        self._may_take = may_take
        self._admits = admits

    async def run(self) -> None:
        """Copy in both directions until the server ends, or the caller breaks a limit, then close both sockets.

        If the caller ends cleanly, the server is told, and can still send data.
        """
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._take())
                ways.create_task(self._give())
        except* OSError:
            pass
        finally:
            self._near.close()
            self._far.close()

    async def _take(self) -> None:
        while (room := min(self._may_take(), BLOCK_BYTES)) > 0:
            data = await _received(self._near, room)
            if not data:
                self._far.shutdown(socket.SHUT_WR)
                return
            if not self._admits(data):
                break
            self.taken_bytes += len(data)
            await _send(self._far, data)
        raise ConnectionAbortedError("the caller has sent what it may not send")

    async def _give(self) -> None:
        while data := await _received(self._far, BLOCK_BYTES):
            self.given_bytes += len(data)
            await _send(self._near, data)
        raise ConnectionAbortedError("the server has ended")


async def _received(source: socket.socket, room: int) -> memoryview:
    """Return the next data in the shared block, which is empty at the end. Raises OSError."""
    while True:
        try:
            return _block.view[: source.recv_into(_block.view, room)]
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            await ready(source)


async def _send(sink: socket.socket, data: memoryview) -> None:
    """Send data from the shared block. Raises OSError."""
    sent = _sent(sink, data)
    if sent == len(data):
        await asyncio.sleep(0)  # for the other callbacks of the event loop
        return
    left = memoryview(bytes(data[sent:]))
    while left:
        await ready(sink, to_write=True)
        left = left[_sent(sink, left) :]


def _sent(sink: socket.socket, data: memoryview) -> int:
    """Send what the socket accepts now, and return the number of bytes. Raises OSError."""
    num_bytes = 0
    with suppress(BlockingIOError, InterruptedError, ssl.SSLWantWriteError):
        while num_bytes < len(data):  # a TLS socket accepts 16 KiB at a time
            num_bytes += sink.send(data[num_bytes:])
    return num_bytes
