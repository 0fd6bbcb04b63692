"""`--max-upload` and `--max-download`: one token bucket per direction for all streams of a peer, swaps and fetches.

Upload waits before a message is written, download before the next one is read: HTTP/2 flow control then slows the
sender. Messages are counted; TCP and IP headers (about 4 %) and the small DHT traffic are not. Belongs to the
network thread.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

DEPTH_S = 0.05  # of unused time that may be caught up; more would be a burst
SMALL_BYTES = 4096  # an offer, a Ready or an Abort is charged, but does not wait behind chunks
READ_AHEAD_S = 0.5  # of the limit: what may be in flight unread; a longer round trip would slow the link
MIN_WINDOW_BYTES = 64 * 1024  # the initial window of HTTP/2
MAX_WINDOW_BYTES = 16 << 20


class Throttle:
    """A token bucket, empty at first and DEPTH_S deep, served in order of arrival."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._paid_until_s = asyncio.get_running_loop().time()

    async def take(self, num_bytes: int) -> None:
        """Wait until a message of this size may pass. A caller that is cancelled meanwhile is still charged."""
        now_s = asyncio.get_running_loop().time()
        self._paid_until_s = max(self._paid_until_s, now_s - DEPTH_S) + num_bytes / self.bytes_per_s
        if num_bytes > SMALL_BYTES and self._paid_until_s > now_s:
            await asyncio.sleep(self._paid_until_s - now_s)


@dataclass(frozen=True, slots=True)
class Limits:
    """Both directions of one peer; None = unlimited."""

    upload: Throttle | None = None
    download: Throttle | None = None

    @classmethod
    def of(cls, *, upload_bytes_per_s: float | None, download_bytes_per_s: float | None) -> Limits:
        """Call it on the network thread, once per peer."""
        return cls(
            Throttle(upload_bytes_per_s) if upload_bytes_per_s else None,
            Throttle(download_bytes_per_s) if download_bytes_per_s else None,
        )

    async def sending(self, num_bytes: int) -> None:
        """Await it before a message is written."""
        if self.upload:
            await self.upload.take(num_bytes)

    async def receiving(self, num_bytes: int) -> None:
        """Await it after a message was read, before the next one is."""
        if self.download:
            await self.download.take(num_bytes)

    def options(self) -> list[tuple[str, int]]:
        """gRPC options of every channel and of the server.

        gRPC reads ahead of its caller by a window that it widens as the link allows, to many seconds of a low limit;
        with these options it stays at READ_AHEAD_S.
        """
        if self.download is None:
            return []
        window_bytes = int(READ_AHEAD_S * self.download.bytes_per_s)
        return [
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", min(max(window_bytes, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES)),
        ]


UNLIMITED = Limits()
