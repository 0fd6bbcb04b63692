"""Emulate a slow link on loopback with a TCP proxy that delays, jitters and limits traffic, and can cut or stall it.

    async with LinkProxy("127.0.0.1:4000", WEAK_4G) as link:
        directory.addresses["b"] = link.address      # others now reach peer b over its weak link

A proxy above TCP cannot lose packets, because TCP repairs loss. The profiles have the rate and the delay of their
links, not their loss. Loss makes TCP behave nearly as if each connection had its own rate, however many connections
there are. `own_rates` emulates this.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from noloco_p2p.testing.links import BUFFER_S, LinkProfile, Shape

if TYPE_CHECKING:
    from typing import Self

PIECE_BYTES = 16 * 1024
# Without these the kernel buffers megabytes, and the sender believes that they are in flight.
RECEIVE_BYTES = 64 * 1024
SEGMENT_BYTES = 1448  # the sender's buffer is a multiple of it, and loopback would use 64 KiB

Queue = asyncio.Queue[tuple[float, bytes]]  # time at which it is due, data


class _Way:
    """One direction of the link. All connections share its shape, unless each has a shape of its own (`own_rates`)."""

    def __init__(self, make_shape: Callable[[], Shape], *, own_rates: bool) -> None:
        shared = make_shape()
        self.shape = make_shape if own_rates else lambda: shared
        self.num_bytes = 0


class LinkProxy:
    """A proxy for `target` (HOST:PORT). Others dial `address`; the counters count delivered bytes.

    If `own_rates` is true, the rates of the profile apply to each connection, not to all connections together.
    """

    def __init__(self, target: str, profile: LinkProfile, *, own_rates: bool = False, seed: int = 0) -> None:
        host, _, port = target.rpartition(":")
        self.num_connections = 0
        self.address = ""
        self._target = (host, int(port))

        def way(mbit_s: float, seed: int) -> _Way:
            delays = {"delay_ms": profile.delay_ms, "jitter_ms": profile.jitter_ms}
            return _Way(lambda: Shape(mbit_s=mbit_s, seed=seed, **delays), own_rates=own_rates)

        self._down, self._up = way(profile.down_mbit_s, seed), way(profile.up_mbit_s, seed + 1)
        self._flows = asyncio.Event()
        self._flows.set()
        self._is_cut = False
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    @property
    def down_bytes(self) -> int:
        return self._down.num_bytes

    @property
    def num_open(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    @property
    def up_bytes(self) -> int:
        return self._up.num_bytes

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def start(self) -> None:
        listener = _small(socket.socket())
        listener.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._connected, sock=listener)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self.cut()
        if self._server:
            self._server.close()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """Break all connections, and reject new ones until `restore`."""
        self._is_cut = True
        for task, writers in self._connections.items():
            for writer in writers:
                writer.transport.abort()
            task.cancel()

    def stall(self) -> None:
        """Drop all traffic silently until `restore`, as a frozen peer or a lost route does."""
        self._flows.clear()

    def restore(self) -> None:
        """Resume stalled connections, and accept new ones again."""
        self._is_cut = False
        self._flows.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        writers = self._connections[task] = [writer]
        try:
            if not self._is_cut:
                self.num_connections += 1
                await self._carry(reader, writer, writers)
        except (OSError, asyncio.CancelledError):
            pass  # one side has gone, or the link was cut: end both sides
        finally:
            for opened in writers:
                opened.transport.abort()
            del self._connections[task]

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, writers: list[asyncio.StreamWriter]
    ) -> None:
        connection = _small(socket.socket())
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, self._target)
        except BaseException:
            connection.close()
            raise
        target_reader, target_writer = await asyncio.open_connection(sock=connection)
        writers.append(target_writer)
        ways = [(reader, target_writer, self._down), (target_reader, writer, self._up)]
        tasks = [
            asyncio.create_task(step)
            for source, sink, way in ways
            for queue in [Queue()]
            for step in (self._take(source, queue, way.shape()), self._give(queue, sink, way))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, source: asyncio.StreamReader, queue: Queue, shape: Shape) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._flows.wait()
            data = await source.read(PIECE_BYTES)
            queue.put_nowait((shape.due_s(loop.time(), len(data)), data))
            if not data:
                return
            await asyncio.sleep(shape.backlog_s(loop.time()) - BUFFER_S)

    async def _give(self, queue: Queue, sink: asyncio.StreamWriter, way: _Way) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s, data = await queue.get()
            await asyncio.sleep(due_s - loop.time())
            await self._flows.wait()
            if not data:  # the end of this direction; the other may continue
                with contextlib.suppress(OSError):
                    sink.write_eof()
                return
            sink.write(data)
            await sink.drain()
            way.num_bytes += len(data)


def _small(unconnected: socket.socket) -> socket.socket:
    unconnected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    unconnected.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
    return unconnected
