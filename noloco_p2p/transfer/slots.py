"""A donor serves two newcomers at a time, and refuses others as BUSY with a retry time.

Use this module only on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from noloco_p2p.errors import Refused
from noloco_p2p.gossip.frames import RefuseCode

NUM_SLOTS = 2  # each further upload would slow down the others and the donor's swaps
STALLED_S = 30.0  # an upload that accepts no chunk for this long loses its slot to the next caller
FIRST_RETRY_S = 5.0  # used while the duration of a chunk is unknown
RETRY_S = (1.0, 60.0)  # bounds of the retry time in a refusal


class Upload:
    """An upload to one newcomer."""

    def __init__(self, num_chunks: int, *, now_s: float) -> None:
        self.num_left = num_chunks
        self.moved_s = now_s  # when the last chunk was accepted
        self.is_evicted = False


class UploadSlots:
    """The upload slots of a donor.

    Use `with slots.take(num_chunks) as upload`, and call `took(upload)` after each chunk.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uploads: list[Upload] = []
        self._chunk_s: float | None = None  # moving average of the seconds per chunk of one upload

    @contextmanager
    def take(self, num_chunks: int) -> Iterator[Upload]:
        """Occupy a slot for an upload of `num_chunks` chunks. Raises Refused if no slot is free."""
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
        """Record that the newcomer accepted a chunk. Raises Refused if another newcomer has been given its slot."""
        if upload.is_evicted:
            sentence = f"you accepted no chunk for {STALLED_S:.0f} s, so your slot was given to another newcomer"
            raise _busy(sentence, retry_after_s=self._retry_after_s())
        now_s = self._clock()
        chunk_s, upload.moved_s = now_s - upload.moved_s, now_s
        upload.num_left -= 1
        self._chunk_s = chunk_s if self._chunk_s is None else 0.9 * self._chunk_s + 0.1 * chunk_s

    def _evict_stalled(self, now_s: float) -> None:
        """Free the slots of stalled uploads, which wait for the network and cannot be ended from here."""
        for upload in [upload for upload in self._uploads if now_s - upload.moved_s > STALLED_S]:
            upload.is_evicted = True
            self._uploads.remove(upload)

    def _retry_after_s(self) -> float:
        """Return the expected number of seconds until the upload with the fewest remaining chunks ends."""
        if self._chunk_s is None or not self._uploads:
            return FIRST_RETRY_S
        least, most = RETRY_S
        return min(max(self._chunk_s * min(upload.num_left for upload in self._uploads), least), most)


def _busy(sentence: str, *, retry_after_s: float) -> Refused:
    return Refused(sentence, code=RefuseCode.BUSY.name, retry_after_s=retry_after_s)
