"""Strangers at the gRPC port: connections that say nothing, or nonsense, or that let their bytes drip."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

from noloco_p2p.testing.patience import PATIENCE_S

JUNK = {
    "noise": os.urandom(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
    "tls": b"\x16\x03\x01\x40\x00" + os.urandom(2048),
    "nothing": b"",
}
PIECE_BYTES = 64 * 1024


async def visit(port: int, data: bytes, *, tls: bool = False) -> asyncio.StreamWriter | None:
    """Connect, say `data` and stay; None when the connection is refused."""
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
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


@asynccontextmanager
async def dripping(port: int, *, after_bytes: int, pause_s: float = 1.0) -> AsyncIterator[int]:
    """The port of a proxy that passes `after_bytes` from the caller as they come, and then one byte a `pause_s`."""
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter | None] = []

    async def forth(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        while data := await reader.read(PIECE_BYTES if passed < after_bytes else 1):
            if passed >= after_bytes:
                await asyncio.sleep(pause_s)
            passed += len(data)
            writer.write(data)
            await writer.drain()

    async def back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, there_writer))
        for coroutine in (forth(reader, there_writer), back(there_reader, writer)):
            task = asyncio.create_task(_quietly(coroutine))
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
        await leave(writers)


async def _quietly(coroutine: Coroutine[None, None, None]) -> None:
    with contextlib.suppress(OSError):
        await coroutine
