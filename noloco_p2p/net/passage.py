"""Bytes of one connection from one socket to another and back, as they come; a block at most is held for each way."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
import sys
from collections.abc import Callable

BLOCK_BYTES = 256 * 1024
# What was sent and not yet acknowledged may fill the link; what waits behind it would delay a ping.
UNSENT_BYTES = 256 * 1024
UNACKNOWLEDGED_MS = 5_000  # then the other machine is gone; gRPC sets the same for its own connections
AT_ONCE = struct.pack("ii", 1, 0)  # for SO_LINGER: closed without a trace in the table of ports
ABSTRACT = "unix-abstract:"

_block = memoryview(bytearray(BLOCK_BYTES))  # of all passages: it holds nothing between two callbacks of the loop


class Way:
    """From `source` to `sink`. Reads only while nothing is held; `on_end` is called once, with whether it was peaceful.

    `may_take`: how many more bytes may come in; none left ends the way.
    """

    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        *,
        may_take: Callable[[], int],
        on_end: Callable[[bool], None],
    ) -> None:
        self.passed_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._source, self._sink = source, sink
        self._may_take = may_take
        self._on_end = on_end
        self._held = b""
        self._is_reading = self._is_writing = False

    def start(self) -> None:
        self._loop.add_reader(self._source, self._read)
        self._is_reading = True

    def stop(self) -> None:
        """Before its sockets are closed."""
        if self._is_reading:
            self._loop.remove_reader(self._source)
        if self._is_writing:
            self._loop.remove_writer(self._sink)
        self._is_reading = self._is_writing = False

    def _read(self) -> None:
        room = min(self._may_take(), BLOCK_BYTES)
        try:
            num_bytes = self._source.recv_into(_block, room) if room > 0 else 0
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            num_bytes = 0
        if not num_bytes:
            self._end(is_peaceful=room > 0)
            return
        self.passed_bytes += num_bytes
        sent = self._send(_block[:num_bytes])
        if sent is not None and sent < num_bytes:
            self._held = bytes(_block[sent:num_bytes])
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

    def _send(self, data: memoryview | bytes) -> int | None:
        """How much was taken; None when the way has ended."""
        try:
            return self._sink.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._end(is_peaceful=False)
            return None

    def _end(self, *, is_peaceful: bool) -> None:
        self.stop()
        self._on_end(is_peaceful)


class Passage:
    """A caller's socket `near`, and a new connection to the server at `behind`; owns both.

    `may_take`: how many more bytes of the caller may pass; `on_end` is called once, when both are closed.
    Raises OSError when this machine has no port or descriptor left.
    """

    def __init__(
        self, near: socket.socket, behind: str, *, may_take: Callable[[], int], on_end: Callable[[], None]
    ) -> None:
        self._near, self._far = near, _connecting(behind)
        self.name = _name(self._far)  # by which the server knows the connection
        self._on_end = on_end
        self._is_over = False
        self._in = Way(near, self._far, may_take=may_take, on_end=self._caller_ended)
        self._out = Way(self._far, near, may_take=lambda: BLOCK_BYTES, on_end=lambda _: self.close())
        self._in.start()
        self._out.start()

    @property
    def taken_bytes(self) -> int:
        return self._in.passed_bytes

    @property
    def given_bytes(self) -> int:
        return self._out.passed_bytes

    def stop_taking(self) -> None:
        """From now on only the server is heard."""
        self._in.stop()

    def close(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        for way in (self._in, self._out):
            way.stop()
        self._far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self._far.close()
        self._near.close()
        self._on_end()

    def _caller_ended(self, is_peaceful: bool) -> None:
        """The server hears of a peaceful end, and says its last words."""
        try:
            if is_peaceful and not self._is_over:
                self._far.shutdown(socket.SHUT_WR)
                return
        except OSError:
            pass
        self.close()


def tune(connection: socket.socket) -> None:
    """A small message goes out at once, little waits behind a slow link, and a machine that is gone is noticed."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_NOTSENT_LOWAT", UNSENT_BYTES), ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS)):
        if hasattr(socket, name):  # macOS has not all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def address_behind() -> str:
    """Where the server itself listens, as gRPC writes addresses: reached from this machine alone.

    On Linux an abstract Unix socket with a name that nobody guesses: it costs less processor time than TCP over
    loopback, which acknowledges and cuts into segments what never leaves this machine.
    """
    return f"{ABSTRACT}noloco-{secrets.token_hex(8)}" if sys.platform == "linux" else "127.0.0.1:0"


def _connecting(behind: str) -> socket.socket:
    """It may not be connected yet; what is sent waits for that."""
    is_unix = behind.startswith(ABSTRACT)
    far = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
    try:
        far.setblocking(False)
        if is_unix:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * BLOCK_BYTES)
            far.bind("")  # the kernel gives it a name
            far.connect("\0" + behind.removeprefix(ABSTRACT))
        else:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BLOCK_BYTES)  # else megabytes would wait here
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            far.bind(("127.0.0.1", 0))
            far.connect_ex(("127.0.0.1", int(behind.rpartition(":")[2])))
    except OSError:
        far.close()
        raise
    return far


def _name(far: socket.socket) -> str:
    """Its own address, as gRPC writes it."""
    address = far.getsockname()
    return f"ipv4:{address[0]}:{address[1]}" if far.family is socket.AF_INET else ABSTRACT + address[1:].decode()
