"""Bytes of one local connection over paths that may break: what was not acknowledged is sent again on the next path.

    frame     kind:1 | number:8 | payload       number: bytes of payload (DATA), of all received so far (ACK), else 0

Both sides count the bytes that they have handed on, and tell so when a path begins; END counts as one more.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress

from noloco_p2p.errors import CorruptPayload

DATA, ACK, END, PING = range(4)
FRAME = struct.Struct(">BQ")
CHUNK_BYTES = 256 * 1024
WINDOW_BYTES = 4 << 20  # sent and not acknowledged; each side of a connection keeps so much at most
PING_S = 2.0
SILENT_S = 6.0  # a path that brings nothing for so long is broken; gRPC itself gives up after 15 s


class Pipe:
    """One connection. `carry` it over one path after the other until it returns; then, or in any case, `close` it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.received = 0  # bytes handed on to the local end, and one for END
        self._reader = reader
        self._writer = writer
        self._unacked = bytearray()
        self._acked = 0
        self._is_read_out = False  # the local end has written its last
        self._is_through = False  # and the other side has acknowledged it
        self._has_end = False  # the other side has written its last
        self._is_local_gone = False
        self._changed = asyncio.Event()
        self._filling = asyncio.create_task(self._fill())

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, peer_received: int) -> None:
        """Returns when everything is through both ways. Raises OSError, EOFError or CorruptPayload: the path is no
        more, and another one may go on. The path is closed in any case."""
        self._acknowledge(peer_received)
        tasks = [asyncio.create_task(job) for job in (self._send(writer, self._acked), self._receive(reader))]
        pinging = asyncio.create_task(_ping(writer))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in (*tasks, pinging):
                task.cancel()
            await asyncio.gather(*tasks, pinging, return_exceptions=True)
            writer.close()

    def close(self) -> None:
        """Awaits nothing, so that whoever is cancelled on its way out closes it all the same."""
        self._filling.cancel()
        if self.is_done:
            self._writer.close()
        else:  # nobody may read what is still to be written, and the connection would stay
            self._writer.transport.abort()

    @property
    def is_done(self) -> bool:
        return self._is_through and self._has_end

    async def _fill(self) -> None:
        while True:
            while len(self._unacked) >= WINDOW_BYTES:
                await self._change()
            data = b""
            with suppress(OSError):  # reset: the same as ended, for whoever is on the other side
                data = await self._reader.read(CHUNK_BYTES)
            self._unacked += data
            self._is_read_out = not data
            self._notify()
            if not data:
                return

    async def _send(self, writer: asyncio.StreamWriter, position: int) -> None:
        """Acknowledgements, too: one for all that came while the path took nothing, so that they cannot pile up."""
        told = self.received
        while not self.is_done or told < self.received:
            begin = position - self._acked
            if told < self.received:
                told = self.received
                writer.write(FRAME.pack(ACK, told))
            elif chunk := bytes(self._unacked[begin : begin + CHUNK_BYTES]) if begin >= 0 else b"":
                writer.write(FRAME.pack(DATA, len(chunk)) + chunk)
                position += len(chunk)
            elif self._is_read_out and position == self._acked + len(self._unacked) and not self._is_through:
                writer.write(FRAME.pack(END, 0))
                position += 1
            else:
                await self._change()
            await writer.drain()

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while not self.is_done:
            async with asyncio.timeout(SILENT_S):
                kind, number = FRAME.unpack(await reader.readexactly(FRAME.size))
                if kind == DATA and not 0 < number <= CHUNK_BYTES:
                    raise CorruptPayload(f"a tunnel brought a chunk of {number} bytes")
                payload = await reader.readexactly(number) if kind == DATA else b""
            if kind == ACK:
                self._acknowledge(number)
            elif kind in (DATA, END):
                await self._hand_on(payload)
                self._notify()
            elif kind != PING:
                raise CorruptPayload(f"a tunnel brought a frame of kind {kind}")

    async def _hand_on(self, payload: bytes) -> None:
        self.received += len(payload) or 1
        try:
            if payload and not self._is_local_gone:
                self._writer.write(payload)
                await self._writer.drain()
            elif not payload:
                self._has_end = True
                if self._writer.can_write_eof():
                    self._writer.write_eof()
        except OSError:  # the local end has closed; the rest has no reader
            self._is_local_gone = True

    def _acknowledge(self, received: int) -> None:
        """Raises CorruptPayload for more than was sent, or less than was acknowledged before."""
        total = self._acked + len(self._unacked)
        if self._is_through:
            return
        if not self._acked <= received <= total + self._is_read_out:
            raise CorruptPayload(f"a tunnel acknowledges {received} bytes of {self._acked} to {total}")
        self._is_through = received > total
        del self._unacked[: received - self._acked]
        self._acked = min(received, total)
        self._notify()

    async def _change(self) -> None:
        await self._changed.wait()

    def _notify(self) -> None:
        """Wakes everybody who waits now."""
        self._changed.set()
        self._changed = asyncio.Event()


async def _ping(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # the one who reads finds out
        while True:
            writer.write(FRAME.pack(PING, 0))
            await writer.drain()
            await asyncio.sleep(PING_S)
