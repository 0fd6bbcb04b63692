"""The line of newcomers before one donor: two are served at once, the others are told their place and time.

Lives on the event loop. First come, first served; who goes away leaves the line, and who takes nothing loses its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager

from noloco_p2p.errors import Refused
from noloco_p2p.gossip.frames import QueuePlace, RefuseCode

MAX_UPLOADS = 2  # at once: each more would slow the others and the swaps of the donor
MAX_WAITING = 16  # each keeps a connection
TELL_S = 2.0  # how often a newcomer in the line is told its place
STALLED_S = 30.0  # who takes no chunk for so long while others wait has lost its turn
FULL_RETRY_S = 30.0


class Upload:
    """One newcomer in the line, or being served."""

    def __init__(self, num_chunks: int, *, now_s: float) -> None:
        self.num_left = num_chunks
        self.moved_s = now_s  # when the last chunk was taken
        self.turn = asyncio.Event()
        self.is_evicted = False


class UploadLine:
    """`with line.join(n) as upload`, then `places(upload)` until its turn, then `took(upload)` for each chunk."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._line: list[Upload] = []  # the first MAX_UPLOADS of them are being served
        self._chunk_s: float | None = None  # that a chunk takes, with as many uploads as there are

    @contextmanager
    def join(self, num_chunks: int) -> Iterator[Upload]:
        """At the end of the line. Raises Refused when it is full."""
        if len(self._line) >= MAX_UPLOADS + MAX_WAITING:
            sentence = f"{MAX_WAITING} newcomers wait here already"
            raise Refused(sentence, code=RefuseCode.BUSY.name, retry_after_s=FULL_RETRY_S)
        upload = Upload(num_chunks, now_s=self._clock())
        self._line.append(upload)
        self._call_next()
        try:
            yield upload
        finally:
            self._remove(upload)

    async def places(self, upload: Upload) -> AsyncGenerator[QueuePlace]:
        """The place of an upload, at once and every TELL_S; ends when its turn has come."""
        while not upload.turn.is_set():
            self._evict_stalled()
            index = self._line.index(upload)
            if index >= MAX_UPLOADS:
                yield QueuePlace(index - MAX_UPLOADS + 1, self._wait_s(index))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(upload.turn.wait(), TELL_S)
        upload.moved_s = self._clock()

    def took(self, upload: Upload) -> None:
        """The newcomer took a chunk. Raises Refused when it has lost its turn."""
        if upload.is_evicted:
            sentence = f"nothing was taken for {STALLED_S:.0f} s, and others wait"
            raise Refused(sentence, code=RefuseCode.BUSY.name, retry_after_s=FULL_RETRY_S)
        now_s = self._clock()
        chunk_s, upload.moved_s = now_s - upload.moved_s, now_s
        upload.num_left -= 1
        self._chunk_s = chunk_s if self._chunk_s is None else 0.9 * self._chunk_s + 0.1 * chunk_s

    def _wait_s(self, index: int) -> float | None:
        if self._chunk_s is None:
            return None
        return wait_s([upload.num_left for upload in self._line[:index]], chunk_s=self._chunk_s)

    def _evict_stalled(self) -> None:
        """Its generator hangs in the network and cannot be ended from here: its place is given away instead."""
        for upload in self._line[:MAX_UPLOADS]:
            if upload.turn.is_set() and self._clock() - upload.moved_s > STALLED_S:
                upload.is_evicted = True
                self._remove(upload)

    def _remove(self, upload: Upload) -> None:
        if upload in self._line:
            self._line.remove(upload)
            self._call_next()

    def _call_next(self) -> None:
        for upload in self._line[:MAX_UPLOADS]:
            if not upload.turn.is_set():
                upload.moved_s = self._clock()
                upload.turn.set()


def wait_s(chunks_ahead: Sequence[int], *, chunk_s: float) -> float:
    """Until the next one is served: `chunks_ahead` of those before it, in order, MAX_UPLOADS of them at once."""
    free_at_s = [0.0] * MAX_UPLOADS
    for num_chunks in chunks_ahead:
        earliest = free_at_s.index(min(free_at_s))
        free_at_s[earliest] += num_chunks * chunk_s
    return min(free_at_s)
