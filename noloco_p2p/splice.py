"""Copy bytes between two sockets in both directions, holding at most one block per direction."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

BLOCK_BYTES = 256 * 1024

# All splices share this block, because it holds no data between two callbacks of the event loop.
_block = memoryview(bytearray(BLOCK_BYTES))


class OneWay:
    """A copy in one direction, from `source` to `sink`.

    It reads only while it holds no unsent data. `may_take` returns how many more bytes may be read. If it returns 0,
    the copy ends. `on_end` is called once, with true if the source ended cleanly.
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
        """Stop copying. Call this before the sockets are closed."""
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
        """Send data and return the number of bytes sent, or None if the copy has ended."""
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


class Splice:
    """A connection between a caller's socket `near` and a socket `far`, which leads to the server. It owns both
    sockets.

    `may_take` returns how many more bytes the caller may send. `on_end` is called once, when both sockets are closed.
    """

    def __init__(
        self,
        near: socket.socket,
        far: socket.socket,
        *,
        may_take: Callable[[], int] = lambda: BLOCK_BYTES,
        on_end: Callable[[], None],
    ) -> None:
        self._near, self._far = near, far
        self._on_end = on_end
        self._is_over = False
        self._in = OneWay(near, self._far, may_take=may_take, on_end=self._caller_ended)
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


def connected(server: Path, *, own_path: Path) -> socket.socket:
    """Connect to the server on the Unix socket `server`, and return the connection.

    The connection is bound to `own_path`, by which the server identifies it. The file at `own_path` is removed right
    away. Raises OSError if the server does not accept the connection.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.bind(str(own_path))
        try:
            connection.connect(str(server))
        finally:
            own_path.unlink()
    except OSError:
        connection.close()
        raise
    return connection
