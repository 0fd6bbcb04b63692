"""Implement `--max-upload` and `--max-download` with one token bucket per direction for all swaps and fetches of a
peer.

An upload waits before a message is written. A download waits before the next message is read, so that HTTP/2 flow
control slows down the sender. Anybody may fetch the state, so a fetch only uploads at the rate that swaps leave, and a
fetch that ends while it waits costs nothing. Only messages are counted; TCP and IP headers (about 4 %) and the small
traffic of the DHT are not. All of this runs on the network thread.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

DEPTH_S = 0.05  # idle time that a sender may make up for later; more would cause bursts
UPLOAD_WAIT_S = 5.0  # after this time, a message of an upload passes even while swaps use the whole rate
SMALL_BYTES = 4096  # a message of up to this size, such as an offer, a Ready or an Abort, is charged but does not wait
# Data that may be in flight, in seconds at the limit; with a longer round-trip time, the limit is not reached.
READ_AHEAD_S = 0.5
MIN_WINDOW_BYTES = 64 * 1024  # the initial window of HTTP/2
MAX_WINDOW_BYTES = 16 << 20


class Throttle:
    """A token bucket that is empty at first and DEPTH_S deep. It serves messages in order of arrival, uploads last."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._loop = asyncio.get_running_loop()
        self._paid_until_s = self._loop.time()
        self._uploads = asyncio.Lock()  # held by the upload that is next

    async def take(self, num_bytes: int) -> None:
        """Wait until a message of this size may be sent. It is charged unless the task is cancelled."""
        try:
            await self.arrived(num_bytes)
        except asyncio.CancelledError:
            self._paid_until_s -= num_bytes / self.bytes_per_s
            raise

    async def take_what_is_left(self, num_bytes: int) -> None:
        """Do the same as `take` once no other message waits, but after UPLOAD_WAIT_S even if one does."""
        if num_bytes <= SMALL_BYTES:
            return await self.take(num_bytes)
        async with self._uploads:
            until_s = self._loop.time() + UPLOAD_WAIT_S
            while (wait_s := min(self._paid_until_s, until_s) - self._loop.time()) > 0:  # noqa: ASYNC110 - swaps go on
                await asyncio.sleep(wait_s)
            await self.take(num_bytes)

    async def arrived(self, num_bytes: int) -> None:
        """Charge a message that has arrived, and wait until the next one may be read."""
        now_s = self._loop.time()
        self._paid_until_s = max(self._paid_until_s, now_s - DEPTH_S) + num_bytes / self.bytes_per_s
        if num_bytes > SMALL_BYTES and self._paid_until_s > now_s:
            await asyncio.sleep(self._paid_until_s - now_s)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a peer in both directions, where None means unlimited."""

    upload: Throttle | None = None
    download: Throttle | None = None

    @classmethod
    def of(cls, *, upload_bytes_per_s: float | None, download_bytes_per_s: float | None) -> Limits:
        """Create the limits of a peer. Call this once per peer, on the network thread."""
        return cls(
            Throttle(upload_bytes_per_s) if upload_bytes_per_s else None,
            Throttle(download_bytes_per_s) if download_bytes_per_s else None,
        )

    async def sending(self, num_bytes: int) -> None:
        """Before a message of a swap is written, wait as long as the upload limit requires."""
        if self.upload:
            await self.upload.take(num_bytes)

    async def uploading(self, num_bytes: int) -> None:
        """Before a message of an answer to a fetch is written, wait until swaps leave enough of the upload limit."""
        if self.upload:
            await self.upload.take_what_is_left(num_bytes)

    async def receiving(self, num_bytes: int) -> None:
        """After a message is read, wait as long as the download limit requires."""
        if self.download:
            await self.download.arrived(num_bytes)

    def options(self) -> list[tuple[str, int]]:
        """Return gRPC options for every channel and for the server.

        gRPC reads ahead of its caller, in a window that it widens as far as the link allows. With a low limit, such a
        window would hold many seconds of data. With these options, it holds READ_AHEAD_S of data.
        """
        if self.download is None:
            return []
        window_bytes = int(READ_AHEAD_S * self.download.bytes_per_s)
        return [
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", min(max(window_bytes, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES)),
        ]


UNLIMITED = Limits()
