"""Tune TCP sockets, copy bytes between them, and let a caller find out which address others see when it calls.

A connection that begins with ASK is answered with the address and port that it comes from, and is then closed. TLS
begins with a different byte.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

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


# All splices share this block, because it holds no data between two callbacks of the event loop.
_block = memoryview(bytearray(BLOCK_BYTES))


class OneWay:
    """A copy in one direction, from `source` to `sink`.

    It reads only while it holds no unsent data. `may_take` returns how many more bytes may be read. The copy ends if it
    returns 0, or if `admits` returns false for the data. `on_end` is called once, with true if the source ended
    cleanly.
    """

    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        *,
        may_take: Callable[[], int],
        on_end: Callable[[bool], None],
        admits: Callable[[memoryview], bool] = lambda data: True,
    ) -> None:
        self.passed_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._source, self._sink = source, sink
        self._may_take = may_take
        self._admits = admits
        self._on_end = on_end
        self._held = memoryview(b"")
        self._is_reading = self._is_writing = False

    def start(self) -> None:
        self._loop.add_reader(self._source, self._read)
        self._is_reading = True

    def stop(self) -> None:
        """Stop copying. Call this before the sockets are closed."""
        if self._is_reading:
            self._loop.remove_reader(self._source)
        if self._is_writing:
            self._loop.remove_writer(self._sink)
        self._is_reading = self._is_writing = False

    def _read(self) -> None:
        room = min(self._may_take(), BLOCK_BYTES)
        try:
            num_bytes = self._receive(room)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return
        except OSError:
            num_bytes = 0
        data = _block[:num_bytes]
        if not data or not self._admits(data):
            self._end(is_peaceful=room > 0 and not data)
            return
        self.passed_bytes += num_bytes
        sent = self._send(data)
        if sent is not None and sent < num_bytes:
            self._held = memoryview(bytes(data[sent:]))
            self._loop.remove_reader(self._source)
            self._loop.add_writer(self._sink, self._write)
            self._is_reading, self._is_writing = False, True

    def _write(self) -> None:
        sent = self._send(self._held)
        if sent is None:
            return
        self._held = self._held[sent:]
        if not self._held:
            self._loop.remove_writer(self._sink)
            self._is_writing = False
            self.start()

    def _receive(self, room: int) -> int:
        """Read up to `room` bytes into the block, and return their number, or 0 at the end. Raises OSError."""
        num_bytes = 0
        while num_bytes < room:  # a TLS socket delivers 16 KiB at a time, and no event for data that it holds
            try:
                new_bytes = self._source.recv_into(_block[num_bytes:], room - num_bytes)
            except OSError:
                if not num_bytes:
                    raise
                break  # the next read raises it again
            num_bytes += new_bytes
            if not new_bytes:
                break
        return num_bytes

    def _send(self, data: memoryview) -> int | None:
        """Send data and return the number of bytes sent, or None if the copy has ended."""
        num_bytes = 0
        try:
            while num_bytes < len(data):  # a TLS socket accepts 16 KiB at a time
                num_bytes += self._sink.send(data[num_bytes:])
        except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError):
            pass
        except OSError:
            self._end(is_peaceful=False)
            return None
        return num_bytes

    def _end(self, *, is_peaceful: bool) -> None:
        self.stop()
        self._on_end(is_peaceful)


class Splice:
    """A connection between a caller's socket `near` and a socket `far`, which leads to the server. It owns both
    sockets.

    `near` can be a TLS socket after its handshake. `may_take` returns how many more bytes the caller may send, and
    `admits` whether it may send this data. `on_end` is called once, when both sockets are closed.
    """

    def __init__(
        self,
        near: socket.socket,
        far: socket.socket,
        *,
        may_take: Callable[[], int] = lambda: BLOCK_BYTES,
        admits: Callable[[memoryview], bool] = lambda data: True,
        on_end: Callable[[], None],
    ) -> None:
        self._near, self._far = near, far
        self._on_end = on_end
        self._is_over = False
        self._in = OneWay(near, self._far, may_take=may_take, admits=admits, on_end=self._caller_ended)
        self._out = OneWay(self._far, near, may_take=lambda: BLOCK_BYTES, on_end=lambda _: self.close())
        self._in.start()
        self._out.start()

    @property
    def taken_bytes(self) -> int:
        return self._in.passed_bytes

    @property
    def given_bytes(self) -> int:
        return self._out.passed_bytes

    def stop_taking(self) -> None:
        """Stop reading from the caller. Data from the server is still copied."""
        self._in.stop()

    def close(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        for way in (self._in, self._out):
            way.stop()
        self._far.close()
        self._near.close()
        self._on_end()

    def _caller_ended(self, is_peaceful: bool) -> None:
        """Forward a clean end to the server, which can still send data."""
        try:
            if is_peaceful and not self._is_over:
                self._far.shutdown(socket.SHUT_WR)
                return
        except OSError:
            pass
        self.close()
