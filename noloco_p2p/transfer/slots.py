"""The slots of a donor: it serves two newcomers at a time and refuses others with BUSY and a time to ask again.

It belongs to the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from noloco_p2p.errors import Refused
from noloco_p2p.gossip.frames import RefuseCode

NUM_SLOTS = 2  # each further upload would slow the others and the swaps of the donor
STALLED_S = 30.0  # an upload that takes no chunk for this long loses its slot to the next caller
FIRST_RETRY_S = 5.0  # before the time of a chunk is known
RETRY_S = (1.0, 60.0)  # bounds of the time that a caller is given


class Upload:
    """One newcomer that is being served."""

    def __init__(self, num_chunks: int, *, now_s: float) -> None:
        self.num_left = num_chunks
        self.moved_s = now_s  # when the last chunk was taken
        self.is_evicted = False


class UploadSlots:
    """`with slots.take(num_chunks) as upload`, then `took(upload)` after each chunk."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uploads: list[Upload] = []
        self._chunk_s: float | None = None  # seconds per chunk of one upload, a moving average

    @contextmanager
    def take(self, num_chunks: int) -> Iterator[Upload]:
        """Raises Refused when no slot is free."""
        now_s = self._clock()
        if len(self._uploads) >= NUM_SLOTS:
            self._evict_stalled(now_s)
        if len(self._uploads) >= NUM_SLOTS:
            raise _busy(f"I am already serving {NUM_SLOTS} newcomers", retry_after_s=self._retry_after_s())
        upload = Upload(num_chunks, now_s=now_s)
        self._uploads.append(upload)
        try:
            yield upload
        finally:
            if not upload.is_evicted:
                self._uploads.remove(upload)

    def took(self, upload: Upload) -> None:
        """Note that the newcomer took a chunk. Raises Refused when its slot was given to another one."""
        if upload.is_evicted:
            sentence = f"you took no chunk for {STALLED_S:.0f} s, so another newcomer has your slot"
            raise _busy(sentence, retry_after_s=self._retry_after_s())
        now_s = self._clock()
        chunk_s, upload.moved_s = now_s - upload.moved_s, now_s
        upload.num_left -= 1
        self._chunk_s = chunk_s if self._chunk_s is None else 0.9 * self._chunk_s + 0.1 * chunk_s

    def _evict_stalled(self, now_s: float) -> None:
        """Take the slot of a stalled upload, which waits in the network and cannot be ended from here."""
        for upload in [upload for upload in self._uploads if now_s - upload.moved_s > STALLED_S]:
            upload.is_evicted = True
            self._uploads.remove(upload)

    def _retry_after_s(self) -> float:
        """The expected time until the upload with the fewest chunks left ends."""
        if self._chunk_s is None or not self._uploads:
            return FIRST_RETRY_S
        least, most = RETRY_S
        return min(max(self._chunk_s * min(upload.num_left for upload in self._uploads), least), most)


def _busy(sentence: str, *, retry_after_s: float) -> Refused:
    return Refused(sentence, code=RefuseCode.BUSY.name, retry_after_s=retry_after_s)
