"""`--max-upload` and `--max-download`: one token bucket each way for all streams of a peer, swaps and fetches alike.

Upload waits before a message is written, download before the next one is read: HTTP/2 flow control then slows the
sender. Counted are the messages; headers of TCP and IP come on top (about 4 %), and so does the DHT's little traffic.
Lives on the network thread.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

DEPTH_S = 0.05  # of unused time that may be made up for; more would be a burst
SMALL_BYTES = 4096  # an offer, a Ready or an Abort is paid for, and does not wait behind chunks
READ_AHEAD_S = 0.5  # of the cap: what may be on its way unread; a round trip longer than that would slow the link
MIN_WINDOW_BYTES = 64 * 1024  # what HTTP/2 begins with
MAX_WINDOW_BYTES = 16 << 20


class Throttle:
    """A token bucket, empty at first and DEPTH_S deep. Whoever comes first goes first."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._paid_until_s = asyncio.get_running_loop().time()

    async def take(self, num_bytes: int) -> None:
        """Returns when a message of this size may pass. A caller that is cancelled meanwhile has paid all the same."""
        now_s = asyncio.get_running_loop().time()
        self._paid_until_s = max(self._paid_until_s, now_s - DEPTH_S) + num_bytes / self.bytes_per_s
        if num_bytes > SMALL_BYTES and self._paid_until_s > now_s:
            await asyncio.sleep(self._paid_until_s - now_s)


@dataclass(frozen=True, slots=True)
class Limits:
    """Both directions of one peer; None = as fast as the link is."""

    upload: Throttle | None = None
    download: Throttle | None = None

    @classmethod
    def of(cls, *, upload_bytes_per_s: float | None, download_bytes_per_s: float | None) -> Limits:
        """Call it on the network thread, once for a peer."""
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

        gRPC reads ahead of its caller by a window that it widens as the link allows, to many seconds of a low cap; with
        these it stays at READ_AHEAD_S.
        """
        if self.download is None:
            return []
        window_bytes = int(READ_AHEAD_S * self.download.bytes_per_s)
        return [
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", min(max(window_bytes, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES)),
        ]


UNLIMITED = Limits()
