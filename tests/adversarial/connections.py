"""Hostile connections to the gRPC port: silent ones, ones that send garbage, and ones that trickle their bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from harness.header_bombs import trusting
from harness.identities import identity_of
from harness.patience import PATIENCE_S

from noloco_p2p.net.session import Session

JUNK = {
    "noise": os.urandom(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
    "tls": b"\x16\x03\x01\x40\x00" + os.urandom(2048),
    "nothing": b"",
}
PIECE_BYTES = 64 * 1024


async def visit(port: int, data: bytes, *, tls: bool = False) -> asyncio.StreamWriter | None:
    """Connect, send `data` and stay connected; return None when the connection is refused."""
    context = trusting(Session(identity_of("visitor"))) if tls else None
    try:
        async with asyncio.timeout(PATIENCE_S):
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(data)
            await writer.drain()
    except (OSError, TimeoutError):
        return None
    return writer


async def leave(writers: list[asyncio.StreamWriter | None]) -> None:
    for writer in writers:
        if writer:
            writer.transport.abort()
    await asyncio.sleep(0)


Copy = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


def dripping(port: int, *, after_bytes: int, pause_s: float = 1.0) -> AbstractAsyncContextManager[int]:
    """Run a proxy that forwards the caller's first `after_bytes` bytes at full speed, then one byte every `pause_s`.

    The context manager returns its port.
    """

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        while data := await reader.read(PIECE_BYTES if passed < after_bytes else 1):
            if passed >= after_bytes:
                await asyncio.sleep(pause_s)
            passed += len(data)
            writer.write(data)
            await writer.drain()

    return _proxy(port, forth=drip)


def elsewhere(port: int, host: str) -> AbstractAsyncContextManager[int]:
    """Run a proxy that calls `port` from the source address `host`, such as 127.0.1.1; the context returns its port."""
    return _proxy(port, forth=_copy, local_addr=(host, 0))


@asynccontextmanager
async def _proxy(port: int, *, forth: Copy, local_addr: tuple[str, int] | None = None) -> AsyncIterator[int]:
    tasks: set[asyncio.Task[None]] = set()

    async def carry(copy: Copy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            try:
                await copy(reader, writer)
            finally:
                writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port, local_addr=local_addr)
        for copying in (carry(forth, reader, there_writer), carry(_copy, there_reader, writer)):
            task = asyncio.create_task(copying)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(PIECE_BYTES):
        writer.write(data)
        await writer.drain()


class Silent:
    """Keeps `num` idle connections open; a connection that the server drops is reopened at once.

    Every second one completes the TLS handshake before it falls silent.
    """

    def __init__(self, port: int, num: int, hosts: list[str]) -> None:
        self.num_opened = 0
        self._port, self._hosts = port, hosts
        self._tasks = [asyncio.create_task(self._hold(index)) for index in range(num)]

    async def all_open(self) -> None:
        """Wait until each connection has been opened once."""
        while self.num_opened < len(self._tasks):  # noqa: ASYNC110 - many tasks count
            await asyncio.sleep(0.05)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _hold(self, index: int) -> None:
        context = trusting(Session(identity_of("silent"))) if index % 2 else None
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", self._port, ssl=context, local_addr=(self._hosts[index % len(self._hosts)], 0)
                )
                self.num_opened += 1
                try:
                    while await reader.read(PIECE_BYTES):
                        pass
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0.05)  # about as long as a distant machine needs to reconnect
